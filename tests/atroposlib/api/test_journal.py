"""What survives a kill, what a full disk does, what the journal costs in space."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from rollout_calls import Caller, env_registration, group, registration

from atroposlib.api import committer
from atroposlib.api.events import BatchAcked, BatchFormed, Committed, GroupAdded, Registered
from atroposlib.api.hot_routes import HotRoutes
from atroposlib.api.journal import Journal
from atroposlib.api.leases import LeaseState
from atroposlib.api.middleware import BodyLimits
from atroposlib.api.schemas import Registration
from atroposlib.api.service import RolloutService
from atroposlib.api.snapshot import encode_snapshot, restore_snapshot, take_snapshot
from atroposlib.api.store import RolloutStore
from atroposlib.api.wire import WireGroup, parse_json_groups
from atroposlib.errors import JournalError
from atroposlib.testing.api import ApiProcess, serve_api


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[ApiProcess]:
    with serve_api("--no-live-page", data_dir=tmp_path / "data", log_file=tmp_path / "log") as api:
        yield api


def _kill(api: ApiProcess) -> None:
    api.kill()
    api.restart()


def test_a_killed_server_comes_back_where_it_was(durable: ApiProcess) -> None:
    call = Caller(durable.url)
    call.start(envs=2, batch_size=8, starting_step=3, env={"min_batch_allocation": 0.25})
    for mark in range(5):
        call.post("/scored_data", group(mark, env_id=0, group_id=f"g{mark}"))
    call.post("/scored_data", group(9, size=1, env_id=1))
    assert call.post("/disconnect-env", {"env_id": 1})["status"] == "success"
    before = [
        call.get("/status"),
        call.get("/info"),
        call.get("/wandb_info"),
        call.get("/status-env", params={"env_id": 0}),
        call.get("/latest_example"),
    ]
    _kill(durable)
    after = [
        call.get("/status"),
        call.get("/info"),
        call.get("/wandb_info"),
        call.get("/status-env", params={"env_id": 0}),
        call.get("/latest_example"),
    ]
    assert after == before
    assert call.post("/scored_data", group(0, env_id=0, group_id="g0")) == {"status": "received"}  # remembered
    assert call.get("/status")["queue_size"] == 5
    assert call.post("/register-env", env_registration())["wandb_name"] == "env_1"  # it had left
    assert call.post("/scored_data", group(8, size=3, env_id=1)) == {
        "status": "buffered",
        "buffer_size": 0,
    }  # 1 + 3, over the kill
    assert [call.batch(), call.batch(), call.batch(), call.batch()] == [[0, 1], [2, 3], [4, 9, 8], None]
    assert call.get("/status")["current_step"] == 6


def test_a_batch_received_before_the_kill_is_not_delivered_twice(durable: ApiProcess) -> None:
    call = Caller(durable.url)
    call.start()
    for mark in range(3):
        call.post("/scored_data", group(mark))
    assert call.batch() == [0]
    time.sleep(0.5)  # the server has noted that the reply arrived
    _kill(durable)
    assert call.get("/status") == {"current_step": 1, "queue_size": 2}
    assert [call.batch(), call.batch(), call.batch()] == [[1], [2], None]


def test_positions_survive(durable: ApiProcess) -> None:
    call = Caller(durable.url)
    call.start()
    call.post("/scored_data_list", [group(mark) for mark in range(6)])
    for seq in range(1, 5):
        assert call.get(f"/batch?client=ours&after={seq - 1}")["batch_seq"] == seq
    call.post("/ack", {"batch_seq": 3})
    call.post("/commit", {"batch_seq": 1, "step": 1})
    _kill(durable)
    assert call.get("/batch?client=ours")["batch_seq"] == 4  # unacknowledged
    _kill(durable)
    call.post("/register", registration(resume_after=1, starting_step=1))
    replies = [call.get(f"/batch?client=ours&after={seq}") for seq in range(1, 6)]
    assert [(reply["batch_seq"], reply["batch"][0]["tokens"][0][0]) for reply in replies] == [
        (seq, seq - 1) for seq in range(2, 7)
    ]
    assert call.get("/batch?client=ours&after=6") == {"batch": None}
    assert call.get("/status")["current_step"] == 6


def test_a_reset_survives(durable: ApiProcess) -> None:
    call = Caller(durable.url)
    call.start()
    call.post("/scored_data", group(1))
    assert requests.post(f"{durable.url}/reset_data", timeout=10).status_code == 200
    _kill(durable)
    assert call.get("/info")["batch_size"] == -1
    call.start()
    assert call.batch() is None


def test_an_orderly_stop_keeps_everything_too(durable: ApiProcess) -> None:
    call = Caller(durable.url)
    call.start()
    call.post("/scored_data", group(1))
    durable.stop()
    durable.restart()
    assert call.batch() == [1]


def test_a_second_server_on_the_same_folder_is_refused_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    monkeypatch.setenv("ATROPOS_RUN_NAME", "first")
    with serve_api(data_dir=data, log_file=tmp_path / "log") as api:
        Caller(api.url).start()
        os.kill(api.pid, signal.SIGSTOP)  # it writes nothing itself meanwhile
        try:
            before = _contents(data)
            monkeypatch.setenv("ATROPOS_RUN_NAME", "second")
            other = ApiProcess(["--data-dir", str(data)], 0, tmp_path / "other")
            with pytest.raises(RuntimeError, match="ended with"):
                other.start()
            assert "used by another rollout server" in (tmp_path / "other").read_text()
            assert _contents(data) == before
        finally:
            os.kill(api.pid, signal.SIGCONT)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_size_limit_acts_like_a_full_disk(tmp_path: Path) -> None:
    """The kernel refuses to let the journal grow: groups get 507 and can be sent again; what was accepted is all there."""
    with serve_api("--no-live-page", data_dir=tmp_path, log_file=tmp_path / "log") as api:
        call = Caller(api.url)
        call.start()
        call.post("/scored_data", group(1))
        resource.prlimit(api.pid, resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
        big = group(2, length=20_000)
        reply = requests.post(f"{api.url}/scored_data", json=big, timeout=10)
        assert reply.status_code == 507
        assert "cannot be written" in reply.json()["detail"]
        assert call.post("/scored_data", group(3)) == {"status": "received"}  # what still fits is taken
        assert call.get("/status")["queue_size"] == 2
        resource.prlimit(api.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert call.post("/scored_data", big) == {"status": "received"}
        api.kill()
        api.restart()
        assert [call.batch(), call.batch(), call.batch(), call.batch()] == [[1], [3], [2], None]


def test_a_list_that_does_not_fit_is_refused_whole(tmp_path: Path) -> None:
    """Its first group alone would still fit; a client without ids that sends the list again must not have it twice."""
    with serve_api("--no-live-page", data_dir=tmp_path, log_file=tmp_path / "log") as api:
        call = Caller(api.url)
        call.start()
        call.post("/scored_data", group(1))
        resource.prlimit(api.pid, resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
        several = [group(2), group(3, length=20_000), group(4)]
        assert "cannot be written" in call.post("/scored_data_list", several, status=507)["detail"]
        assert call.get("/status")["queue_size"] == 1
        assert call.post("/scored_data", group(5)) == {"status": "received"}
        api.kill()
        api.restart()
        assert call.get("/status")["queue_size"] == 2
        assert call.post("/scored_data_list", several) == {"status": "received", "groups_processed": 3}
        assert [call.batch() for _ in range(6)] == [[1], [5], [2], [3], [4], None]


# ---- the journal itself -----------------------------------------------------------------------------------------------


def _run(folder: Path, work: Callable[[RolloutService], Any], **options: Any) -> tuple[RolloutStore, Any]:
    """Open a service on a folder, do something, close it."""

    async def main() -> tuple[RolloutStore, Any]:
        store = RolloutStore()
        service = RolloutService(store, Journal(folder, **options))
        await service.open()
        try:
            return store, await work(service)
        finally:
            await service.close()

    return asyncio.run(main())


async def _fill(service: RolloutService, count: int = 20, length: int = 200) -> None:
    await service.register(Registration(**registration(batch_size=4)))
    for mark in range(count):
        body = str(group(mark, length=length)).replace("'", '"').encode()
        await service.submit(parse_json_groups(body, many=False))


async def _take(service: RolloutService, count: int) -> list[int]:
    taken = []
    for _ in range(count):
        delivery = await service.next_batch(plain=False, after=taken[-1] if taken else None)
        assert delivery is not None
        await service.delivered(delivery)
        taken.append(delivery.batch.seq)
    return taken


def _segments(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.log"))


@pytest.mark.parametrize("durability", ["safe", "interval", "none"])
def test_every_durability_writes_before_answering(tmp_path: Path, durability: Any) -> None:
    _run(tmp_path, lambda s: _fill(s, 3), durability=durability)
    store, _ = _run(tmp_path, lambda s: asyncio.sleep(0))
    assert [store.groups[key].size for key in sorted(store.groups)] == [4, 4, 4]


def test_segments_are_dropped_when_all_in_them_is_committed(tmp_path: Path) -> None:
    async def work(service: RolloutService) -> list[int]:
        await _fill(service, 40)
        full = len(_segments(tmp_path))
        seqs = await _take(service, 30)
        await service.ack(30)
        await asyncio.sleep(0.1)
        kept = len(_segments(tmp_path))  # acknowledged is not enough
        await service.commit(30, 30)
        await _fill(service, 8)  # makes new segments, which tidies
        await asyncio.sleep(0.1)
        return [full, kept, len(_segments(tmp_path)), len(seqs)]

    _, (full, kept, left, _) = _run(tmp_path, work, segment_bytes=10_000)
    assert full >= 8
    assert kept >= full
    assert left <= full // 2 + 3
    store, _ = _run(tmp_path, lambda s: asyncio.sleep(0), segment_bytes=10_000)
    assert len(store.groups) == 18
    assert store.ledger.committed == 30
    assert store.ledger.next_seq == 31


def test_a_segment_nobody_needs_is_written_over(tmp_path: Path) -> None:
    """And a copy of the folder as a kill would leave it, with older records behind the newest, is read as it should be."""
    folder, copy = tmp_path / "data", tmp_path / "copy"

    async def work(service: RolloutService) -> int:
        files = 0
        for round_ in range(6):
            await _fill(service, 20)
            for seq in await _take(service, 20):
                await service.ack(seq)
            await service.commit(20 * (round_ + 1), round_)
            files = max(files, len({path.stat().st_ino for path in folder.iterdir()}))
        await _fill(service, 3)
        await asyncio.sleep(0.2)  # for what is being deleted
        shutil.copytree(folder, copy)
        return files

    live, files = _run(folder, work, segment_bytes=10_000)
    numbers = [int(Path(name).stem) for name in _segments(copy)]
    assert max(numbers) > 300  # many segments were begun ...
    assert files < 20  # ... in few files
    newest = copy / f"{max(numbers):016d}.log"
    assert newest.stat().st_size >= 10_000
    assert sorted(path.suffix for path in folder.iterdir() if path.suffix == ".spare") == []  # an orderly end
    for _ in range(2):
        again, _ = _run(copy, lambda s: asyncio.sleep(0), segment_bytes=10_000)
        assert {key: json.loads(bytes(kept.payload or b"")) for key, kept in again.groups.items()} == {
            key: json.loads(bytes(kept.payload or b"")) for key, kept in live.groups.items()
        }
        assert (again.ledger.committed, again.ledger.next_seq, len(again.groups)) == (120, 121, 3)


def test_acknowledged_batches_leave_memory_and_come_back_from_disk(tmp_path: Path) -> None:
    async def work(service: RolloutService) -> list[bytes]:
        await _fill(service, 3)
        await _take(service, 2)
        await service.ack(2)
        assert [group.payload is None for group in service.store.groups.values()] == [True, True, False]
        await service.register(Registration(**registration(batch_size=4, resume_after=0)))
        delivery = await service.next_batch(plain=False, after=0)
        assert delivery is not None
        return [bytes(payload) for payload in delivery.payloads]

    _, (payload,) = _run(tmp_path, work)
    assert json.loads(payload)["tokens"][0][:3] == [0, 1, 2]


def test_retention_without_commits_is_bounded(tmp_path: Path) -> None:
    async def work(service: RolloutService) -> None:
        service.store.retain_bytes = 10_000
        await _fill(service, 20)
        await _take(service, 20)
        await service.ack(20)
        assert service.store.retained_bytes <= 10_000
        assert 1 <= len(service.store.ledger.batches) < 10
        forgotten = service.store.ledger.forgotten
        with pytest.raises(ValueError, match=f"up to {forgotten} are gone"):
            await service.register(Registration(**registration(resume_after=forgotten - 1)))
        await service.register(Registration(**registration(resume_after=forgotten)))

    _run(tmp_path, work)


@pytest.mark.parametrize("cut", [1, 7, 19, 25, 500])
def test_a_torn_tail_is_cut_off(tmp_path: Path, cut: int) -> None:
    _run(tmp_path, lambda s: _fill(s, 3))
    (tmp_path / "snapshot").unlink()  # as after a kill: no orderly end
    names = _segments(tmp_path)
    last = tmp_path / next(name for name in reversed(names) if (tmp_path / name).stat().st_size > 8)
    for name in names[names.index(last.name) + 1 :]:
        (tmp_path / name).unlink()
    os.truncate(last, last.stat().st_size - cut)
    store, _ = _run(tmp_path, lambda s: asyncio.sleep(0))
    assert len(store.groups) == 2
    _run(tmp_path, lambda s: _fill(s, 1))
    store, _ = _run(tmp_path, lambda s: asyncio.sleep(0))
    assert len(store.groups) == 3


def test_damage_in_the_middle_is_an_error_not_a_silent_loss(tmp_path: Path) -> None:
    _run(tmp_path, lambda s: _fill(s, 20), segment_bytes=10_000)
    (tmp_path / "snapshot").unlink()
    first = tmp_path / _segments(tmp_path)[0]
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 0xFF
    first.write_bytes(data)
    with pytest.raises(JournalError, match="damaged at byte"):
        _run(tmp_path, lambda s: asyncio.sleep(0))


def test_replaying_the_records_gives_the_same_state_as_the_snapshot(tmp_path: Path) -> None:
    async def work(service: RolloutService) -> None:
        await _fill(service, 12)
        await _take(service, 6)
        await service.ack(4)
        await service.commit(2, 2)

    _run(tmp_path, work)
    by_snapshot, _ = _run(tmp_path, lambda s: asyncio.sleep(0))
    (tmp_path / "snapshot").unlink()
    by_records, _ = _run(tmp_path, lambda s: asyncio.sleep(0))
    for store in (by_snapshot, by_records):
        assert sorted(store.groups) == list(range(3, 13))
        assert {seq: (batch.keys, batch.state) for seq, batch in store.ledger.batches.items()} == {
            3: ([3], LeaseState.ACKED),
            4: ([4], LeaseState.ACKED),
            5: ([5], LeaseState.LEASED),
            6: ([6], LeaseState.LEASED),
        }
        assert store.queue.num_groups == 6
        assert (store.current_step, store.ledger.committed, store.next_key) == (6, 2, 13)


def test_events_of_a_killed_process_are_applied_in_order(tmp_path: Path) -> None:
    store = RolloutStore()
    store.apply(Registered("g", "p", 4, 10, "c", 1, 0, 9))
    store.apply(GroupAdded(1, 4, 8, "a", given_id=True), b"x")
    store.apply(BatchFormed(1, [1]))
    store.ledger.settle_after_restart()
    assert store.status() == {"current_step": 0, "queue_size": 1}  # it was never sent
    store.apply(BatchAcked([1], True))
    store.apply(Committed(1, 1))
    assert (store.groups, store.current_step, store.seen.get("a")) == ({}, 1, -1)


def test_sigterm_is_an_orderly_end(durable: ApiProcess) -> None:
    assert durable.process is not None
    durable.process.send_signal(signal.SIGTERM)
    assert durable.process.wait(20) == 0


def test_a_failed_sync_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(service: RolloutService) -> int:
        await _fill(service, 2)
        journal = service.journal
        assert journal is not None
        (one,) = parse_json_groups(str(group(7, group_id="seven")).replace("'", '"').encode(), many=False)
        with monkeypatch.context() as broken:
            broken.setattr(committer, "_sync", _no_sync)
            with pytest.raises(JournalError, match="cannot be written"):
                await service.submit([one])
        assert len(service.store.groups) == 2
        assert await service.submit([one]) == [-1]  # the same one, sent again
        return journal.failed_writes

    monkeypatch.setenv("ATROPOS_NATIVE", "0")
    store, failed = _run(tmp_path, work)
    assert (len(store.groups), failed) == (3, 1)
    (tmp_path / "snapshot").unlink()
    again, _ = _run(tmp_path, lambda s: asyncio.sleep(0))
    assert sorted(stored.key for stored in again.groups.values()) == [1, 2, 4]  # key 3 was refused
    assert again.counters.groups_accepted == 0  # counters count what this process does


def test_a_batch_that_could_not_be_noted_is_formed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acknowledging the last batch and forming the next are one commit; when it fails, nothing of it has happened."""

    async def work(service: RolloutService) -> list[list[int]]:
        await _fill(service, 3)
        first = await service.next_batch(plain=True)
        assert first is not None
        await service.delivered(first)
        assert service.journal is not None
        before = service.journal.sync_count
        with monkeypatch.context() as broken:
            broken.setattr(committer, "_sync", _no_sync)
            with pytest.raises(JournalError, match="cannot be written"):
                await service.next_batch(plain=True)
        assert [batch.state for batch in service.store.ledger.batches.values()] == [LeaseState.LEASED]
        second = await service.next_batch(plain=True)
        assert service.journal.sync_count == before + 1
        assert second is not None
        await service.delivered(second)
        return [first.batch.keys, second.batch.keys]

    monkeypatch.setenv("ATROPOS_NATIVE", "0")
    store, keys = _run(tmp_path, work)
    assert keys == [[1], [2]]
    assert store.queue.num_groups == 1


def _no_sync(fd: int) -> None:
    raise OSError(5, "Input/output error")


def test_missing_records_are_an_error(tmp_path: Path) -> None:
    _run(tmp_path, lambda s: _fill(s, 20), segment_bytes=10_000)
    (tmp_path / "snapshot").unlink()
    (tmp_path / _segments(tmp_path)[0]).unlink()
    with pytest.raises(JournalError, match=r"records 1 to \d+ of the journal"):
        _run(tmp_path, lambda s: asyncio.sleep(0))


def test_a_nearly_full_disk_takes_no_groups_but_positions(tmp_path: Path) -> None:
    async def work(service: RolloutService) -> None:
        await _fill(service, 3)
        await _take(service, 1)
        journal = service.journal
        assert journal is not None
        journal.min_free_bytes = 2**62
        (one,) = parse_json_groups(str(group(7)).replace("'", '"').encode(), many=False)
        with pytest.raises(JournalError, match="are free in"):
            await service.submit([one])
        await service.ack(1)
        await service.commit(1, 1)
        await _take(service, 1)
        assert service.store.ledger.committed == 1

    _run(tmp_path, work)


def test_what_a_disk_that_fills_up_keeps_of_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lists and two single groups in one commit: of what does not fit nothing is kept, of the rest everything."""
    limit = 12_000
    really = os.pwrite

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if offset >= limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(fd, data[: limit - offset], offset)

    async def work(service: RolloutService) -> list[Any]:
        await service.register(Registration(**registration(batch_size=4)))
        lists = [[(1, 3), (2, 200)], [(3, 3), (4, 800), (5, 3)], [(6, 3)], [(7, 800)]]
        waiting = [_groups(*(group(mark, length=length) for mark, length in each)) for each in lists]
        with monkeypatch.context() as full:
            full.setattr(os, "pwritev", lambda fd, parts, offset: pwrite(fd, b"".join(parts), offset))
            full.setattr(os, "pwrite", pwrite)
            answers = await asyncio.gather(*map(service.submit, waiting), return_exceptions=True)
        return answers

    monkeypatch.setenv("ATROPOS_NATIVE", "0")
    store, (first, second, third, fourth) = _run(tmp_path, work)
    assert (first, third) == ([-1, -1], [-1])
    for refused in (second, fourth):
        assert isinstance(refused, JournalError)
        assert "No space left on device" in str(refused)
    assert _marks(store) == [1, 2, 6]
    (tmp_path / "snapshot").unlink()
    again, _ = _run(tmp_path, lambda s: asyncio.sleep(0))
    assert _marks(again) == [1, 2, 6]


def test_a_list_with_a_group_that_is_just_being_refused_is_one_thing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request sent the same id a moment before and fails; the list is written whole, with the group."""

    async def work(service: RolloutService) -> list[Any]:
        await service.register(Registration(**registration(batch_size=4)))
        with monkeypatch.context() as broken:
            broken.setattr(committer, "_sync", _no_sync)
            alone = asyncio.ensure_future(service.submit(_groups(group(1, group_id="one"))))
            await asyncio.sleep(0)  # it is given to the journal
            listed = asyncio.ensure_future(service.submit(_groups(group(2), group(1, group_id="one"))))
            with pytest.raises(JournalError):
                await alone
        return await listed

    monkeypatch.setenv("ATROPOS_NATIVE", "0")
    store, answers = _run(tmp_path, work)
    assert answers == [-1, -1]
    assert _marks(store) == [2, 1]


def _groups(*groups: dict[str, Any]) -> list[WireGroup]:
    return parse_json_groups(json.dumps(groups).encode(), many=True)


def _marks(store: RolloutStore) -> list[int]:
    return [json.loads(stored.payload or b"")["tokens"][0][0] for stored in store.groups.values()]


def test_a_connection_that_was_sent_a_batch_keeps_none_of_its_groups(tmp_path: Path) -> None:
    """A connection that is lost at once is garbage for long: it must not hold memory that the queue wants to use again."""

    async def work(service: RolloutService) -> None:
        await _fill(service, 1)
        delivery = await service.next_batch(plain=True)
        assert delivery is not None
        connection = SimpleNamespace(on_lost=None)
        before = sys.getrefcount(delivery)
        HotRoutes(None, service, BodyLimits())._watch({"atropos.connection": connection}, delivery)  # type: ignore[arg-type]
        assert sys.getrefcount(delivery) == before
        await service.delivered(delivery)
        assert service.store.ledger.batches[1].state is LeaseState.LEASED
        connection.on_lost(ConnectionResetError())
        again = await service.next_batch(plain=True)
        assert again is not None
        assert again.batch.seq == 1

    _run(tmp_path, work)


def test_an_answer_that_fails_harms_nobody_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(service: RolloutService) -> list[Any]:
        await _fill(service, 1)
        journal, answers = service.journal, []
        assert journal is not None

        def unhappy(answer: Any, error: Exception | None) -> None:
            raise RuntimeError("the client's connection is in pieces")

        def happy(answer: Any, error: Exception | None) -> None:
            answers.append((answer, error))

        for number, done in enumerate((happy, unhappy, happy)):
            journal.write(BatchAcked([], False), b"", lambda _, number=number: number, done)  # type: ignore[misc]
        await service.ack(0)
        return answers

    with caplog.at_level("ERROR"):
        _, answers = _run(tmp_path, work)
    assert answers == [(0, None), (2, None)]
    assert "answering after a commit failed" in caplog.text


def test_a_snapshot_of_another_version_is_refused(tmp_path: Path) -> None:
    taken = take_snapshot(RolloutStore(), 7)
    taken.version = 2
    (tmp_path / "snapshot").write_bytes(encode_snapshot(taken))
    with pytest.raises(JournalError, match="has version 2 and this server reads 1"):
        restore_snapshot(tmp_path / "snapshot", RolloutStore(), lambda location: b"")


def test_a_snapshot_is_of_its_moment(tmp_path: Path) -> None:
    """It is encoded on a thread, later; ids that come meanwhile are not in it, those before are, with their answers."""
    store = RolloutStore(remembered_ids=10)
    for number in range(15):
        store.seen.put(f"g{number}", number % 3 - 1)
    taken = take_snapshot(store, 7)
    store.seen.put("later", 5)
    (tmp_path / "snapshot").write_bytes(encode_snapshot(taken))
    again = RolloutStore(remembered_ids=10)
    assert restore_snapshot(tmp_path / "snapshot", again, lambda location: b"") == 7
    assert [again.seen.get(f"g{number}") for number in range(15)] == [number % 3 - 1 for number in range(15)]
    assert again.seen.get("later") is None
    again.seen.put("later", 2)
    (tmp_path / "snapshot").write_bytes(encode_snapshot(take_snapshot(again, 8)))
    third = RolloutStore(remembered_ids=10)
    assert restore_snapshot(tmp_path / "snapshot", third, lambda location: b"") == 8
    assert [third.seen.get(name) for name in ("g0", "g1", "g14", "later")] == [-1, 0, 1, 2]
