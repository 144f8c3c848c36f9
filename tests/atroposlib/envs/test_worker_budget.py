"""How many groups may be in flight, and which steps are boundaries."""

from __future__ import annotations

import pytest

from atroposlib.envs.worker_budget import (
    BudgetLimits,
    QueueStatus,
    allowed_workers,
    crosses_boundary,
    derived_batch_size,
    eval_cap,
    free_places,
    is_enough,
    reserved_places,
)


def limits(**changes: object) -> BudgetLimits:
    values: dict[str, object] = {"group_size": 8, "batch_size": 64, "max_num_workers": 16, **changes}
    return BudgetLimits(**values)  # type: ignore[arg-type]


def test_alone_the_free_places_up_to_the_worker_limit():
    assert free_places(limits(), QueueStatus()) == 24
    assert allowed_workers(limits(), QueueStatus()) == 16
    assert allowed_workers(limits(), QueueStatus(queue_size=20)) == 4
    assert allowed_workers(limits(), QueueStatus(queue_size=24)) == 0
    assert allowed_workers(limits(), QueueStatus(queue_size=99)) == 0


def test_with_neighbours_only_the_own_share_of_the_free_places():
    four = QueueStatus(env_weight=0.25)
    assert allowed_workers(limits(), four) == 6
    assert allowed_workers(limits(), QueueStatus(env_weight=0.25, queue_size=23)) == 1
    assert allowed_workers(limits(ignores_share=True), four) == 16


def test_without_an_offpolicy_bound_only_the_worker_limit_counts():
    assert allowed_workers(limits(max_batches_offpolicy=0), QueueStatus(queue_size=10_000)) == 16
    assert allowed_workers(limits(max_batches_offpolicy=-1), QueueStatus(queue_size=10_000)) == 16


def test_nothing_runs_before_the_batch_size_is_known():
    assert allowed_workers(limits(batch_size=-1), QueueStatus()) == 0


def test_the_evaluation_cap_wins():
    assert eval_cap(16, 0.5) == 8
    assert allowed_workers(limits(), QueueStatus(), cap=8) == 8
    assert allowed_workers(limits(), QueueStatus(), cap=0) == 0


def test_a_minimum_share_keeps_work_going_when_others_fill_the_queue():
    mine = limits(min_batch_allocation=0.25)
    full = QueueStatus(queue_size=30, self_queue_size=0, max_group_size=8, unallocated_fraction=0.75)
    # a quarter of three batches of 64 is 48 sequences: 6 groups of 8, and one to spare
    assert reserved_places(mine, full) == 7
    assert allowed_workers(mine, full) == 7
    assert allowed_workers(mine, QueueStatus(queue_size=30, self_queue_size=7, max_group_size=8)) == 0
    assert reserved_places(limits(), full) == 0


def test_a_minimum_share_never_exceeds_the_worker_limit():
    assert allowed_workers(limits(min_batch_allocation=1.0, max_num_workers=3), QueueStatus(max_group_size=8)) == 3


def test_derived_batch_size_is_the_unreserved_part_plus_the_own_reservation():
    assert derived_batch_size(100, None, 0.2) == 100
    assert derived_batch_size(-1, QueueStatus(unallocated_fraction=0.5), 0.2) == -1
    assert derived_batch_size(100, QueueStatus(unallocated_fraction=0.5), 0.25) == 75
    assert derived_batch_size(100, QueueStatus(unallocated_fraction=0.5), None) == 50


@pytest.mark.parametrize(
    ("old", "new", "interval", "crosses"),
    [
        (0, 1, 1, True),
        (13, 14, 1, True),
        (0, 99, 100, False),
        (99, 100, 100, True),
        (100, 100, 100, False),
        (50, 150, 100, True),  # equal remainder
        (10, 120, 100, True),  # larger remainder
        (100, 350, 100, True),
        (0, 10, 0, False),
        (0, 10, -1, False),
        (10, 4, 5, False),  # the trainer went back
    ],
)
def test_a_boundary_is_every_multiple_that_was_passed(old: int, new: int, interval: int, crosses: bool):
    assert crosses_boundary(old, new, interval) is crosses


def test_every_step_is_a_boundary_of_one():
    assert sum(crosses_boundary(step, step + 1, 1) for step in range(14)) == 14


def test_enough_when_the_trainer_has_or_will_have_every_batch():
    def enough(step: int, queued: int) -> bool:
        status = QueueStatus(current_step=step, queue_size=queued)
        return is_enough(status, group_size=8, batch_size=64, total_steps=20)

    assert not enough(19, 0)
    assert not enough(18, 16)
    assert enough(18, 24)
    assert not is_enough(QueueStatus(current_step=3), group_size=8, batch_size=-1, total_steps=2)


def test_a_reply_of_an_older_server_is_enough():
    assert QueueStatus.from_reply({"current_step": 3, "queue_size": 2}) == QueueStatus(current_step=3, queue_size=2)
    assert QueueStatus.from_reply({"max_group_size": 0}).max_group_size == 1
