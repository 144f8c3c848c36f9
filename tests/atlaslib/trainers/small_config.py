"""The settings that small runs on CPU have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atlaslib.trainers.grpo_config import GRPOConfig


def small_config(folder: Path, **changes: Any) -> GRPOConfig:
    values: dict[str, Any] = {
        "beta": 0.0,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "temperature": 1.0,
        "learning_rate": 3e-3,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "warmup_ratio": 0.0,
    }
    return GRPOConfig(output_dir=str(folder), **{**values, **changes})
