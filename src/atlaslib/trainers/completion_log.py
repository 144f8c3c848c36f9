"""Completions for people to read: CSV files beside the run, tables for the trackers."""

from __future__ import annotations

import csv
import logging
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atlaslib.data.prompts import derive_seed
from atlaslib.trainers.grpo_config import GRPOConfig
from atlaslib.trainers.rollouts import Rollout

logger = logging.getLogger(__name__)
COLUMNS = ["step", "prompt", "completion", "reward"]


def is_logging_step(config: GRPOConfig, step: int) -> bool:
    """Completions are kept at the steps the trackers get."""
    return step % max(int(config.logging_steps), 1) == 0


def store_completions(made: Sequence[Rollout], config: GRPOConfig, step: int) -> None:
    """``save_completions_probability``: that share of the completions as CSV rows."""
    if not config.save_completions_probability or not is_logging_step(config, step):
        return
    chooser = random.Random(derive_seed(config.seed, step, 77))
    folder = Path(config.output_dir) / "stored_completions"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{step}.csv").open("w", newline="") as file:  # a step done again after a restart counts once
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(COLUMNS)
        for rollout in made:
            if chooser.random() < config.save_completions_probability:
                writer.writerow([step, rollout.prompt, rollout.completion_text, rollout.reward])


def log_completions(made: Sequence[Rollout], config: GRPOConfig, step: int) -> None:
    """``log_completions``: a table in wandb when that tracks the run, and always a log line per completion."""
    if not config.log_completions or not is_logging_step(config, step):
        return
    rows = [[step, str(rollout.prompt), rollout.completion_text, rollout.reward] for rollout in made]
    for _, prompt, completion, reward in rows:
        logger.info("step %d, reward %.4g: %s -> %s", step, reward, prompt, completion)
    run: Any = getattr(sys.modules.get("wandb"), "run", None)
    if run is not None:
        run.log({"completions": sys.modules["wandb"].Table(columns=COLUMNS, data=rows)})
