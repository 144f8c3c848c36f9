"""The helpers existing code imports: the results it relies on, and what holds for any queue."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.api.utils import (
    find_groups_summing_to_target,
    grab_batch_with_minimum_allocations,
    grab_exact_from_heterogeneous_queue,
)


def group(size: int, name: str = "", env_id: int | None = None) -> dict[str, Any]:
    return {"tokens": [[1, 2]] * size, "name": name, "env_id": env_id}


def env(env_id: int, minimum: float | None, connected: bool = True) -> dict[str, Any]:
    return {"registered_id": env_id, "connected": connected, "min_batch_allocation": minimum}


def names(groups: list[dict[str, Any]] | None) -> list[str] | None:
    return None if groups is None else [g["name"] for g in groups]


@pytest.mark.parametrize(
    ("sizes", "target", "expected"),
    [
        ([1, 2, 1], 4, [0, 1, 2]),
        ([2, 2, 4], 4, [0, 1]),
        ([3, 1, 4], 5, [1, 2]),
        ([2, 4], 3, []),
        ([2, 4, 2, 1], 6, [0, 1]),
        ([1, 1, 1, 4, 3], 5, [1, 2, 4]),
        ([], 4, []),
        ([4], 0, []),
    ],
)
def test_find_groups(sizes: list[int], target: int, expected: list[int]) -> None:
    assert find_groups_summing_to_target([group(size) for size in sizes], target) == expected


def queue_of(*sizes: int) -> list[dict[str, Any]]:
    return [group(size, f"{index}:{size}") for index, size in enumerate(sizes)]


def test_grab_takes_equal_groups_in_order() -> None:
    batch, rest = grab_exact_from_heterogeneous_queue(queue_of(4, 4, 4), 8)
    assert names(batch) == ["0:4", "1:4"]
    assert names(rest) == ["2:4"]


def test_grab_takes_small_groups_as_bundles_in_the_order_they_become_complete() -> None:
    batch, rest = grab_exact_from_heterogeneous_queue(queue_of(2, 4, 2, 1, 4), 12)
    assert names(batch) == ["1:4", "0:2", "2:2", "4:4"]
    assert names(rest) == ["3:1"]


@pytest.mark.parametrize("sizes", [(4,), (4, 2), (4, 3, 1), (5, 5, 5), ()])
def test_grab_leaves_the_queue_alone_when_it_cannot_be_exact(sizes: tuple[int, ...]) -> None:
    queue = queue_of(*sizes)
    before = copy.deepcopy(queue)
    batch, rest = grab_exact_from_heterogeneous_queue(queue, 8)
    assert batch is None
    assert rest == before


def envs_queue(*entries: tuple[int, int | None]) -> list[dict[str, Any]]:
    return [group(size, f"{index}:{env_id}", env_id) for index, (size, env_id) in enumerate(entries)]


def test_minimums_reserve_shares_in_order() -> None:
    queue = envs_queue((2, 0), (2, 0), (2, 0), (2, 1), (2, 1))
    batch, rest = grab_batch_with_minimum_allocations(queue, 8, [env(0, 0.25), env(1, 0.5)])
    assert names(batch) == ["0:0", "3:1", "4:1", "1:0"]
    assert names(rest) == ["2:0"]


def test_without_minimums_it_is_the_plain_grab() -> None:
    batch, rest = grab_batch_with_minimum_allocations(envs_queue((4, 0), (4, 1)), 4, [env(0, None), env(1, None)])
    assert (names(batch), names(rest)) == (["0:0"], ["1:1"])


def test_minimums_over_a_whole_batch_are_scaled() -> None:
    batch, _ = grab_batch_with_minimum_allocations(envs_queue((2, 0), (2, 1)), 4, [env(0, 0.7), env(1, 0.6)])
    assert names(batch) == ["0:0", "1:1"]
    batch, _ = grab_batch_with_minimum_allocations(envs_queue((2, 0), (2, 0)), 4, [env(0, 1.5)])
    assert names(batch) == ["0:0", "1:0"]


def test_a_disconnected_environment_is_not_waited_for() -> None:
    queue = envs_queue((4, 0))
    assert grab_batch_with_minimum_allocations(queue, 4, [env(0, 0.1), env(1, 0.5)])[0] is None
    batch, _ = grab_batch_with_minimum_allocations(queue, 4, [env(0, 0.1), env(1, 0.5, connected=False)])
    assert names(batch) == ["0:0"]


def test_an_incomplete_bundle_of_an_environment_with_a_minimum_gives_nothing() -> None:
    queue = envs_queue((4, 0), (2, 1))
    before = copy.deepcopy(queue)
    assert grab_batch_with_minimum_allocations(queue, 4, [env(0, 0.2), env(1, 0.5)]) == (None, before)


def test_a_minimum_that_rounds_to_nothing_asks_for_nothing() -> None:
    batch, _ = grab_batch_with_minimum_allocations(envs_queue((2, 0)), 2, [env(0, 0.5), env(1, 0.3)])
    assert names(batch) == ["0:0"]


def test_groups_without_environment_are_left_when_minimums_exist() -> None:
    queue = envs_queue((4, None), (4, 0))
    batch, rest = grab_batch_with_minimum_allocations(queue, 4, [env(0, 0.5)])
    assert (names(batch), names(rest)) == (["1:0"], ["0:None"])
    assert grab_batch_with_minimum_allocations([], 4, [env(0, 0.5)]) == (None, [])


@settings(max_examples=200)
@given(
    entries=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([0, 1, 2, None])), max_size=12),
    batch_size=st.sampled_from([2, 4, 8, 12]),
    minimums=st.lists(st.sampled_from([None, 0.1, 0.3, 0.5, 1.5]), min_size=3, max_size=3),
)
def test_any_grab_is_exact_or_changes_nothing(
    entries: list[tuple[int, int | None]], batch_size: int, minimums: list[float | None]
) -> None:
    queue = envs_queue(*entries)
    for batch, rest in (
        grab_exact_from_heterogeneous_queue(list(queue), batch_size),
        grab_batch_with_minimum_allocations(list(queue), batch_size, [env(i, m) for i, m in enumerate(minimums)]),
    ):
        if batch is None:
            assert rest == queue
        else:
            assert sum(len(g["tokens"]) for g in batch) == batch_size
            assert sorted([g["name"] for g in batch + rest]) == sorted(g["name"] for g in queue)
