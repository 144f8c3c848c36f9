"""The embedded inference engine: samples from the very Hugging Face module a trainer optimises.

Read in this order: engine.py (the step), scheduler.py, block_manager.py, sequence.py, model_runner.py, attention.py,
sampling.py; then engine_thread.py, exact.py and, for CUDA, kernels.py and cuda_runner.py.
"""

from __future__ import annotations

from atlaslib.engine.config import EngineConfig, SamplingParams
from atlaslib.engine.engine import Engine
from atlaslib.engine.engine_thread import EngineThread
from atlaslib.engine.sequence import Completion

__all__ = ["Completion", "Engine", "EngineConfig", "EngineThread", "SamplingParams"]
