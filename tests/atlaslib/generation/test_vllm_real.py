"""Against a real vLLM server; an opt-in tier.

Start one from an untied export and name it:

    python -c "from pathlib import Path; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; \\
        from atlaslib.generation.weight_export import export_weights as e; n='MODEL'; e(M.from_pretrained(n), Path('export'), tokenizer=T.from_pretrained(n))"
    VLLM_SERVER_DEV_MODE=1 vllm serve export --port 8100 --dtype float32 --enforce-eager
    ATROPOS_VLLM_PORT=8100 ATROPOS_VLLM_MODEL=export pytest -m vllm tests/atlaslib/generation/test_vllm_real.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from atlaslib.trainers import GRPOConfig, GRPOTrainer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        "ATROPOS_VLLM_PORT" not in os.environ, reason="no vLLM server named (ATROPOS_VLLM_PORT, ATROPOS_VLLM_MODEL)"
    ),
]


def variety(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def test_pushed_weights_are_the_ones_sampled_from(tmp_path: Path) -> None:
    config = GRPOConfig(
        output_dir=str(tmp_path),
        model_name_or_path=os.environ["ATROPOS_VLLM_MODEL"],
        use_vllm_server=True,
        vllm_host="127.0.0.1",
        vllm_port=int(os.environ["ATROPOS_VLLM_PORT"]),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=3,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-4,
        warmup_ratio=0.0,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
    )
    GRPOTrainer(config, variety, train_dataset=[{"prompt": "The sea is"}, {"prompt": "A good day"}]).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(line["policy/mismatch_abs"] for line in lines) < 1e-2
