"""GRPOTrainer in process: it learns, and the parts of a step do what they say."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from atlaslib.errors import ConfigError
from atlaslib.trainers import GRPOConfig, GRPOTrainer


def read_metrics(folder: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def rise(metrics: list[dict[str, float]]) -> float:
    rewards = [line["reward"] for line in metrics]
    return statistics.fmean(rewards[-3:]) - statistics.fmean(rewards[:3])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns_in_process(seed: int, small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any, letters: Any) -> None:
    config = make_config(max_steps=30, seed=seed, logging_steps=100)
    GRPOTrainer(small_model(seed), letters, config, train_dataset=rows, processing_class=tiny_tokenizer).train()
    assert rise(read_metrics(config.output_dir)) > 0.3
