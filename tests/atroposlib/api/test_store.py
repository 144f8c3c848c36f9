"""The store and its ledger, without HTTP and without a disk."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.api.environments import Environments
from atroposlib.api.events import BatchAcked, BatchFormed, Committed, EnvGone, Registered, Started, WasReset
from atroposlib.api.leases import BatchLedger, LeaseState
from atroposlib.api.observer import GroupEvent, StoreObserver
from atroposlib.api.store import RolloutStore, SeenIds
from atroposlib.api.wire import WireError, WireGroup


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def wire_group(size: int = 4, env_id: int | None = None, group_id: str | None = None) -> WireGroup:
    return WireGroup(
        payload=b"x" * 10,
        binary=False,
        size=size,
        num_tokens=3 * size,
        scores=[0.0] * size,
        env_id=env_id,
        group_id=group_id,
    )


def registered(**changes: Any) -> Registered:
    fields: dict[str, Any] = {
        "wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 10, "checkpoint_dir": "c",
        "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 9,
    }  # fmt: skip
    return Registered(**(fields | changes))


def store_with(count: int, *, size: int = 4, clock: Clock | None = None, **options: Any) -> RolloutStore:
    store = RolloutStore(clock=clock or Clock(), **options)
    store.apply(registered())
    store.apply(Started())
    for _ in range(count):
        add(store, size)
    return store


def add(store: RolloutStore, size: int = 4, env_id: int | None = None) -> int:
    group = wire_group(size, env_id)
    return store.add_group(store.plan_group(group), group.payload)


def add_env(store: RolloutStore, name: str = "env", group_size: int = 4, **changes: Any) -> int:
    fields: dict[str, Any] = {"max_token_length": 10, "weight": 1.0, "min_batch_allocation": None} | changes
    return store.register_env(store.plan_env(desired_name=name, group_size=group_size, **fields)).env_id


def form(store: RolloutStore) -> list[int] | None:
    event = store.plan_batch()
    return None if event is None else store.form_batch(event).keys


def test_planning_changes_nothing() -> None:
    store = store_with(2)
    first, second = store.plan_batch(), store.plan_batch()
    assert first == second == BatchFormed(1, [1])
    assert store.queue.num_groups == 2
    assert form(store) == [1]
    assert store.plan_batch() == BatchFormed(2, [2])


def test_nothing_is_looked_for_twice_while_nothing_changes() -> None:
    store = store_with(0)
    add(store, 3)
    add(store, 3)
    calls = []
    inner = store.queue.form
    store.queue.form = lambda *args: calls.append(args) or inner(*args)  # type: ignore[method-assign, func-returns-value]
    assert [store.plan_batch() for _ in range(5)] == [None] * 5
    assert len(calls) == 1
    add(store, 1)
    assert form(store) == [1, 3]
    assert len(calls) == 2


def test_bytes_are_counted() -> None:
    store = store_with(3)
    assert store.queued_bytes == 30
    form(store)
    assert store.queued_bytes == 20
    store.apply(BatchAcked([1], True))
    assert store.retained_bytes == 10
    store.apply(Committed(1, 1))
    assert (store.retained_bytes, len(store.groups)) == (0, 2)
    form(store)
    store.apply(BatchAcked([2], False))
    assert (store.retained_bytes, len(store.groups)) == (0, 1)
    store.apply(WasReset())
    assert (store.queued_bytes, store.retained_bytes, store.groups) == (0, 0, {})


def test_a_smaller_or_larger_batch_size_forms_what_nobody_has_anew() -> None:
    store = store_with(4, size=2)
    assert form(store) == [1, 2]
    store.apply(registered(batch_size=8))  # 1 and 2 were not acknowledged
    assert form(store) == [1, 2, 3, 4]
    store.apply(registered(batch_size=2))
    assert [form(store) for _ in range(5)] == [[1], [2], [3], [4], None]


def test_numbers_go_on_over_a_reset_and_over_a_lost_memory() -> None:
    store = store_with(2)
    form(store)
    store.apply(WasReset())
    store.apply(registered())
    add(store)
    assert store.plan_batch() == BatchFormed(2, [3])
    fresh = RolloutStore()
    fresh.apply(registered(resume_after=120))
    add(fresh)
    assert fresh.plan_batch() == BatchFormed(121, [1])


def test_an_environment_that_changes_its_group_size_releases_what_now_fits() -> None:
    store = store_with(0)
    add_env(store)
    assert [add(store, 2, 0), add(store, 1, 0)] == [2, 3]
    store.apply(EnvGone(0))
    assert add_env(store, group_size=2) == 0
    assert store.queue.num_groups == 1
    assert store.envs.all[0].pieces.num_sequences == 1


def test_an_environment_is_dead_after_the_time_out_and_alive_when_it_speaks() -> None:
    clock = Clock()
    store = store_with(0, clock=clock, env_timeout_s=60.0)
    add_env(store, min_batch_allocation=0.5)
    clock.now += 60
    assert store.envs.minimums() == {0: 0.5}
    clock.now += 1
    assert store.envs.minimums() == {}
    assert store.envs.touch(0) is store.envs.all[0]
    assert store.envs.minimums() == {0: 0.5}
    assert store.envs.touch(7) is None
    assert store.envs.touch(-1) is None


def test_weights_are_shares_of_length_times_weight() -> None:
    clock = Clock()
    envs = Environments(timeout_s=60.0, clock=clock)
    store = RolloutStore(clock=clock)
    store.envs = envs
    add_env(store, max_token_length=100, weight=3.0)
    add_env(store, max_token_length=50, weight=2.0)
    add_env(store, max_token_length=100, weight=0.0)
    assert [envs.weight_of(env) for env in envs.all] == [0.75, 0.25, 0.01]


def test_queue_size_of_an_environment() -> None:
    store = store_with(0)
    store.apply(registered(batch_size=16))
    for minimum in (None, 0.25, None):
        add_env(store, min_batch_allocation=minimum)
    add(store, 4, 0)
    for _ in range(2):
        add(store, 4, 1)  # 8 sequences, 4 of them due
    add(store, 2, 2)
    add(store, 2, 2)  # packed to 4
    add(store, 3)  # no environment: packed to 4
    status = store.env_status(store.envs.all[0])
    assert status["self_queue_size"] == 1
    assert status["queue_size"] == (4 + (8 - 4) + 4 + 4) // 4
    assert status["max_group_size"] == 4
    assert status["unallocated_fraction"] == 0.75


def test_group_size_seen_is_raised_to_the_largest_group_queued() -> None:
    store = store_with(0)
    store.apply(registered(batch_size=16))
    add_env(store, group_size=2)
    add(store, 8, 0)
    assert store.env_status(store.envs.all[0])["self_queue_size"] == 1


def test_a_group_larger_than_a_batch_is_refused_with_the_numbers() -> None:
    store = store_with(0)
    with pytest.raises(WireError, match="5 sequences and a batch holds 4"):
        store.plan_group(wire_group(5))


def test_ids_are_remembered_up_to_a_bound() -> None:
    seen = SeenIds(limit=10)
    for number in range(100):
        seen.put(f"g{number}", number % 3 - 1)
    assert [seen.get(f"g{number}") for number in (99, 98, 90)] == [99 % 3 - 1, 98 % 3 - 1, 90 % 3 - 1]
    assert seen.get("g0") is None
    assert len(seen.recent) + len(seen.older) <= 20


def test_observers_hear_what_happens_and_cannot_harm() -> None:
    class Watcher(StoreObserver):
        def __init__(self) -> None:
            self.heard: list[GroupEvent] = []

        def group_accepted(self, event: GroupEvent) -> None:
            self.heard.append(event)
            raise RuntimeError("a broken observer")

    watcher = Watcher()
    store = store_with(0, observers=[watcher])
    add_env(store, "maths")
    group = wire_group(env_id=0, group_id="id")
    event = store.plan_group(group)
    store.add_group(event, group.payload)
    store.notify_group(event, group)
    (heard,) = watcher.heard
    assert (heard.group_id, heard.env_name, heard.size, heard.num_tokens) == ("id", "maths_0", 4, 12)


# ---- the ledger -------------------------------------------------------------------------------------------------------


def ledger_of(count: int) -> BatchLedger:
    ledger = BatchLedger()
    for seq in range(1, count + 1):
        ledger.add(seq, [seq])
    return ledger


def states(ledger: BatchLedger) -> dict[int, LeaseState]:
    return {seq: batch.state for seq, batch in ledger.batches.items()}


def test_what_was_not_received_is_given_out_again_first() -> None:
    ledger = ledger_of(3)
    assert ledger.delivered == 3
    assert ledger.give_back(2)
    assert not ledger.give_back(2)
    assert ledger.delivered == 2
    waiting = ledger.first_waiting()
    assert waiting is not None
    assert waiting.seq == 2
    ledger.lease(waiting)
    assert (ledger.delivered, ledger.first_waiting()) == (3, None)


def test_plain_clients_acknowledge_only_what_was_sent_in_full() -> None:
    ledger = ledger_of(3)
    ledger.mark_sent(1, plain=True)
    ledger.mark_sent(2, plain=False)
    assert ledger.plain_received() == [1]
    assert ledger.ack(1, keep=False) is not None
    assert ledger.forgotten == 1
    assert states(ledger) == {2: LeaseState.LEASED, 3: LeaseState.LEASED}


def test_a_resume_takes_back_what_was_acknowledged_after_it() -> None:
    ledger = ledger_of(4)
    for seq in (1, 2, 3):
        assert ledger.ack(seq, keep=True) is None
    assert [batch.seq for batch in ledger.register(2)] == [1, 2]
    assert states(ledger) == {3: LeaseState.WAITING, 4: LeaseState.WAITING}
    assert (ledger.delivered, ledger.committed, ledger.forgotten, ledger.next_seq) == (0, 2, 2, 5)


def test_registering_without_a_position_keeps_what_was_acknowledged() -> None:
    ledger = ledger_of(3)
    ledger.ack(1, keep=True)
    assert ledger.register(None) == []
    assert states(ledger) == {1: LeaseState.ACKED, 2: LeaseState.WAITING, 3: LeaseState.WAITING}


def test_committing_and_acknowledging_in_any_order() -> None:
    ledger = ledger_of(3)
    assert [batch.seq for batch in ledger.commit(2)] == [1, 2]
    assert ledger.ack(3, keep=True) is None
    assert [batch.seq for batch in ledger.commit(9)] == [3]
    assert ledger.ack(3, keep=True) is None
    assert ledger.delivered == 3
