"""The batching rules, by example and against a naive model that tries every choice of groups."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.api.batching import BatchQueue, GroupMeta, PartialGroups, subset_summing_to


def queue_of(*sizes: int | tuple[int, int | None]) -> BatchQueue:
    """Groups with keys 0, 1, ...; an entry is a size or (size, env_id)."""
    queue = BatchQueue()
    for key, entry in enumerate(sizes):
        size, env_id = entry if isinstance(entry, tuple) else (entry, None)
        queue.add(GroupMeta(key, size, env_id))
    return queue


# ---- the naive model ---------------------------------------------------------------------------------------------------


def oldest_exact(groups: Sequence[GroupMeta], batch_size: int, due: Mapping[int, int]) -> list[int] | None:
    """Of all choices that add up exactly and give everybody what is due, the one that is first by age."""
    found = []
    for chosen in itertools.product((True, False), repeat=len(groups)):
        picked = [group for group, taken in zip(groups, chosen, strict=True) if taken]
        if sum(group.size for group in picked) == batch_size and all(
            sum(group.size for group in picked if group.env_id == env_id) >= amount for env_id, amount in due.items()
        ):
            found.append([not taken for taken in chosen])
    if not found:
        return None
    return [group.key for group, skipped in zip(groups, min(found), strict=True) if not skipped]


def model_form(groups: Sequence[GroupMeta], batch_size: int, minimums: Mapping[int, float]) -> list[int] | None:
    groups = sorted(groups)
    due = {env_id: int(batch_size * share) for env_id, share in minimums.items()}
    due = {env_id: amount for env_id, amount in due.items() if amount > 0}
    total = sum(due.values())
    if total > batch_size:
        due = {env_id: max(1, amount * batch_size // total) for env_id, amount in due.items()}
    floors = {}
    for env_id, amount in due.items():
        sizes = [group.size for group in groups if group.env_id == env_id and group.size <= batch_size]
        floors[env_id] = max(1, amount - max(sizes, default=0) + 1)
        if sum(sizes) < floors[env_id]:
            return None
    for wanted in [due, floors, {}] if due else [{}]:
        batch = oldest_exact(groups, batch_size, wanted)
        if batch is not None:
            return batch
    return None


ENV_IDS = st.sampled_from([None, 0, 1, 2])
GROUPS = st.lists(st.tuples(st.integers(1, 9), ENV_IDS), max_size=9)
MINIMUMS = st.dictionaries(st.integers(0, 2), st.sampled_from([0.0, 0.05, 0.2, 0.34, 0.5, 0.7, 1.0, 1.5]), max_size=3)


@settings(max_examples=400, deadline=None)
@given(groups=GROUPS, batch_size=st.integers(1, 24), minimums=MINIMUMS)
def test_form_equals_the_naive_model(
    groups: list[tuple[int, int | None]], batch_size: int, minimums: dict[int, float]
) -> None:
    queue = queue_of(*groups)
    metas = [GroupMeta(key, size, env_id) for key, (size, env_id) in enumerate(groups)]

    assert queue.form(batch_size, minimums) == model_form(metas, batch_size, minimums)
    assert queue.form(batch_size) == model_form(metas, batch_size, {})


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 6), ENV_IDS),
        st.tuples(st.just("form"), st.sampled_from([4, 6, 8, 12]), MINIMUMS),
        st.tuples(st.just("put back"), st.none(), st.none()),
        st.tuples(st.just("remove"), st.integers(0, 30), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_a_history_of_calls_equals_the_naive_model(steps: list[tuple[str, int, object]]) -> None:
    queue, waiting, taken = BatchQueue(), dict[int, GroupMeta](), list[GroupMeta]()
    for next_key, (action, number, extra) in enumerate(steps):
        if action == "add" and len(waiting) < 9:
            group = GroupMeta(next_key, number, extra)  # type: ignore[arg-type]
            queue.add(group)
            waiting[group.key] = group
        elif action == "form":
            batch = queue.form(number, extra)  # type: ignore[arg-type]
            assert batch == model_form(list(waiting.values()), number, extra)  # type: ignore[arg-type]
            if batch:
                queue.remove(batch)
                taken = [waiting.pop(key) for key in batch]
        elif action == "put back":
            for group in reversed(taken):
                queue.add(group)
                waiting[group.key] = group
            taken = []
        elif action == "remove" and number in waiting:
            queue.remove([number])
            del waiting[number]
        _check_counters(queue, list(waiting.values()))


def _check_counters(queue: BatchQueue, waiting: list[GroupMeta]) -> None:
    assert queue.num_groups == len(waiting)
    assert queue.num_sequences == sum(group.size for group in waiting)
    assert queue.max_group_size == max((group.size for group in waiting), default=0)
    for env_id in (None, 0, 1, 2):
        assert queue.env_sequences(env_id) == sum(group.size for group in waiting if group.env_id == env_id)
    assert set(queue.sequences_by_env()) == {group.env_id for group in waiting}


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 8), max_size=120), batch_size=st.sampled_from([8, 16, 24]))
def test_draining_gives_each_group_once_and_every_batch_exact(sizes: list[int], batch_size: int) -> None:
    queue = queue_of(*sizes)
    delivered: list[int] = []
    while batch := queue.form(batch_size):
        assert sum(sizes[key] for key in batch) == batch_size
        assert batch == sorted(batch)
        queue.remove(batch)
        delivered += batch

    assert len(set(delivered)) == len(delivered)
    assert queue.num_groups == len(sizes) - len(delivered)
    left = [size for key, size in enumerate(sizes) if key not in set(delivered)]
    assert subset_summing_to(left, batch_size) == []  # nothing that could have made a batch is left


# ---- by example --------------------------------------------------------------------------------------------------------


def test_equal_sizes_are_first_in_first_out() -> None:
    queue = queue_of(*[4] * 6)
    assert queue.form(8) == [0, 1]
    queue.remove([0, 1])
    assert queue.form(8) == [2, 3]


def test_no_batch_before_there_are_enough_sequences() -> None:
    assert queue_of(4, 3).form(8) is None
    assert BatchQueue().form(8) is None
    assert queue_of(4, 4).form(0) is None


def test_a_size_that_divides_nothing_goes_as_soon_as_it_fits() -> None:
    queue = queue_of(3, 4, 4)
    assert queue.form(8) == [1, 2]  # the 3 cannot be part of 8 yet
    queue.add(GroupMeta(3, 1, None))
    assert queue.form(8) == [0, 1, 3]  # 3 + 4 + 1, and it goes first


def test_three_and_one_of_a_group_of_four_are_batched() -> None:
    assert queue_of(3, 1, 3, 1).form(4) == [0, 1]


def test_small_groups_do_not_wait_for_a_full_bundle() -> None:
    assert queue_of(4, 2, 4).form(6) == [0, 1]


def test_a_group_larger_than_the_batch_blocks_nothing() -> None:
    queue = queue_of(16, 4, 4)
    assert queue.form(8) == [1, 2]
    assert queue.form(16) == [0]


def test_a_put_back_batch_is_formed_again_first() -> None:
    queue = queue_of(4, 4, 4, 4)
    queue.remove([0, 1])
    queue.add(GroupMeta(1, 4, None))
    queue.add(GroupMeta(0, 4, None))
    assert queue.form(8) == [0, 1]


def test_minimum_reserves_a_share() -> None:
    queue = queue_of((2, 0), (2, 0), (2, 0), (2, 0), (2, 1), (2, 1))
    assert queue.form(8, {}) == [0, 1, 2, 3]
    assert queue.form(8, {1: 0.25}) == [0, 1, 2, 4]
    assert queue.form(8, {1: 0.5}) == [0, 1, 4, 5]


def test_an_environment_with_a_minimum_and_nothing_queued_is_waited_for() -> None:
    queue = queue_of((4, 0), (4, 0))
    assert queue.form(8, {1: 0.5}) is None
    assert queue.form(8, {1: 0.1}) == [0, 1]  # int(8 * 0.1) == 0: nothing is due


def test_groups_without_an_environment_fill_what_minimums_leave() -> None:
    assert queue_of((4, None), (4, 1)).form(8, {1: 0.5}) == [0, 1]


def test_a_minimum_that_whole_groups_miss_by_a_little_is_met_within_one_group() -> None:
    assert queue_of((4, 0), (4, 0), (4, 1)).form(8, {1: 0.7}) == [0, 2]  # due 5, one group of 4 is queued


def test_minimums_above_a_whole_batch_are_scaled() -> None:
    assert queue_of((2, 0), (2, 1)).form(4, {0: 0.65, 1: 0.65}) == [0, 1]
    assert queue_of((4, 0), (4, 0)).form(8, {0: 1.5}) == [0, 1]


def test_minimums_that_cannot_fit_together_do_not_stop_training() -> None:
    queue = queue_of((4, 0), (4, 1), (4, 2))
    assert queue.form(4, {0: 1.0, 1: 1.0, 2: 1.0}) == [0]


def test_bad_calls_are_named_and_change_nothing() -> None:
    queue = queue_of(4, 4)
    with pytest.raises(ValueError, match="already queued"):
        queue.add(GroupMeta(1, 4, None))
    with pytest.raises(ValueError, match="at least one sequence"):
        queue.add(GroupMeta(7, 0, None))
    with pytest.raises(KeyError):
        queue.remove([0, 99])
    assert (queue.num_groups, queue.num_sequences, 0 in queue) == (2, 8, True)


# ---- cost --------------------------------------------------------------------------------------------------------------


def _seconds_to_drain(num_groups: int, batches: int) -> float:
    queue = BatchQueue()
    rng = random.Random(3)
    for key in range(num_groups):
        queue.add(GroupMeta(key, rng.choice([3, 7]) if key < num_groups // 2 else 8, key % 5))
    start = time.perf_counter()
    for _ in range(batches):
        batch = queue.form(256, {0: 0.1, 3: 0.2})
        assert batch is not None
        queue.remove(batch)
    return time.perf_counter() - start


def test_cost_of_a_batch_does_not_grow_with_the_queue() -> None:
    small = min(_seconds_to_drain(4_000, 20) for _ in range(3))
    large = min(_seconds_to_drain(80_000, 20) for _ in range(3))
    assert large < 5 * small + 0.01  # 20 times the queue


# ---- pieces of groups --------------------------------------------------------------------------------------------------


def test_pieces_are_released_when_they_add_up_to_a_group() -> None:
    pieces = PartialGroups(4)
    assert pieces.add(10, 1) == []
    assert pieces.add(11, 2) == []
    assert pieces.num_sequences == 3
    assert pieces.add(12, 1) == [10, 11, 12]
    assert (pieces.num_sequences, pieces.keys) == (0, [])


def test_pieces_larger_than_the_group_or_never_exact_are_released_too() -> None:
    assert PartialGroups(4).add(1, 8) == [1]
    pieces = PartialGroups(4)
    assert [pieces.add(key, 3) for key in range(4)] == [[], [], [], [0, 1, 2, 3]]


@given(group_size=st.integers(1, 8), sizes=st.lists(st.integers(1, 20), max_size=60))
def test_fewer_pieces_than_the_group_size_ever_wait(group_size: int, sizes: list[int]) -> None:
    pieces = PartialGroups(group_size)
    out: list[int] = []
    for key, size in enumerate(sizes):
        released = pieces.add(key, size)
        assert sum(sizes[k] for k in released) % group_size == 0
        assert released == sorted(released)
        out += released
        assert len(pieces.keys) < group_size
    assert sorted(out + pieces.keys) == list(range(len(sizes)))
    assert pieces.num_sequences == sum(sizes[key] for key in pieces.keys)


def test_bad_pieces_are_named() -> None:
    with pytest.raises(ValueError, match="group_size is 0"):
        PartialGroups(0)
    with pytest.raises(ValueError, match="at least one"):
        PartialGroups(4).add(1, 0)


@given(sizes=st.lists(st.integers(1, 9), max_size=10), target=st.integers(-1, 30))
def test_subset_is_found_exactly_when_one_exists(sizes: list[int], target: int) -> None:
    exists = target > 0 and any(
        sum(choice) == target for n in range(1, len(sizes) + 1) for choice in itertools.combinations(sizes, n)
    )
    chosen = subset_summing_to(sizes, target)
    assert bool(chosen) == exists
    assert chosen == sorted(set(chosen))
    assert not chosen or sum(sizes[i] for i in chosen) == target
