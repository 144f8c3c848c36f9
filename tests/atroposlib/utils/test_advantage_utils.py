"""Advantages: ndarrays are numbers too, equal rewards have no spread, returns are discounted from the end."""

from __future__ import annotations

import math

import numpy as np
import pytest

from atroposlib.utils.advantages import (
    allclose_to_first,
    compute_discounted_returns,
    compute_grpo_process_supervision_advantages,
    compute_stats,
)


def test_allclose_to_first_is_a_python_bool_or_a_vector() -> None:
    assert allclose_to_first([1.0, 1.0 + 1e-9]) is True
    assert allclose_to_first([1.0, 1.1]) is False
    vector = allclose_to_first([1.0, 1.1, 1.0], return_vector=True)
    assert isinstance(vector, np.ndarray)
    assert vector.tolist() == [True, False, True]


def test_allclose_to_first_nan_and_rows() -> None:
    assert allclose_to_first([math.nan, math.nan]) is False
    assert allclose_to_first([math.nan, math.nan], equal_nan=True) is True
    assert allclose_to_first(np.array([[1.0, 2.0], [1.0, 2.0]])) is True
    assert allclose_to_first(np.array([[1.0, 2.0], [1.0, 3.0]]), return_vector=True).tolist() == [True, False]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "data", [[1, 2, 3, [4, 5]], np.array([1.0, 2, 3, 4, 5]), [np.array([1, 2]), [3, (4, np.float32(5))]]]
)
def test_compute_stats_of_nested_lists_and_arrays(data: object) -> None:
    assert compute_stats(data) == {"mean": 3.0, "var": 2.0}


@pytest.mark.parametrize("data", [[], np.array([]), ["a"], [None]])
def test_compute_stats_refuses(data: object) -> None:
    with pytest.raises(ValueError):
        compute_stats(data)


def test_equal_floats_have_exactly_no_variance() -> None:
    assert compute_stats([0.1, 0.1, 0.1])["var"] == 0.0


def test_discounted_returns() -> None:
    assert compute_discounted_returns(np.array([1.0, 1.0, 1.0]), 0.9) == pytest.approx([2.71, 1.9, 1.0])
    from_list = compute_discounted_returns([1, 2, 3], 0.0)
    assert from_list.dtype == np.float32
    assert from_list.tolist() == [1.0, 2.0, 3.0]
    assert compute_discounted_returns(np.array([1, 1]), 0.5).tolist() == [1.5, 1.0]


@pytest.mark.parametrize(("gamma", "expected"), [(None, [[-3, -1, 0], [3, 2]]), (0.9, [[-2.9, -1, 0], [2.8, 2]])])
def test_process_supervision(gamma: float | None, expected: list[list[float]]) -> None:
    advantages = compute_grpo_process_supervision_advantages([[1, 2, 3], [4, 5]], gamma=gamma)
    for got, want in zip(advantages, expected, strict=True):
        assert got == pytest.approx([value / math.sqrt(2) for value in want], abs=1e-6)


def test_equal_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="drop this group"):
        compute_grpo_process_supervision_advantages([[0.1, 0.1], [0.1]])
