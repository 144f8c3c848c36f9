"""A training run that samples with vLLM in its own process, for an interpreter that has vLLM: ``python vllm_in_process_run.py MODEL OUTPUT``."""

from __future__ import annotations

import sys
from typing import Any

from atlaslib.trainers import GRPOConfig, GRPOTrainer

PROMPT = "The sea is calm today, and the boats are coming home. " * 12


def variety(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


if __name__ == "__main__":
    config = GRPOConfig(
        output_dir=sys.argv[2], model_name_or_path=sys.argv[1], use_vllm=True, vllm_dtype="float32", vllm_max_model_len=512,
        enable_prefix_caching=True, per_device_train_batch_size=4, num_generations=4, max_completion_length=8, max_steps=2, temperature=0.7,
        beta=0.0, learning_rate=1e-4, lr_scheduler_type="constant", warmup_ratio=0.0, report_to="none", save_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    GRPOTrainer(config, variety, train_dataset=[{"prompt": PROMPT}]).train()
