"""Statistics, discounted returns and process-supervision advantages on ragged lists of rewards (numpy only)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

NumpyArrayLike: TypeAlias = "NDArray[Any] | Sequence[float] | Sequence[Sequence[float]]"
BoolVector: TypeAlias = "NDArray[np.bool_]"


def allclose_to_first(
    values: NumpyArrayLike, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False, return_vector: bool = False
) -> bool | BoolVector:
    """Whether every entry of ``values`` is close to the first one.

    Entries may be numbers or arrays of one shape; ``return_vector`` gives one verdict per entry instead.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 0:
        raise ValueError(f"allclose_to_first needs a sequence, got the single value {values!r}")
    if array.shape[0] == 0:
        return np.zeros(0, dtype=np.bool_) if return_vector else True
    close = np.isclose(array, array[0], rtol=rtol, atol=atol, equal_nan=equal_nan)
    per_entry: BoolVector = close.reshape(close.shape[0], -1).all(axis=1)
    return per_entry if return_vector else bool(per_entry.all())


def compute_stats(data: Any) -> dict[str, float]:
    """Mean and population variance over every number in arbitrarily nested lists, tuples and arrays.

    Two passes, so that equal values give a variance of exactly zero and never a negative one.
    """
    numbers = list(_flatten(data))
    if not numbers:
        raise ValueError("compute_stats got no numbers; pass at least one reward")
    mean = math.fsum(numbers) / len(numbers)
    if min(numbers) == max(numbers):  # rounding of the mean must not invent a spread
        return {"mean": numbers[0], "var": 0.0}
    return {"mean": mean, "var": math.fsum((number - mean) ** 2 for number in numbers) / len(numbers)}


def _flatten(data: Any) -> Iterator[float]:
    if isinstance(data, np.ndarray):
        yield from (float(value) for value in data.ravel())
    elif isinstance(data, list | tuple):
        for entry in data:
            yield from _flatten(entry)
    elif isinstance(data, int | float | np.number):
        yield float(data)
    else:
        raise ValueError(
            f"compute_stats takes numbers, arrays and nested lists of them, got {type(data).__name__}: {data!r}"
        )


def compute_discounted_returns(rewards: NDArray[Any] | Sequence[float], gamma: float) -> NDArray[Any]:
    """``returns[t] = rewards[t] + gamma * returns[t + 1]``; a list becomes float32, a float array keeps its type."""
    values = rewards if isinstance(rewards, np.ndarray) else np.asarray(rewards, dtype=np.float32)
    if not np.issubdtype(values.dtype, np.floating):
        values = values.astype(np.float32)
    returns = np.empty_like(values)
    running = values.dtype.type(0)
    for index in range(len(values) - 1, -1, -1):
        running = values[index] + gamma * running
        returns[index] = running
    return returns


def compute_grpo_process_supervision_advantages(
    rewards: Sequence[Sequence[float] | NDArray[Any]], gamma: float | None = None, std_tol: float = 1e-8
) -> list[NDArray[Any]]:
    """Per-step advantages of several rollouts: normalise over all steps, then sum what is still to come.

    ``gamma`` None sums the future undiscounted; otherwise it discounts. Raises ``ValueError`` when the rewards
    do not differ (standard deviation below ``std_tol``): such a group teaches nothing.
    """
    stats = compute_stats(list(rewards))
    std = math.sqrt(stats["var"])
    if std < std_tol:
        raise ValueError(
            f"the rewards have a standard deviation of {std:g}, below std_tol={std_tol:g}; drop this group"
        )
    discount = 1.0 if gamma is None else gamma
    normalised = [(np.asarray(one, dtype=np.float32) - stats["mean"]) / std for one in rewards]
    return [compute_discounted_returns(one, discount) for one in normalised]
