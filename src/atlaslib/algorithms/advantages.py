"""Advantages from the rewards of groups.

A reward may be NaN: the sample was set aside (its grader failed or did not apply). It gets advantage 0 and takes no part in
the statistics of its group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

ScaleRewards = Literal["group", "batch", "none"]
Estimator = Literal["group", "rloo", "batch"]
STD_FLOOR = 1e-4


@dataclass(kw_only=True, slots=True)
class Advantages:
    """Advantages with the statistics a log line wants."""

    values: torch.Tensor
    """[N] float64; 0 where the reward is missing"""
    group_std: torch.Tensor
    """[number of groups] sample standard deviation of the rewards of each group (0 for fewer than two rewards)"""
    zero_variance_share: float
    """Share of the groups whose rewards are all equal: they teach nothing"""


def compute_advantages(
    rewards: torch.Tensor,
    group_index: torch.Tensor,
    *,
    estimator: Estimator = "group",
    scale: ScaleRewards = "group",
) -> Advantages:
    """Advantage of each sample from ``rewards`` [N] and ``group_index`` [N] (0..groups-1).

    ``group``: reward minus the mean of its group, divided by ``std + 1e-4`` of the group (``scale="group"``), of the whole
    batch (``"batch"``) or by nothing (``"none"``); the standard deviation is the sample one (N-1).
    ``rloo``: reward minus the mean of the *other* rewards of its group, never scaled.
    ``batch``: reward minus the mean of the batch, over ``std + 1e-4`` of the batch.
    """
    rewards = rewards.to(torch.float64)
    present = ~torch.isnan(rewards)
    filled = torch.where(present, rewards, torch.zeros_like(rewards))
    num_groups = int(group_index.max().item()) + 1 if group_index.numel() else 0
    counts = _sum_by_group(present.to(torch.float64), group_index, num_groups)
    means = _sum_by_group(filled, group_index, num_groups) / counts.clamp(min=1)
    centred = torch.where(present, filled - means[group_index], torch.zeros_like(filled))
    group_std = (_sum_by_group(centred**2, group_index, num_groups) / (counts - 1).clamp(min=1)).sqrt()
    equal = group_std <= 1e-12 * (1.0 + means.abs())  # what is left of equal rewards is the rounding of their mean
    centred = torch.where(equal[group_index], torch.zeros_like(centred), centred)
    values = _estimate(filled, present, centred, counts, group_std, group_index, estimator, scale)
    values = torch.where(present, values, torch.zeros_like(values))
    zero_share = float(equal.double().mean().item()) if num_groups else 0.0
    return Advantages(values=values, group_std=group_std, zero_variance_share=zero_share)


def _estimate(
    rewards: torch.Tensor,
    present: torch.Tensor,
    centred: torch.Tensor,
    counts: torch.Tensor,
    group_std: torch.Tensor,
    group_index: torch.Tensor,
    estimator: Estimator,
    scale: ScaleRewards,
) -> torch.Tensor:
    if estimator == "rloo":
        size = counts[group_index]
        return centred * size / (size - 1).clamp(min=1)
    if estimator == "batch":
        kept = rewards[present]
        mean = kept.mean() if kept.numel() else rewards.new_zeros(())
        return (rewards - mean) / (_sample_std(kept) + STD_FLOOR)
    if scale == "group":
        return centred / (group_std[group_index] + STD_FLOOR)
    if scale == "batch":
        return centred / (_sample_std(rewards[present]) + STD_FLOOR)
    return centred


def _sum_by_group(values: torch.Tensor, group_index: torch.Tensor, num_groups: int) -> torch.Tensor:
    return torch.zeros(num_groups, dtype=values.dtype, device=values.device).index_add_(0, group_index, values)


def _sample_std(values: torch.Tensor) -> torch.Tensor:
    return values.std(unbiased=True) if values.numel() > 1 else values.new_zeros(())


def overlong_penalty(length: int, *, max_length: int, cache_length: int) -> float:
    """Soft punishment of DAPO: 0 up to ``max_length - cache_length`` tokens, then falling linearly to -1 at ``max_length``."""
    start = max_length - cache_length
    if length <= start:
        return 0.0
    if length >= max_length:
        return -1.0
    return (start - length) / cache_length
