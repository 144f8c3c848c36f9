"""``GKDTrainer``: on-policy distillation. The student (the policy) samples, the teacher scores the very same tokens.

Two terms, mixed by ``mix`` (0 to 1):

    forward   KL(teacher || student) over the teacher's ``top_k`` candidates at every sampled position   weight 1 - mix
    reverse   log p_teacher - log p_student of the sampled token, less its mean, as that token's advantage     weight mix

The reported reward is minus the estimated reverse KL per token: it rises towards 0 as the student becomes the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from atlaslib.algorithms.logprobs import HeadOptions
from atlaslib.errors import ConfigError
from atlaslib.rewards.reward_calls import on_device
from atlaslib.trainers import model_setup
from atlaslib.trainers.flat_attention import flat_attention
from atlaslib.trainers.grpo import GRPOTrainer
from atlaslib.trainers.grpo_config import GRPOConfig
from atlaslib.trainers.policy import find_decoder, flat_plan, head_options, module_head_logprobs
from atlaslib.trainers.rollouts import Rollout
from atlaslib.trainers.sft import given_sample, plain_microbatch
from atlaslib.types import Microbatch, TrainingSample

ROWS_PER_PASS = 8


class GKDTrainer(GRPOTrainer):
    """Distils ``teacher_model`` (object, folder or hub id; same vocabulary) into the policy on the policy's own samples.

    Example::

        GKDTrainer(student, args=GRPOConfig("out", beta=0.0), train_dataset=prompts, processing_class=tokenizer, teacher_model=teacher).train()
    """

    def __init__(
        self,
        model: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        teacher_model: Any,
        teacher_model_init_kwargs: dict[str, Any] | None = None,
        top_k: int = 32,
        mix: float = 0.5,
        **kwargs: Any,
    ) -> None:
        if not 0.0 <= mix <= 1.0:
            raise ConfigError(f"mix is {mix}; it must lie between 0 (forward KL only) and 1 (reverse KL only)")
        if top_k < 1:
            raise ConfigError(f"top_k is {top_k}; the teacher needs at least one candidate")
        self.top_k, self.mix = top_k, mix
        super().__init__(model, None, args, train_dataset, eval_dataset, **kwargs)
        if self.service is not None:
            raise ConfigError(
                "distillation samples its own prompts; environments send distillation data with their groups instead"
            )
        self.teacher = self._load_teacher(teacher_model, teacher_model_init_kwargs)
        self.update.options = replace(self.update.options, distill_coef=1.0 - mix)

    def score(self, made: Sequence[Rollout]) -> None:
        """The teacher's log-probs and candidates into the rollouts; the reward is minus the reverse KL per token."""
        for start in range(0, len(made), ROWS_PER_PASS):
            part = made[start : start + ROWS_PER_PASS]
            samples = [given_sample(rollout) for rollout in part]
            with (
                on_device(self.teacher, self.accelerator.device, self.config.offload_untrained_models),
                torch.no_grad(),
            ):
                scores = self._teacher_scores(plain_microbatch(samples, self))
            for index, rollout in enumerate(part):
                self._put_scores(rollout, *(tensor[scores[0] == index] for tensor in scores[1:]))

    def annotate(self, samples: list[TrainingSample], made: Sequence[Rollout]) -> list[TrainingSample]:
        """Token advantages (less their mean over the batch: a constant changes the noise, not the direction) and candidates."""
        gaps = [gap for rollout in made for gap in rollout.extra["teacher_gaps"]]
        baseline = sum(gaps) / max(len(gaps), 1)
        for sample, rollout in zip(samples, made, strict=True):
            prompt = len(rollout.prompt_ids)
            sample.advantages = [0.0] * prompt + [self.mix * (gap - baseline) for gap in rollout.extra["teacher_gaps"]]
            if self.mix < 1.0:
                sample.distill_token_ids = [[] for _ in range(prompt)] + rollout.extra["teacher_candidates"]
                sample.distill_logprobs = [[] for _ in range(prompt)] + rollout.extra["teacher_candidate_logprobs"]
        return samples

    def _load_teacher(self, teacher: Any, init_kwargs: dict[str, Any] | None) -> Any:
        if isinstance(teacher, str):
            teacher = model_setup.load_causal_lm(teacher, self.config, init_kwargs)
        elif init_kwargs:
            raise ConfigError(
                "teacher_model_init_kwargs are for a teacher given by name; the trainer was handed a model object"
            )
        own, theirs = self.accelerator.unwrap_model(self.model).config.vocab_size, teacher.config.vocab_size
        if own != theirs:
            raise ConfigError(
                f"the teacher has {theirs} token ids and the student {own}; distillation needs one vocabulary"
            )
        if self.top_k > theirs:
            raise ConfigError(f"top_k is {self.top_k}, but the vocabulary has only {theirs} tokens")
        model_setup.freeze(teacher)
        return teacher if self.config.offload_untrained_models else teacher.to(self.accelerator.device)

    def _teacher_scores(self, batch: Microbatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Per trained token: its sample [T], log-prob [T], candidate ids [T, K] and their log-probs [T, K]."""
        teacher = self.teacher
        with flat_attention(teacher, flat_plan(batch)):
            output = find_decoder(teacher)(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
        hidden = output.last_hidden_state.reshape(-1, output.last_hidden_state.shape[-1]).index_select(
            0, batch.source_index
        )
        head, options = teacher.get_output_embeddings(), head_options(teacher.config)
        size = self.config.logprob_chunk_size or 1024
        parts = [
            self._head_scores(
                head, options, hidden[i : i + size], batch.target_ids[i : i + size], batch.temperature[i : i + size]
            )
            for i in range(0, hidden.shape[0], size)
        ]
        chosen, ids, logprobs = (torch.cat([part[column] for part in parts]) for column in range(3))
        return batch.sample_index, chosen, ids, logprobs

    def _head_scores(
        self, head: Any, options: HeadOptions, hidden: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        divisor = temperature if self.config.unbias_log_probabilities else torch.ones_like(temperature)
        logprobs = module_head_logprobs(head, hidden, divisor, options)
        best = torch.topk(logprobs, self.top_k, dim=-1)
        return logprobs.gather(1, targets.unsqueeze(1))[:, 0], best.indices, best.values

    def _put_scores(self, rollout: Rollout, chosen: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        if rollout.sampler_logprobs is None:
            raise ConfigError("distillation needs the sampler's log-probs; choose another sampler")
        gaps = [theirs - own for theirs, own in zip(chosen.tolist(), rollout.sampler_logprobs, strict=True)]
        rollout.extra["teacher_gaps"] = gaps
        rollout.extra["teacher_candidates"] = ids.tolist()
        rollout.extra["teacher_candidate_logprobs"] = logprobs.tolist()
        rollout.reward = sum(gaps) / max(len(gaps), 1)
        rollout.rewards = {"minus_reverse_kl": rollout.reward}
