"""Advantages against plain arithmetic."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from atlaslib.algorithms.advantages import compute_advantages, overlong_penalty

REWARDS = [1.0, 0.0, 0.5, 0.5, 2.0, 2.0, 2.0, 2.0]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]


def compute(rewards: list[float], groups: list[int], **options: str) -> list[float]:
    result = compute_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), **options)  # type: ignore[arg-type]
    return [float(value) for value in result.values]


def test_group_relative_with_the_sample_standard_deviation() -> None:
    values = compute(REWARDS, GROUPS)
    mean, std = statistics.fmean(REWARDS[:4]), statistics.stdev(REWARDS[:4])
    assert values[:4] == pytest.approx([(reward - mean) / (std + 1e-4) for reward in REWARDS[:4]], abs=1e-12)
    assert values[4:] == [0.0] * 4


def test_scaling_by_batch_and_not_at_all() -> None:
    centred = [0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert compute(REWARDS, GROUPS, scale="none") == pytest.approx(centred, abs=1e-12)
    spread = statistics.stdev(REWARDS) + 1e-4
    assert compute(REWARDS, GROUPS, scale="batch") == pytest.approx([value / spread for value in centred], abs=1e-12)


def test_leave_one_out_compares_with_the_others() -> None:
    values = compute([3.0, 0.0, 0.0], [0, 0, 0], estimator="rloo")
    assert values == pytest.approx([3.0 - 0.0, 0.0 - 1.5, 0.0 - 1.5])


def test_batch_estimator_ignores_groups() -> None:
    mean, std = statistics.fmean(REWARDS), statistics.stdev(REWARDS)
    assert compute(REWARDS, GROUPS, estimator="batch") == pytest.approx(
        [(reward - mean) / (std + 1e-4) for reward in REWARDS]
    )


def test_missing_rewards_take_no_part() -> None:
    values = compute([1.0, math.nan, 0.0, math.nan], [0, 0, 0, 1])
    assert values == pytest.approx([0.5 / (math.sqrt(0.5) + 1e-4), 0.0, -0.5 / (math.sqrt(0.5) + 1e-4), 0.0])


def test_share_of_groups_that_teach_nothing() -> None:
    result = compute_advantages(torch.tensor(REWARDS), torch.tensor(GROUPS))
    assert result.zero_variance_share == 0.5
    assert result.group_std.tolist() == pytest.approx([statistics.stdev(REWARDS[:4]), 0.0])


@pytest.mark.parametrize("reward", [0.1, 1e6 / 3])
def test_equal_rewards_teach_nothing_whatever_their_mean_is_rounded_to(reward: float) -> None:
    assert compute([reward] * 7, [0] * 7) == [0.0] * 7
    assert compute([reward] * 7, [0] * 7, estimator="rloo") == [0.0] * 7


@pytest.mark.parametrize(
    ("length", "penalty"), [(50, 0.0), (80, 0.0), (90, -0.5), (99, -0.95), (100, -1.0), (120, -1.0)]
)
def test_overlong_penalty_falls_over_the_cache(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_length=100, cache_length=20) == pytest.approx(penalty)
