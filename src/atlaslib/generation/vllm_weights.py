"""What both vLLM samplers need of a trainer: its weights in a folder, a prompt to try them with, its log-probs of given tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atlaslib.data.packing import build_microbatch
from atlaslib.generation.protocol import PROBE_TOKENS
from atlaslib.generation.transformers_sampler import evaluation_mode
from atlaslib.generation.weight_export import export_weights
from atlaslib.types import TrainingSample

if TYPE_CHECKING:
    from atlaslib.generation.vllm_server_sampler import Scorer
    from atlaslib.trainers.grpo import GRPOTrainer


PROBE_PROMPT_TOKENS = 144
"""Longer than a block of vLLM's prefix cache (128 on a CPU), so that the probe sees a cache that was not cleared."""


def probe_ids(config: Any, longest: int | None = None) -> list[int]:
    """The prompt of the probe: the ids from 1 on, as many as help and as the model takes."""
    room = int(longest or getattr(config, "max_position_embeddings", None) or 1024) - PROBE_TOKENS
    return list(range(1, max(2, min(PROBE_PROMPT_TOKENS + 1, config.vocab_size, room))))


class WeightFolder:
    """Writes ``DIR/v{version}`` and keeps the newest only."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self._folder = Path(
            trainer.config.vllm_weights_dir or Path(trainer.config.output_dir) / "vllm_weights"
        ).absolute()

    def write(self, version: int) -> Path:
        """The folder with the present weights."""
        trainer = self._trainer
        target = self._folder / f"v{version}"
        writes = trainer.is_world_process_zero()
        if writes:
            self._folder.mkdir(parents=True, exist_ok=True)
        model = trainer.accelerator.unwrap_model(trainer.model)
        export_weights(model, target, tokenizer=trainer.processing_class, writes=writes)
        if writes:
            for old in self._folder.glob("v*"):
                if old != target:
                    shutil.rmtree(old, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        return target


def trainer_scorer(trainer: GRPOTrainer) -> Scorer:
    """The trainer's own log-probs of a completion."""

    def score(prompt_ids: list[int], completion_ids: list[int], temperature: float) -> list[float]:
        sample = TrainingSample(
            token_ids=[*prompt_ids, *completion_ids],
            loss_mask=[False] * len(prompt_ids) + [True] * len(completion_ids),
            advantages=[0.0] * (len(prompt_ids) + len(completion_ids)),
            reward=0.0,
            temperature=temperature,
        )
        batch = build_microbatch([sample], device=trainer.accelerator.device)
        with evaluation_mode(trainer.model), torch.no_grad():
            result = trainer.update.forward_logprobs(trainer.model, batch)
        return [float(value) for value in result.logprobs[:, 0]]

    return score
