"""One GRPO run of a tiny model with everything fixed but what a test varies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atlaslib.models.tiny import tiny_llama
from atlaslib.trainers import GRPOConfig, GRPOTrainer


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(ord(character) % 7 for character in text) / 20 for text in completions]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def run(tmp_path: Path, tiny_tokenizer: Any) -> Callable[..., tuple[torch.Tensor, GRPOTrainer]]:
    """Train two plain SGD steps with ``options`` and return all parameters and the trainer."""

    def train(**options: Any) -> tuple[torch.Tensor, GRPOTrainer]:
        settings: dict[str, Any] = {
            "output_dir": str(tmp_path / str(len(list(tmp_path.iterdir())))),
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 7,
            "max_steps": 2,
            "beta": 0.04,
            "learning_rate": 0.5,
            "optim": "sgd",
            "max_grad_norm": 0.0,
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0.0,
            "weight_decay": 0.0,
            "report_to": [],
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        }
        model = tiny_llama(len(tiny_tokenizer), hidden=32, seed=1, eos_token_id=tiny_tokenizer.eos_token_id)
        rows = [{"prompt": f"{'ab' * n} {n}:"} for n in range(1, 9)]
        trainer = GRPOTrainer(
            model, reward, GRPOConfig(**settings), train_dataset=rows, processing_class=tiny_tokenizer
        )
        trainer.train()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), trainer

    return train
