"""The embedded inference engine: samples from the very Hugging Face module a trainer optimises.

Read in this order: engine.py (the step), scheduler.py, block_manager.py, sequence.py, model_runner.py, attention.py,
sampling.py; then engine_thread.py and exact.py. What makes it fast on a device is beside it, in cpu/ and cuda/; server.py and
openai_*.py put it on the network.
"""

from __future__ import annotations

from atlaslib.engine.config import EngineConfig, SamplingParams
from atlaslib.engine.engine import Engine
from atlaslib.engine.engine_thread import EngineThread
from atlaslib.engine.sequence import Completion

__all__ = ["Completion", "Engine", "EngineConfig", "EngineThread", "SamplingParams"]
