"""Evaluation: sample completions of held-out prompts and report their rewards."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atlaslib.data.prompts import as_rows, derive_seed
from atlaslib.errors import ConfigError
from atlaslib.trainers.batch_sizes import share
from atlaslib.trainers.rollouts import Rollout
from atlaslib.trainers.step_metrics import StepMetrics

if TYPE_CHECKING:
    from atlaslib.trainers.grpo import GRPOTrainer


def evaluate(trainer: GRPOTrainer, dataset: Any, prefix: str) -> dict[str, float]:
    """``{prefix}_reward``, its spread, each reward function, lengths and speed; training's own metrics stay untouched."""
    data = trainer.eval_dataset if dataset is None else dataset
    if data is None:
        raise ConfigError("evaluation needs prompts: give eval_dataset to the trainer or to evaluate()")
    if isinstance(data, dict):
        merged: dict[str, float] = {}
        for name, part in data.items():
            merged.update(evaluate(trainer, part, f"{prefix}_{name}"))
        return merged
    training_metrics, trainer.metrics = trainer.metrics, StepMetrics()
    started = time.perf_counter()
    try:
        made = _rollouts(trainer, as_rows(data))
        values = {f"{prefix}_{name}": value for name, value in summarise(made).items()}
        values |= {f"{prefix}_{name}": value for name, value in trainer.evaluation_metrics(made).items()}
    finally:
        trainer.metrics = training_metrics
    values[f"{prefix}_runtime"] = time.perf_counter() - started
    values[f"{prefix}_samples_per_second"] = len(made) / values[f"{prefix}_runtime"]
    trainer.log(values)
    trainer.control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, values)
    return values


def _rollouts(trainer: GRPOTrainer, rows: Sequence[dict[str, Any]]) -> list[Rollout]:
    trainer.sync_sampler()
    numbered = [(index, dict(rows[index])) for index in range(len(rows))]
    mine = share(numbered, trainer.accelerator.process_index, trainer.accelerator.num_processes)
    local = trainer.rollout(
        [row for _, row in mine],
        group_ids=[f"eval-{index}" for index, _ in mine],
        positions=[index for index, _ in mine],
        seed=derive_seed(trainer.config.seed, 0xE7A1),
        num_generations=trainer.config.num_generations_eval,
    )
    trainer.score(local)
    return trainer.gather_rollouts(local)


def summarise(made: Sequence[Rollout]) -> dict[str, float]:
    """Means over the rollouts that have a reward; the others are counted."""
    rewards = [rollout.reward for rollout in made if not math.isnan(rollout.reward)]
    values = {
        "reward": statistics.fmean(rewards) if rewards else math.nan,
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "num_set_aside": float(len(made) - len(rewards)),
        "completion_length": statistics.fmean(len(rollout.completion_ids) for rollout in made) if made else 0.0,
    }
    for name in dict.fromkeys(key for rollout in made for key in rollout.rewards):
        present = [rollout.rewards[name] for rollout in made if not math.isnan(rollout.rewards.get(name, math.nan))]
        if present:
            values[f"rewards/{name}"] = statistics.fmean(present)
    return values
