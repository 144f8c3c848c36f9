"""The update: samples to microbatches to log-probs to the loss, with the reference beside the policy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import DistributedType

from atlaslib.algorithms.losses import LossResult, TokenStreams, policy_loss
from atlaslib.data.packing import build_microbatch
from atlaslib.errors import ConfigError
from atlaslib.rewards.reward_calls import on_device
from atlaslib.trainers import batch_sizes, model_setup
from atlaslib.trainers.choices import loss_options
from atlaslib.trainers.compiled import CompiledModules
from atlaslib.trainers.flat_attention import flat_attention
from atlaslib.trainers.grpo_config import GRPOConfig
from atlaslib.trainers.policy import PolicyForward, adapter_disabled, flat_plan
from atlaslib.trainers.step_metrics import StepMetrics
from atlaslib.types import Microbatch, StepTotals, TrainingSample

SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED)
MicroStep = list[Microbatch]
"""The pieces of one micro-step; each has a backward pass of its own."""


class PolicyUpdate:
    """Everything between training samples and gradients that does not change during a run."""

    def __init__(
        self, *, accelerator: Any, config: GRPOConfig, reference: Any, pad_id: int, metrics: Callable[[], StepMetrics]
    ) -> None:
        self._accelerator, self._config, self._pad_id, self._metrics = accelerator, config, pad_id, metrics
        if config.exact and accelerator.distributed_type in SHARDING:
            raise ConfigError("exact=True needs the whole weights in every process; leave FSDP and DeepSpeed out")
        self.reference = reference
        self.forward_logprobs = PolicyForward(
            unwrap=accelerator.unwrap_model,
            chunk_size=config.logprob_chunk_size,
            at_temperature=config.unbias_log_probabilities,
            entropy_gradient=config.entropy_coef != 0.0,
            exact=config.exact,
            around=CompiledModules() if _compiles(config, accelerator) else contextlib.nullcontext,
        )
        self.options = loss_options(config)
        self.totals = StepTotals(num_sequences=1, num_tokens=1, num_micro_steps=1)
        if reference is not None and not config.offload_untrained_models:
            reference.to(accelerator.device)

    def micro_steps(self, samples: list[TrainingSample], count: int, model: Any) -> list[MicroStep]:
        """This process's share of the batch as ``count`` micro-steps; notes what the loss is divided by."""
        world = self._accelerator.num_processes
        needed = batch_sizes.contributing(samples, self._config)
        self._metrics().put("train/skipped_share", 1.0 - len(needed) / max(len(samples), 1))
        self.totals = StepTotals(
            num_sequences=float(len(samples)),
            num_tokens=float(sum(sample.num_trained_tokens for sample in samples)),
            num_micro_steps=float(count * world),
        )
        mine = batch_sizes.cut(needed, self._config, rank=self._accelerator.process_index, world=world, count=count)
        return [[self._layout(piece, model) for piece in part] for part in mine]

    def _layout(self, samples: list[TrainingSample], model: Any) -> Microbatch:
        device = self._accelerator.device
        batch = build_microbatch(
            samples or [batch_sizes.blank_sample(self._pad_id)],
            layout=batch_sizes.choose_layout(self._config.packing, samples, self._accelerator.unwrap_model(model)),
            pad_id=self._pad_id,
            device=device,
        )
        self._metrics().put("train/row_tokens", float(batch.num_input_tokens))
        return batch

    def attention_of(self, model: Any, batch: Microbatch) -> contextlib.AbstractContextManager[None]:
        """For a backward pass that runs forward passes again (gradient checkpointing): the attention of ``batch``."""
        return flat_attention(self._accelerator.unwrap_model(model), flat_plan(batch))

    def loss(self, model: Any, batch: Microbatch, *, num_micro_step_tokens: int | None = None) -> LossResult:
        """The loss of one piece as its share of the step; ``num_micro_step_tokens``: of all pieces of its micro-step."""
        result = self.forward_logprobs(model, batch, with_entropy=True)
        ref_logprobs = self._reference_logprobs(model, batch)
        if batch.num_trained_tokens == 0:
            return LossResult(loss=result.logprobs.sum() * 0.0)
        logprobs = result.logprobs[:, 0]
        if batch.old_logprobs is None:
            # the first pass over a batch happens before any update on it
            batch.old_logprobs = logprobs.detach()
        streams = TokenStreams(
            logprobs=logprobs,
            old_logprobs=self._ratio_denominator(batch),
            sampler_logprobs=batch.sampler_logprobs,
            advantages=batch.advantages,
            sample_index=batch.sample_index,
            sample_lengths=batch.sample_lengths,
            sft=batch.sft,
            entropy=result.entropy,
            ref_logprobs=ref_logprobs,
            distill_policy_logprobs=None if batch.distill_ids is None else result.logprobs[:, 1:],
            distill_teacher_logprobs=batch.distill_logprobs,
        )
        return policy_loss(streams, self.options, replace(self.totals, num_micro_step_tokens=num_micro_step_tokens))

    def _ratio_denominator(self, batch: Microbatch) -> torch.Tensor:
        """[T] the sampler's log-probs where known; with an importance correction the trainer's own before the update."""
        assert batch.old_logprobs is not None
        if self._config.importance_correction != "none":
            return batch.old_logprobs
        return torch.where(torch.isnan(batch.sampler_logprobs), batch.old_logprobs, batch.sampler_logprobs)

    def _reference_logprobs(self, model: Any, batch: Microbatch) -> torch.Tensor | None:
        """[T] of the reference; kept over the iterations on a batch. None when beta is 0."""
        if self._config.beta == 0.0:
            return None
        if batch.ref_logprobs is None:
            given = batch.given_ref_logprobs
            missing = torch.isnan(given)
            needed = bool(missing.any()) or self._reference_is_sharded
            computed = self._compute_reference(model, batch) if needed else given
            batch.ref_logprobs = torch.where(missing, computed, given)
        return batch.ref_logprobs

    @property
    def _reference_is_sharded(self) -> bool:
        """The policy's own weights without the adapter: all processes run the pass, also those whose piece does not need it."""
        return self.reference is None and self._accelerator.distributed_type in SHARDING

    def _compute_reference(self, model: Any, batch: Microbatch) -> torch.Tensor:
        inner = self._accelerator.unwrap_model(model)
        with torch.no_grad(), self._metrics().time("reference"):
            if self.reference is not None:
                with on_device(self.reference, self._accelerator.device, self._config.offload_untrained_models):
                    return self.forward_logprobs(self.reference, batch).logprobs[:, 0]
            if model_setup.has_adapter(inner):
                with adapter_disabled(inner):
                    return self.forward_logprobs(model, batch).logprobs[:, 0]
        raise ConfigError("beta is above 0 but there is no reference model")


def _compiles(config: GRPOConfig, accelerator: Any) -> bool:
    """Compiled kernels may differ in the last bits between a run and its continuation: not for deterministic runs."""
    if config.compile_modules is not None:
        return config.compile_modules
    alone_on_gpu = accelerator.device.type == "cuda" and accelerator.num_processes == 1
    return alone_on_gpu and not config.gradient_checkpointing and not config.deterministic
