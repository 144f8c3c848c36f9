"""``SFTTrainer``: plain supervised training on given answers, as a warm start; the same loop, layout and records as GRPO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from atlaslib.data.packing import build_microbatch
from atlaslib.errors import ConfigError
from atlaslib.generation.protocol import SamplingSettings
from atlaslib.generation.transformers_sampler import evaluation_mode
from atlaslib.trainers import run_state
from atlaslib.trainers.batch_sizes import BatchSizes, blank_sample, share
from atlaslib.trainers.grpo import GRPOTrainer
from atlaslib.trainers.rollouts import Rollout
from atlaslib.types import Microbatch, TrainingSample


class SFTTrainer(GRPOTrainer):
    """Cross-entropy on rows with ``prompt`` (text or chat) and ``completion`` (text or one assistant message).

    A step trains ``per_device_train_batch_size x gradient_accumulation_steps x processes`` rows. Settings about sampling, rewards and
    the reference have no part in it; ``beta`` must be 0.

    Example: ``SFTTrainer(model, args=GRPOConfig("out", beta=0.0, num_train_epochs=1), train_dataset=rows, processing_class=tokenizer).train()``
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.beta != 0.0:
            raise ConfigError(f"beta is {self.config.beta}; supervised training has no reference: set beta=0.0")
        if self.service is not None:
            raise ConfigError("supervised training reads its own data set; leave rollout_server_url out")

    def batch_sizes(self) -> BatchSizes:
        """Rows stand alone: a group is one row."""
        config = self.config
        batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * self.accelerator.num_processes
        return BatchSizes(num_generations=1, prompts_per_batch=batch, generation_calls=1)

    def sync_sampler(self) -> None:
        """Nothing is sampled."""

    def rollout(
        self,
        rows: Sequence[dict[str, Any]],
        *,
        group_ids: Sequence[str],
        positions: Sequence[int],
        seed: int,
        num_generations: int,
        settings: SamplingSettings | None = None,
    ) -> list[Rollout]:
        """The rows' own completions, closed with the end token."""
        return [self._given(row, group_id) for row, group_id in zip(rows, group_ids, strict=True)]

    def score(self, made: Sequence[Rollout]) -> None:
        """Nothing is sampled, so nothing is scored; every row trains."""
        for rollout in made:
            rollout.reward = 0.0

    def annotate(self, samples: list[TrainingSample], made: Sequence[Rollout]) -> list[TrainingSample]:
        """Every sample trains by cross-entropy."""
        for sample in samples:
            sample.sft = True
        return samples

    def evaluation_metrics(self, made: Sequence[Rollout]) -> dict[str, float]:
        """``loss``: mean negative log-prob per completion token of the held-out rows, its perplexity, and minus it as the reward."""
        import torch

        size, world = self.config.per_device_eval_batch_size, self.accelerator.num_processes
        mine = [given_sample(rollout) for rollout in share(made, self.accelerator.process_index, world)]
        sums = {"total": 0.0, "count": 0.0}
        with evaluation_mode(self.model), torch.no_grad():
            # as many passes as the largest share needs, on every process: the model may be sharded
            for start in range(0, -(-len(made) // world), size):
                part = mine[start : start + size] or [blank_sample(self.processing_class.pad_token_id)]
                logprobs = self.update.forward_logprobs(self.model, plain_microbatch(part, self)).logprobs[:, 0]
                sums["total"] -= float(logprobs.sum())
                sums["count"] += logprobs.shape[0]
        sums = run_state.sum_over_processes(self.accelerator, sums)
        loss = sums["total"] / max(sums["count"], 1)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "reward": -loss}

    def _given(self, row: dict[str, Any], group_id: str) -> Rollout:
        prompt = self.prompt_encoder.encode(row)
        text = completion_text(row)
        ids = list(self.processing_class(text, add_special_tokens=False)["input_ids"])[
            : self.config.completion_limit - 1
        ]
        return Rollout(
            prompt_ids=prompt.token_ids,
            completion_ids=[*ids, self.processing_class.eos_token_id],
            sampler_logprobs=None,
            versions=[],
            truncated=False,
            temperature=1.0,
            group_id=group_id,
            prompt=row["prompt"],
            completion=row["completion"],
            completion_text=text,
            row=row,
        )


def completion_text(row: dict[str, Any]) -> str:
    """The answer of a row: text, or the content of its only assistant message."""
    completion = row.get("completion")
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list) and len(completion) == 1 and completion[0].get("role") == "assistant":
        return str(completion[0]["content"])
    raise ConfigError(f"a row's completion is {completion!r:.80}; give text or a list of one assistant message")


def given_sample(rollout: Rollout) -> TrainingSample:
    """A sample that carries no advantage, only which tokens are asked about."""
    prompt, completion = len(rollout.prompt_ids), len(rollout.completion_ids)
    return TrainingSample(
        token_ids=[*rollout.prompt_ids, *rollout.completion_ids],
        loss_mask=[False] * prompt + [True] * completion,
        advantages=[0.0] * (prompt + completion),
        reward=0.0,
        temperature=rollout.temperature,
    )


def plain_microbatch(samples: Sequence[TrainingSample], trainer: GRPOTrainer) -> Microbatch:
    """One padded row per sample, on the trainer's device."""
    return build_microbatch(
        samples, layout="padded", pad_id=trainer.processing_class.pad_token_id, device=trainer.accelerator.device
    )
