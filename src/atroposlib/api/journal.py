"""The journal: every event on disk before it is answered, so that a killed server comes back where it was.

A data folder holds
    <number>.log    segments of records, written one after the other; the name is the number of the first record
    <number>.spare  a segment that was needed once; the next one is written over it
    snapshot        the small state (no payloads) as of some record, replaced atomically
    lock            held by the one server that uses the folder

The records of a few turns of the event loop are a commit, which a thread writes with one system call and syncs once (`committer`); while
it does, the next ones gather. Records are applied to the store on the event loop, in the order in which they are on disk, and only
then answered. A record that does not fit on the disk is cut off again and its request fails; nothing else is harmed.

At start the snapshot is restored (payloads are read from where they lie) and the records after it are applied; a torn record at
the very end is cut off. A new snapshot is taken whenever a segment is full; segments in which no group is needed any more and
which the snapshot covers are given up.

Durability: `safe` syncs before answering (survives a power cut); `interval` writes before answering and syncs every second;
`none` leaves syncing to the operating system. All three survive the death of the process.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import functools
import itertools
import logging
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from atroposlib.api import committer
from atroposlib.api.events import Event, GroupAdded, encode_event
from atroposlib.api.segments import Segments, record_bytes
from atroposlib.api.snapshot import Snapshot, encode_snapshot, restore_snapshot, take_snapshot
from atroposlib.api.store import Counters, RolloutStore, StoredGroup
from atroposlib.errors import JournalError

logger = logging.getLogger(__name__)

Done = Callable[[Any, Exception | None], None]
"""Called on the loop with what applying the event gave, or with the reason why it was not written."""
Durability = Literal["safe", "interval", "none"]
Location = tuple[int, int, int]
_LOOK_AT_DISK_S = 0.02
_ENOUGH_BYTES = 2**20
_ENOUGH_TURNS = 16


class _Snapshot(NamedTuple):
    """The small state after some record, and the segments in which it has groups."""

    state: Snapshot
    live: set[int]


@dataclass(slots=True)
class _Write:
    """A record on its way to the disk."""

    event: bytes
    payload: bytes
    apply: Callable[[Location | None], Any]
    done: Done
    together: object | None = None
    location: Location | None = None
    error: OSError | None = None
    lsn: int = 0


class Journal:
    """The journal of one data folder. `open`, `write` and `close` belong to the event loop."""

    def __init__(
        self,
        folder: Path,
        *,
        durability: Durability = "safe",
        segment_bytes: int = 256 * 2**20,
        interval_s: float = 1.0,
        min_free_bytes: int = 64 * 2**20,
    ) -> None:
        self.folder = folder
        self.durability = durability
        self.segment_bytes = segment_bytes
        self.interval_s = interval_s
        self.min_free_bytes = min_free_bytes
        self.is_open = False
        self.sync_seconds = 0.0
        self.sync_count = 0
        self.failed_writes = 0
        self._live: dict[int, int] = {}  # groups still needed, by segment
        self._gathered: list[_Write] = []  # for the next commit
        self._batch: list[_Write] = []  # of the commit that is being written
        self._size_then = self._lsn_then = 0  # of the segment, when it is there
        self._busy = False
        self._idle: asyncio.Future[None] | None = None  # somebody waits for the end of all commits
        self._aside: asyncio.Future[None] | None = None  # what has to happen on a thread before the next commit
        self._unsynced_since: float | None = None
        self._lock_file: Any = None
        self._applied_lsn = 0
        self._free_bytes, self._looked_at = 0, 0.0
        self._tidying: asyncio.Future[None] | None = None

    # ---- start and stop -----------------------------------------------------------------------------------------------

    async def open(self, store: RolloutStore) -> None:
        """Take the folder, read it back into the (empty) store, start writing."""
        self._loop = asyncio.get_running_loop()
        self._store = store
        self.take_folder()
        started = time.monotonic()
        self.segments = Segments(self.folder)
        records = await asyncio.to_thread(self._replay)
        store.counters = Counters()  # they count what this process does
        store.ledger.settle_after_restart()
        self._applied_lsn = self.segments.next_lsn - 1
        self.segments.start_new()
        await asyncio.to_thread(committer.prepare)
        self._committer = committer.new_committer(self._committed)
        self.is_open = True
        await asyncio.to_thread(self._keep, self._snapshot())
        if records or store.groups:
            logger.info(
                "read the journal in %s: %d groups stored, %d batches open, step %d (%d records, %.2f s)",
                self.folder, len(store.groups), len(store.ledger.batches), store.current_step, records, time.monotonic() - started,
            )  # fmt: skip

    def take_folder(self) -> None:
        """Make the folder and lock it; JournalError when another server has it. `open` does so, if nobody did before."""
        if self._lock_file is not None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock_file = open(self.folder / "lock", "w")  # noqa: SIM115 (held until close)
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock_file.close()
            raise JournalError(
                f"the data folder {self.folder} is used by another rollout server; stop it or give another --data-dir"
            ) from None
        except OSError as error:
            raise JournalError(
                f"the data folder {self.folder} cannot be used: {error}; give another --data-dir, or --in-memory"
            ) from error
        self._lock_file = lock_file

    def _replay(self) -> int:
        """Restore the snapshot and apply what came after it. Returns the number of records applied."""
        store = self._store
        store.on_forget = self._forgotten
        after = restore_snapshot(self.folder / "snapshot", store, self.segments.read)
        for group in store.groups.values():
            self._needed(group.location)
        count = 0
        for lsn, event, payload, location in self.segments.records_after(after):
            if isinstance(event, GroupAdded) and event.given_id and store.seen.get(event.group_id) is not None:
                continue  # refused after all when it came first, and sent again: it counts once
            self._needed(location)
            store.apply(event, payload, location)
            self._applied_lsn = lsn
            count += 1
        return count

    async def close(self) -> None:
        """Write what is waiting, take a last snapshot, give the folder back."""
        self.is_open = False
        while self._busy or self._gathered:
            self._idle = self._loop.create_future()
            await self._idle
        self._committer.close()
        await asyncio.to_thread(self._sync)
        if self._tidying is not None:
            await asyncio.wait([self._tidying])
        await asyncio.to_thread(self._keep, self._snapshot())
        await asyncio.to_thread(self.segments.close)
        self._lock_file.close()
        self._lock_file = None

    # ---- writing ------------------------------------------------------------------------------------------------------

    def write(
        self,
        event: Event,
        payload: bytes,
        apply: Callable[[Location | None], Any],
        done: Done,
        together: object | None = None,
    ) -> None:
        """Journal an event; then `apply` is called on the loop with the payload's location, and `done` with its result.

        Events given in one turn of the loop with the same `together` are all written, or none of them is.
        """
        if not self.is_open:
            done(None, JournalError("the server is shutting down; send it again to the next one"))
            return
        self._gathered.append(_Write(encode_event(event), payload, apply, done, together))
        if not self._busy and len(self._gathered) == 1:
            self._loop.call_soon(self._gather)

    def _gather(self, before: int = 0, turns: int = 0) -> None:
        """Wait while every turn of the loop brings more, up to a point: one sync is for all of it."""
        count = len(self._gathered)
        if (
            count == before
            or turns == _ENOUGH_TURNS
            or sum(len(write.payload) for write in self._gathered) >= _ENOUGH_BYTES
        ):
            self._commit()
        else:
            self._loop.call_soon(self._gather, count, turns + 1)

    def _commit(self) -> None:
        """Begin to write what has gathered, unless something is being written."""
        if self._busy or not self._gathered:
            return
        self._busy = True
        batch, self._gathered = self._gathered, []
        full = self._is_disk_full()
        segments = self.segments
        size, lsn = segments.size, segments.next_lsn
        for write in batch:
            if full and write.payload:
                write.error = OSError(
                    errno.ENOSPC, f"less than {self.min_free_bytes >> 20} MiB are free in {self.folder}"
                )
                continue
            head = self._place(write, lsn, size)
            self._committer.add(head, write.payload)
            size += len(head) + len(write.payload)
            lsn += 1
        self._batch, self._size_then, self._lsn_then = batch, size, lsn
        self._committer.begin(segments.fd, segments.size, sync=self._is_sync_due())

    def _place(self, write: _Write, lsn: int, position: int) -> bytes:
        """The head of a record that is written there; remembers where it is."""
        payload = write.payload
        head = record_bytes(lsn, write.event, payload)
        write.lsn = lsn
        if payload:
            write.location = (self.segments.number, position + len(head), len(payload))
        return head

    def _is_sync_due(self) -> bool:
        if self.durability == "interval":
            return self._unsynced_since is not None and time.monotonic() - self._unsynced_since >= self.interval_s
        return self.durability == "safe"

    def _committed(self, result: committer.Committed) -> None:
        """A commit is on disk, or failed."""
        batch, self._batch = self._batch, []
        if result.error is not None:
            logger.error("the journal cannot be %s: %s", "synced" if result.in_sync else "written", result.error)
            rescue = functools.partial(asyncio.to_thread, self._rescue, batch, result)
            self._do_aside(rescue, functools.partial(self._answer, batch))
            return
        self.segments.grow(self._size_then, self._lsn_then)
        if result.in_sync:
            self._synced(result.sync_seconds)
        elif self.durability == "interval" and self._unsynced_since is None:
            self._unsynced_since = time.monotonic()
            self._loop.call_later(self.interval_s, self._sync_in_time)
        self._answer(batch)

    def _answer(self, batch: list[_Write]) -> None:
        """Apply what is on disk, in order, and answer; then on to the next commit."""
        for write in batch:
            try:
                self._apply(write)
            except Exception:  # of the one who is answered; the others must not suffer from it
                logger.exception("answering after a commit failed")
        if self.segments.size >= self.segment_bytes:
            self._do_aside(self._rotate, self._rotated)
        else:
            self._go_on()

    def _apply(self, write: _Write) -> None:
        if write.error is not None:
            self.failed_writes += 1
            reason = f"the journal in {self.folder} cannot be written: {write.error}; free some space and send it again"
            write.done(None, JournalError(reason))
            return
        self._needed(write.location)
        self._applied_lsn = write.lsn
        try:
            result = write.apply(write.location)
        except Exception as error:  # bookkeeping that must not fail; if it does, the request has to hear of it
            logger.exception("applying a journalled event failed")
            write.done(None, error)
            return
        write.done(result, None)

    def _go_on(self) -> None:
        self._busy = False
        if self._gathered:
            self._loop.call_soon(self._gather)
        elif self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _do_aside(self, work: Callable[[], Coroutine[Any, Any, object]], after: Callable[[], None]) -> None:
        """Something slow while no commit is written; then `after`."""

        async def aside() -> None:
            try:
                await work()
            except Exception:  # whatever it is, the next commits must not wait for it
                logger.exception("the journal is in trouble")
            after()

        self._aside = asyncio.ensure_future(aside())

    def _rescue(self, batch: list[_Write], result: committer.Committed) -> None:
        """A commit failed. Nothing refused may be there after a restart; what still fits, one after the other, is kept."""
        segments, before = self.segments, (self.segments.size, self.segments.next_lsn)
        error = result.error
        try:
            segments.cut_back(*before)
            if not result.in_sync:
                for _, several in itertools.groupby(batch, lambda write: write.together or id(write)):
                    self._write_together(list(several))
                error = self._sync() if self.durability == "safe" else None
                if error is not None:
                    segments.cut_back(*before)
        except Exception as failed:  # without an answer the clients would wait for ever; they hear of it
            logger.exception("writing the journal failed")
            error = OSError(errno.EIO, f"{type(failed).__name__}: {failed}")
        for write in batch:
            write.error = write.error or error

    def _write_together(self, writes: list[_Write]) -> None:
        """Append these records, or none of them."""
        segments, before = self.segments, (self.segments.size, self.segments.next_lsn)
        error = writes[0].error
        for write in writes:
            if error is not None:
                break
            head = self._place(write, segments.next_lsn, segments.size)
            error = committer.write_and_sync([head, write.payload], segments.fd, segments.size, False).error
            segments.grow(segments.size + len(head) + len(write.payload), segments.next_lsn + 1)
        if error is not None:
            segments.cut_back(*before)
            for write in writes:
                write.error = error

    def _is_disk_full(self) -> bool:
        """Asks the system every few milliseconds while there is room, every time while there is none."""
        now = time.monotonic()
        if self._free_bytes < self.min_free_bytes or now - self._looked_at > _LOOK_AT_DISK_S:
            try:
                stat = os.statvfs(self.folder)
            except OSError:
                return False
            self._free_bytes, self._looked_at = stat.f_bavail * stat.f_frsize, now
        return self._free_bytes < self.min_free_bytes

    def _sync_in_time(self) -> None:
        """For `interval`: what nobody followed is synced, too."""
        if self._unsynced_since is None or not self.is_open:
            return
        if self._busy:
            self._loop.call_later(self.interval_s, self._sync_in_time)
            return
        self._busy = True
        self._do_aside(functools.partial(asyncio.to_thread, self._sync), self._go_on)

    def _sync(self) -> OSError | None:
        started = time.monotonic()
        try:
            self.segments.sync()
        except OSError as error:
            logger.error("the journal cannot be synced: %s", error)
            return error
        self._synced(time.monotonic() - started)
        return None

    def _synced(self, seconds: float) -> None:
        self.sync_seconds += seconds
        self.sync_count += 1
        self._unsynced_since = None

    # ---- snapshots and tidying ----------------------------------------------------------------------------------------

    def _needed(self, location: Location | None) -> None:
        if location is not None:
            self._live[location[0]] = self._live.get(location[0], 0) + 1

    def _forgotten(self, group: StoredGroup) -> None:
        if group.location is not None:
            segment = group.location[0]
            self._live[segment] -= 1
            if not self._live[segment]:
                del self._live[segment]

    def _snapshot(self) -> _Snapshot:
        """The store as it is now."""
        return _Snapshot(take_snapshot(self._store, self._applied_lsn), set(self._live))

    async def _rotate(self) -> None:
        """The segment is full. What nobody needs any more is the next one."""
        await asyncio.to_thread(self._start_segment, self._snapshot())

    def _start_segment(self, snapshot: _Snapshot) -> None:
        try:
            self.segments.sync()
            self._keep(snapshot)
            self.segments.start_new()
        except OSError as error:  # goes on in the old segment; the next commit tries again
            logger.error("the journal cannot start a new segment: %s", error)

    def _rotated(self) -> None:
        if self._tidying is None or self._tidying.done():
            self._tidying = asyncio.ensure_future(asyncio.to_thread(self.segments.trim_spares))
        self._go_on()

    def _keep(self, snapshot: _Snapshot) -> None:
        """Replace the snapshot; then segments that it needs neither for a group nor for a record are given up."""
        try:
            _replace_file(self.folder / "snapshot", encode_snapshot(snapshot.state))
        except OSError as error:
            logger.error("no snapshot could be written: %s", error)
            return
        self.segments.give_up_dead(snapshot.live, snapshot.state.lsn)

    def read(self, location: Location | None) -> bytes:
        """The payload at a location."""
        if location is None:
            raise JournalError("a group has no place in the journal")
        return self.segments.read(location)

    def disk_bytes(self) -> int:
        """Bytes the segments take."""
        return self.segments.total_bytes() if self.is_open else 0


def _replace_file(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".new")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
