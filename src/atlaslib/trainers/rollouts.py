"""Rollouts made in this process: prompts to completions to rewards to training samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from atlaslib.algorithms.advantages import Estimator, ScaleRewards, compute_advantages, overlong_penalty
from atlaslib.data.prompts import Prompt, derive_seed
from atlaslib.generation.protocol import Request, SampledCompletion, Sampler, SamplingSettings
from atlaslib.rewards.reward_calls import RewardInputs, RewardTable
from atlaslib.trainers.step_metrics import StepMetrics
from atlaslib.types import TrainingSample


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One completion with everything a reward function or the trainer may ask about."""

    prompt_ids: list[int]
    """exactly the tokens the sampler got"""
    completion_ids: list[int]
    sampler_logprobs: list[float] | None
    versions: list[int]
    truncated: bool
    temperature: float
    group_id: str
    prompt: Any
    """what reward functions see: text, or messages for chat data"""
    completion: Any
    completion_text: str
    row: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    """further columns for reward functions (a teacher puts every role's text here)"""
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = math.nan


def sample_rollouts(
    prompts: Sequence[Prompt],
    *,
    sampler: Sampler,
    settings: SamplingSettings,
    tokenizer: Any,
    num_generations: int,
    seed: int,
    group_ids: Sequence[str],
    positions: Sequence[int],
    shuffle: bool = False,
) -> list[Rollout]:
    """``num_generations`` rollouts per prompt, grouped by prompt, in order.

    ``positions`` number the prompts over all processes: the seed of a completion depends on that, not on who samples it.
    """
    requests = [
        Request(prompt_ids=prompt.token_ids, n=num_generations, seed=derive_seed(seed, position))
        for prompt, position in zip(prompts, positions, strict=True)
    ]
    order = list(range(len(requests)))
    if shuffle and requests:
        generator = torch.Generator().manual_seed(derive_seed(seed, -1))
        order = torch.randperm(len(requests), generator=generator).tolist()
    outputs: dict[int, list[SampledCompletion]] = {}
    for place, completions in zip(order, sampler.generate([requests[i] for i in order], settings), strict=True):
        outputs[place] = completions
    return [
        make_rollout(prompt, completion, tokenizer=tokenizer, settings=settings, group_id=group_ids[index])
        for index, prompt in enumerate(prompts)
        for completion in outputs[index]
    ]


def make_rollout(
    prompt: Prompt, completion: SampledCompletion, *, tokenizer: Any, settings: SamplingSettings, group_id: str
) -> Rollout:
    """A rollout from one prompt and one completion of it."""
    text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    shown = prompt.assistant_prefix + text
    return Rollout(
        prompt_ids=prompt.token_ids,
        completion_ids=completion.token_ids,
        sampler_logprobs=completion.logprobs,
        versions=completion.versions,
        truncated=completion.finish_reason == "length",
        temperature=settings.temperature,
        group_id=group_id,
        prompt=prompt.row["prompt"],
        completion=[{"role": "assistant", "content": shown}] if prompt.is_chat else text,
        completion_text=shown,
        row=prompt.row,
    )


def reward_inputs(rollouts: Sequence[Rollout], *, all_columns: bool = True) -> RewardInputs:
    """The arguments of the reward functions, one entry per rollout."""
    names: list[str] = []
    for rollout in rollouts:
        names += [n for n in rollout.row if n not in {"prompt", "completion"} and n not in names]
    columns = {name: [rollout.row.get(name) for rollout in rollouts] for name in names} if all_columns else {}
    for name in dict.fromkeys(key for rollout in rollouts for key in rollout.extra):
        columns[name] = [rollout.extra.get(name) for rollout in rollouts]
    return RewardInputs(
        prompts=[rollout.prompt for rollout in rollouts],
        completions=[rollout.completion for rollout in rollouts],
        completion_ids=[rollout.completion_ids for rollout in rollouts],
        columns=columns,
    )


def apply_rewards(rollouts: Sequence[Rollout], table: RewardTable) -> None:
    """Write the rewards into the rollouts."""
    for rollout, values, total in zip(rollouts, table.values, table.totals, strict=True):
        rollout.rewards = dict(zip(table.names, values, strict=True))
        rollout.reward = total


def shape_overlong(rollouts: Sequence[Rollout], *, max_length: int, cache_length: int) -> None:
    """Add DAPO's soft overlong punishment to the rewards."""
    for rollout in rollouts:
        rollout.reward += overlong_penalty(
            len(rollout.completion_ids), max_length=max_length, cache_length=cache_length
        )


@dataclass(kw_only=True, slots=True)
class ScoredRollouts:
    """Samples with advantages, and what the log says about their rewards."""

    samples: list[TrainingSample]
    reward_std: float
    zero_variance_share: float
    num_set_aside: int


def to_training_samples(
    rollouts: Sequence[Rollout], *, estimator: Estimator, scale: ScaleRewards, mask_truncated: bool
) -> ScoredRollouts:
    """Group-relative advantages; rollouts without a reward train nothing."""
    group_numbers: dict[str, int] = {}
    index = torch.tensor([group_numbers.setdefault(r.group_id, len(group_numbers)) for r in rollouts], dtype=torch.long)
    rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    advantages = compute_advantages(rewards, index, estimator=estimator, scale=scale)
    samples = [
        _to_sample(rollout, float(advantage), mask_truncated)
        for rollout, advantage in zip(rollouts, advantages.values, strict=True)
        if not math.isnan(rollout.reward)
    ]
    return ScoredRollouts(
        samples=samples,
        reward_std=float(advantages.group_std.mean()) if len(group_numbers) else 0.0,
        zero_variance_share=advantages.zero_variance_share,
        num_set_aside=len(rollouts) - len(samples),
    )


def _to_sample(rollout: Rollout, advantage: float, mask_truncated: bool) -> TrainingSample:
    prompt, completion = len(rollout.prompt_ids), len(rollout.completion_ids)
    trained = not (mask_truncated and rollout.truncated)
    logprobs = rollout.sampler_logprobs
    return TrainingSample(
        token_ids=[*rollout.prompt_ids, *rollout.completion_ids],
        loss_mask=[False] * prompt + [trained] * completion,
        sampler_logprobs=None if logprobs is None else [math.nan] * prompt + list(logprobs),
        advantages=[0.0] * prompt + [advantage] * completion,
        reward=rollout.reward,
        temperature=rollout.temperature,
        policy_versions=list(rollout.versions),
        group_id=rollout.group_id,
        truncated=rollout.truncated,
    )


def drop_equal_groups(made: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts of groups whose rewards differ; the others teach nothing."""
    seen: dict[str, set[float]] = {}
    for rollout in made:
        if not math.isnan(rollout.reward):
            seen.setdefault(rollout.group_id, set()).add(rollout.reward)
    return [rollout for rollout in made if len(seen.get(rollout.group_id, set())) > 1]


def log_rewards(metrics: StepMetrics, made: Sequence[Rollout]) -> None:
    """Mean reward, and per reward function."""
    present = [rollout.reward for rollout in made if not math.isnan(rollout.reward)]
    if present:
        metrics.put("reward", sum(present) / len(present))
    for name in dict.fromkeys(key for rollout in made for key in rollout.rewards):
        values = [rollout.rewards[name] for rollout in made if not math.isnan(rollout.rewards.get(name, math.nan))]
        if values:
            metrics.put(f"rewards/{name}", sum(values) / len(values))


def drop_stale(made: Sequence[Rollout], *, version: int, bound: int) -> list[Rollout]:
    """The rollouts whose oldest token is at most ``bound`` versions old."""
    return [rollout for rollout in made if not rollout.versions or version - min(rollout.versions) <= bound]
