"""The trainers. Names are loaded when first used, so that command lines can parse before torch is imported."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "GRPOConfig": "atlaslib.trainers.grpo_config",
    "GRPOTrainer": "atlaslib.trainers.grpo",
    "TeacherGRPOTrainer": "atlaslib.trainers.teacher_trainers",
    "GKDTrainer": "atlaslib.trainers.gkd",
    "SFTTrainer": "atlaslib.trainers.sft",
}
__all__ = ["GKDTrainer", "GRPOConfig", "GRPOTrainer", "SFTTrainer", "TeacherGRPOTrainer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
