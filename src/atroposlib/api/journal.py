"""The journal: every event on disk before it is answered, so that a killed server comes back where it was.

A data folder holds
    <number>.log    segments of records, appended to; the name is the number of the first record
    snapshot        the small state (no payloads) as of some record, replaced atomically
    lock            held by the one server that uses the folder

The records of one turn of the event loop are handed over together. One writer thread takes all that are waiting, writes them with
one system call and syncs once (group commit); while it syncs, the next ones gather. Records are applied to the store on the
event loop, in the order in which they are on disk, and only then answered. A record that does not fit on the disk is cut off
again and its request fails; nothing else is harmed.

At start the snapshot is restored (payloads are read from where they lie) and the records after it are applied; a torn record at
the very end is cut off. A new snapshot is taken whenever a segment is full; segments in which no group is needed any more and
which the snapshot covers are deleted.

Durability: `safe` syncs before answering (survives a power cut); `interval` writes before answering and syncs every second;
`none` leaves syncing to the operating system. All three survive the death of the process.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from atroposlib.api.events import Event, GroupAdded, encode_event
from atroposlib.api.segments import Segments, record_bytes
from atroposlib.api.snapshot import restore_snapshot, take_snapshot
from atroposlib.api.store import Counters, RolloutStore, StoredGroup
from atroposlib.errors import JournalError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Durability = Literal["safe", "interval", "none"]
Location = tuple[int, int, int]
_MAX_PARTS = 512  # buffers in one writev
_LOOK_AT_DISK_S = 0.02


@dataclass(slots=True)
class _Write:
    event: bytes
    payload: bytes
    apply: Callable[[Any], Any]
    future: asyncio.Future[Any]
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
        self._gathered: list[_Write] = []  # of this turn of the loop
        self._handed: queue.SimpleQueue[list[_Write] | None] = queue.SimpleQueue()  # to the thread; None is the end
        self._lock_file: Any = None
        self._snapshot_lsn = 0
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
        self.is_open = True
        self._thread = threading.Thread(target=self._write_loop, name="journal", daemon=True)
        self._thread.start()
        await self._tidy()
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
        self._snapshot_lsn = restore_snapshot(self.folder / "snapshot", store, self.segments.read)
        for group in store.groups.values():
            self._needed(group.location)
        count = 0
        for lsn, event, payload, location in self.segments.records_after(self._snapshot_lsn):
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
        self._hand_over()
        self._handed.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)  # lets the last completions run
        if self._tidying is not None:
            await asyncio.wait([self._tidying])
        await self._tidy()
        self.segments.close()
        self._lock_file.close()
        self._lock_file = None

    # ---- writing ------------------------------------------------------------------------------------------------------

    def write(self, event: Event, payload: bytes, apply: Callable[[Location | None], T]) -> asyncio.Future[T]:
        """Journal an event; then `apply` is called on the loop with the payload's location, and its result is the future's."""
        future: asyncio.Future[T] = self._loop.create_future()
        if not self.is_open:
            future.set_exception(JournalError("the server is shutting down; send it again to the next one"))
            return future
        self._gathered.append(_Write(encode_event(event), payload, apply, future))
        if len(self._gathered) == 1:
            self._loop.call_soon(self._hand_over)
        return future

    def _hand_over(self) -> None:
        gathered, self._gathered = self._gathered, []
        self._handed.put(gathered)

    def _write_loop(self) -> None:
        """The writer thread."""
        last_sync, unsynced, ended = time.monotonic(), False, False
        while not ended:
            batch, ended = self._waiting(self.interval_s if unsynced and self.durability == "interval" else None)
            if batch:
                self._write_or_fail(batch)
                unsynced = self.durability != "safe"
            if unsynced and self.durability == "interval" and time.monotonic() - last_sync >= self.interval_s:
                self._sync()
                last_sync, unsynced = time.monotonic(), False
            if batch:
                rotated = self.segments.size >= self.segment_bytes and self._rotate()
                self._loop.call_soon_threadsafe(self._complete, batch, rotated)
        self._sync()

    def _waiting(self, timeout: float | None) -> tuple[list[_Write], bool]:
        """All that was handed over, as soon as there is something or the time is up; and whether nothing more will come."""
        batch: list[_Write] = []
        try:
            given = self._handed.get(timeout=timeout)
            while given is not None:
                batch += given
                given = self._handed.get_nowait()
        except queue.Empty:
            return batch, False
        return batch, True

    def _write_or_fail(self, batch: list[_Write]) -> None:
        try:
            self._write_batch(batch)
        except (
            Exception
        ) as error:  # without its thread the server would wait for ever: whatever it is, the requests hear of it
            logger.exception("writing the journal failed")
            for write in batch:
                write.error = OSError(errno.EIO, f"{type(error).__name__}: {error}")

    def _write_batch(self, batch: list[_Write]) -> None:
        full = self._is_disk_full()
        writes: list[_Write] = []
        for write in batch:
            if full and write.payload:
                write.error = OSError(
                    errno.ENOSPC, f"less than {self.min_free_bytes >> 20} MiB are free in {self.folder}"
                )
            else:
                writes.append(write)
        before = self.segments.size, self.segments.next_lsn
        for start in range(0, len(writes), _MAX_PARTS // 2):
            chunk = writes[start : start + _MAX_PARTS // 2]
            error = self._append(chunk)
            if error is not None:  # one by one: what still fits is kept, the rest fails
                for write in chunk:
                    write.error = self._append([write])
        if self.durability == "safe" and (error := self._sync()) is not None:
            self.segments.cut_back(*before)  # what is refused must not be there after a restart
            for write in writes:
                write.error = write.error or error
        self.failed_writes += sum(1 for write in batch if write.error is not None)

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

    def _append(self, writes: list[_Write]) -> OSError | None:
        segments = self.segments
        parts: list[bytes] = []
        position, lsn = segments.size, segments.next_lsn
        for write in writes:
            head = record_bytes(lsn, write.event, write.payload)
            parts.append(head)
            if write.payload:
                parts.append(write.payload)
                write.location = (segments.number, position + len(head), len(write.payload))
            write.lsn = lsn
            position += len(head) + len(write.payload)
            lsn += 1
        try:
            segments.append(parts, len(writes))
        except OSError as error:
            return error
        return None

    def _sync(self) -> OSError | None:
        started = time.monotonic()
        try:
            self.segments.sync()
        except OSError as error:
            logger.error("the journal cannot be synced: %s", error)
            return error
        self.sync_seconds += time.monotonic() - started
        self.sync_count += 1
        return None

    def _rotate(self) -> bool:
        try:
            self.segments.sync()
            self.segments.start_new()
        except OSError as error:  # goes on in the old segment; the next batch tries again
            logger.error("the journal cannot start a new segment: %s", error)
            return False
        return True

    def _complete(self, batch: list[_Write], rotated: bool) -> None:
        """On the loop: apply what is on disk, in order, and answer."""
        for write in batch:
            if write.error is not None:
                _fail(
                    write.future,
                    JournalError(
                        f"the journal in {self.folder} cannot be written: {write.error}; free some space and send it again"
                    ),
                )
                continue
            self._needed(write.location)
            self._applied_lsn = write.lsn
            try:
                result = write.apply(write.location)
            except (
                Exception
            ) as error:  # applying is bookkeeping that must not fail; if it does, the request has to hear of it
                logger.exception("applying a journalled event failed")
                _fail(write.future, error)
                continue
            if not write.future.done():
                write.future.set_result(result)
        if rotated and (self._tidying is None or self._tidying.done()):
            self._tidying = asyncio.ensure_future(self._tidy())

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

    async def _tidy(self) -> None:
        """Take a snapshot of the store as it is now and delete the segments nobody needs."""
        lsn = self._applied_lsn
        data = take_snapshot(self._store, lsn)
        try:
            await asyncio.to_thread(_replace_file, self.folder / "snapshot", data)
        except OSError as error:
            logger.error("no snapshot could be written: %s", error)
            return
        self._snapshot_lsn = lsn
        await asyncio.to_thread(self.segments.delete_dead, set(self._live), lsn)

    def read(self, location: Location | None) -> bytes:
        """The payload at a location."""
        if location is None:
            raise JournalError("a group has no place in the journal")
        return self.segments.read(location)

    def disk_bytes(self) -> int:
        """Bytes the segments take."""
        return self.segments.total_bytes() if self.is_open else 0


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


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
