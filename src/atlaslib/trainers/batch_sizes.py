"""How a batch is cut: groups per batch, shares per process, micro-steps, pieces of a backward pass, layout of rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from atlaslib.data.packing import Layout, split_evenly, untrained_prefix
from atlaslib.data.rollout_source import staleness
from atlaslib.errors import ConfigError
from atlaslib.trainers.flat_attention import supports_flat
from atlaslib.trainers.grpo_config import GRPOConfig
from atlaslib.trainers.step_metrics import StepMetrics
from atlaslib.types import TrainingSample

Item = TypeVar("Item")


@dataclass(kw_only=True, slots=True, frozen=True)
class BatchSizes:
    """The numbers one optimizer step is made of, over all processes."""

    num_generations: int
    prompts_per_batch: int
    generation_calls: int
    """Generation rounds that make one batch"""

    @property
    def sequences_per_batch(self) -> int:
        return self.num_generations * self.prompts_per_batch

    @classmethod
    def of(cls, config: GRPOConfig, *, num_processes: int) -> BatchSizes:
        """Check that groups fit into batches and rounds."""
        batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * num_processes
        group = config.num_generations if config.num_generations is not None else batch
        described = (
            f"per_device_train_batch_size ({config.per_device_train_batch_size}) x gradient_accumulation_steps "
            f"({config.gradient_accumulation_steps}) x processes ({num_processes}) = {batch}"
        )
        if group < 2 or batch % group:
            raise ConfigError(
                f"num_generations ({group}) must be at least 2 and divide the completions of a step: {described}"
            )
        calls = 1
        if config.generation_aggregation_steps is not None:
            calls = config.gradient_accumulation_steps // config.generation_aggregation_steps
            if (batch // calls) % group:
                raise ConfigError(
                    f"a generation round of {batch // calls} completions does not hold whole groups of {group}; "
                    f"raise generation_aggregation_steps ({config.generation_aggregation_steps}) or lower num_generations"
                )
        return cls(num_generations=group, prompts_per_batch=batch // group, generation_calls=calls)


def share(items: Sequence[Item], rank: int, world: int) -> list[Item]:
    """The contiguous part of ``items`` that process ``rank`` of ``world`` takes; sizes differ by at most one."""
    return list(items[rank * len(items) // world : (rank + 1) * len(items) // world])


def cut(
    samples: Sequence[TrainingSample], config: GRPOConfig, *, rank: int, world: int, count: int
) -> list[list[list[TrainingSample]]]:
    """What process ``rank`` of ``world`` trains on: ``count`` micro-steps of pieces.

    A micro-step has equally many pieces on every process, some of them empty: the processes of a sharded model run every pass together.
    """
    of_all = [[pieces(part, config) for part in split_evenly(share(samples, r, world), count)] for r in range(world)]
    most = [max(map(len, parts)) for parts in zip(*of_all, strict=True)]
    return [part + [[]] * (number - len(part)) for part, number in zip(of_all[rank], most, strict=True)]


def pieces(samples: list[TrainingSample], config: GRPOConfig) -> list[list[TrainingSample]]:
    """The micro-step as pieces with a backward pass each (``backprop_accumulation_*``); never empty."""
    size = config.backprop_accumulation_micro_batch_size
    count = config.backprop_accumulation_steps or (1 if size is None else -(-max(len(samples), 1) // size))
    parts = [part for part in split_evenly(samples, count) if part]
    return parts or [[]]


def contributing(samples: list[TrainingSample], config: GRPOConfig) -> list[TrainingSample]:
    """The samples that can change the gradient; all of them when a term applies to every token, or the loss averages locally."""
    if not config.skip_zero_advantages or config.beta or config.entropy_coef or config.loss_type == "bnpo":
        return samples
    return [sample for sample in samples if sample.sft or sample.distill_logprobs is not None or _has_advantage(sample)]


def _has_advantage(sample: TrainingSample) -> bool:
    return any(advantage and trained for advantage, trained in zip(sample.advantages, sample.loss_mask, strict=True))


def blank_sample(pad_id: int) -> TrainingSample:
    """A sample that trains nothing, for a process that has no sample but must take part in the step."""
    return TrainingSample(token_ids=[pad_id, pad_id], loss_mask=[False, False], advantages=[0.0, 0.0], reward=0.0)


def choose_layout(packing: str, samples: Sequence[TrainingSample], model: Any) -> Layout:
    """``auto``: the layout whose linear layers see the fewest tokens, padded rows when the others save less than a tenth."""
    if packing == "padded" or not samples:
        return "padded"
    if not supports_flat(model):
        if packing != "auto":
            raise ConfigError(
                f"packing={packing!r} needs plain causal attention; {type(model).__name__} has another kind: use 'padded'"
            )
        return "padded"
    if packing != "auto":
        return packing  # type: ignore[return-value]
    padded = len(samples) * max(len(sample.token_ids) for sample in samples)
    distinct = {(sample.group_id, *sample.token_ids[: untrained_prefix(sample)]) for sample in samples}
    shared = sum(len(key) - 1 for key in distinct) + sum(len(s.token_ids) - untrained_prefix(s) for s in samples)
    return "shared_prefix" if shared < 0.9 * padded else "padded"


def log_samples(metrics: StepMetrics, samples: Sequence[TrainingSample], version: int) -> None:
    """Lengths, truncation and staleness of the samples of a step."""
    lengths = [sample.num_trained_tokens for sample in samples]
    if not lengths:
        return
    metrics.put("completion_length", statistics.fmean(lengths))
    metrics.put("completions/min_length", float(min(lengths)))
    metrics.put("completions/max_length", float(max(lengths)))
    metrics.put("completions/truncated_share", statistics.fmean(sample.truncated for sample in samples))
    metrics.put("train/num_tokens", float(sum(len(sample.token_ids) for sample in samples)))
    metrics.put("train/num_trained_tokens", float(sum(lengths)))
    metrics.put("train/num_samples", float(len(samples)))
    ages = [staleness(sample, version) for sample in samples if sample.policy_versions]
    if ages:
        metrics.put("rollout/staleness_mean", statistics.fmean(ages))
        metrics.put("rollout/staleness_max", float(max(ages)))


def log_sums(metrics: StepMetrics, sums: dict[str, float]) -> None:
    """Token means from the sums of the loss."""
    if "loss" in sums:
        metrics.put("train/loss", sums["loss"])
    tokens, known = sums.get("tokens", 0.0), sums.get("known", 0.0)
    if not tokens:
        return
    metrics.put("policy/ratio_mean", sums["ratio"] / tokens)
    metrics.put("policy/clip_low_share", sums["clip_low"] / tokens)
    metrics.put("policy/clip_high_share", sums["clip_high"] / tokens)
    metrics.put("policy/logprob_mean", sums["logprobs"] / tokens)
    for name, shown in (("entropy", "policy/entropy"), ("kl", "kl"), ("distill", "train/distill_kl")):
        if name in sums:
            metrics.put(shown, sums[name] / tokens)
    if "importance_weight" in sums:
        metrics.put("policy/importance_weight_mean", sums["importance_weight"] / tokens)
        metrics.put("policy/importance_masked_share", sums["importance_masked"] / tokens)
    if known:
        metrics.put("policy/mismatch_kl", sums["mismatch_kl"] / known)
        metrics.put("policy/mismatch_abs", sums["mismatch_abs"] / known)
