"""Segment files of the journal: records in, records out. Knows bytes and files, not what the records mean.

A record is `event length u32 | payload length u32 | crc32 u32 | number u64 | event | payload`, little-endian; the checksum covers
number, event and payload. Records are numbered without gaps, and a segment ends where the next number does not follow: what comes then
was left by a write that did not end, or by an earlier life of the file. A segment that nobody needs is kept as a spare and written
over: that costs a fraction of what it costs to delete a large file and make another one.
"""

from __future__ import annotations

import itertools
import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from atroposlib.api.events import Event, decode_event
from atroposlib.api.native_scan import crc32
from atroposlib.errors import JournalError

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<IIIQ")
_NUMBER = struct.Struct("<Q")
_MAGIC = b"ATROPOS\x01"
_MAX_EVENT = 64 * 2**20

Location = tuple[int, int, int]

_sync = getattr(os, "fdatasync", os.fsync)


def record_bytes(lsn: int, event: bytes, payload: bytes) -> bytes:
    """Head and event of a record; the payload is written after it."""
    checksum = crc32(payload, zlib.crc32(_NUMBER.pack(lsn) + event))
    return _HEAD.pack(len(event), len(payload), checksum, lsn) + event


class Segments:
    """The segment files of a folder; the newest is appended to. Appending belongs to one thread; reading may be any."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.next_lsn = 1
        self.number = 0
        self.size = 0
        self._fd: int | None = None
        self._readers: dict[int, int] = {}
        self._readers_lock = threading.Lock()
        self._spares_lock = threading.Lock()

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:016d}.log"

    def numbers(self) -> list[int]:
        """First record number of every segment, ascending."""
        return sorted(int(path.stem) for path in self.folder.glob("*.log") if path.stem.isdigit())

    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in (*map(self._path, self.numbers()), *self._spares()))

    def _spares(self) -> list[Path]:
        return sorted(self.folder.glob("*.spare"))

    # ---- reading ------------------------------------------------------------------------------------------------------

    def records_after(self, lsn: int) -> Iterator[tuple[int, Event, bytes, Location | None]]:
        """Every record with a number above `lsn`: number, event, payload, location of the payload. Cuts off a torn tail."""
        self.next_lsn = lsn + 1
        numbers = self.numbers()
        if numbers and numbers[0] > lsn + 1:
            raise JournalError(
                f"records {lsn + 1} to {numbers[0] - 1} of the journal in {self.folder} are missing; restore the folder, or move it away to start afresh"
            )
        first = max((index for index, number in enumerate(numbers) if number <= lsn + 1), default=0)
        for number, following in itertools.zip_longest(numbers[first:], numbers[first + 1 :]):
            yield from self._read_segment(number, lsn, following)

    def _read_segment(
        self, number: int, after: int, following: int | None
    ) -> Iterator[tuple[int, Event, bytes, Location | None]]:
        """The records of one segment; `following` is the number of the next segment's first record."""
        path, lsn, position, torn = self._path(number), number, 0, True
        with open(path, "rb") as file:
            if file.read(len(_MAGIC)) == _MAGIC:
                position = file.tell()
                while (record := _read_record(file.read, lsn)) is not None:
                    event, payload = record
                    position = file.tell()
                    if lsn > after:
                        yield lsn, event, payload, (number, position - len(payload), len(payload)) if payload else None
                    lsn += 1
                file.seek(position)
                torn = _number_of(file.read(_HEAD.size)) in (None, lsn)
        if following is not None and lsn != following:
            raise JournalError(
                f"the journal segment {path} is damaged at byte {position}; move the data folder away to start afresh, or restore it"
            )
        self.next_lsn = max(self.next_lsn, lsn)
        if following is None and position < path.stat().st_size:
            self._cut_off(path, position, torn)

    def _cut_off(self, path: Path, position: int, torn: bool) -> None:
        """Behind the last record is nothing but an unfinished one, or what an earlier life of the file left."""
        if torn:
            logger.warning(
                "cutting off an unfinished record at the end of the journal (%s, byte %d)", path.name, position
            )
        with open(path, "r+b") as file:
            file.truncate(position)
            if position == 0:
                file.write(_MAGIC)

    def read(self, location: Location) -> bytes:
        """The payload at a location."""
        number, offset, length = location
        with self._readers_lock:
            fd = self._readers.get(number)
            if fd is None:
                try:
                    fd = self._readers[number] = os.open(self._path(number), os.O_RDONLY)
                except OSError as error:
                    raise JournalError(
                        f"the journal segment {self._path(number)} cannot be read: {error}; restore the data folder"
                    ) from error
        data = b"".join(iter(_chunks(fd, offset, length)))
        if len(data) != length or self._readers.get(number) != fd:  # or it was given up meanwhile
            raise JournalError(
                f"the journal segment {self._path(number)} has changed since it was written; restore the data folder"
            )
        return data

    # ---- writing ------------------------------------------------------------------------------------------------------

    def start_new(self) -> None:
        """Open a new segment, which begins with the next record."""
        path = self._path(self.next_lsn)
        with self._spares_lock:
            for spare in self._spares()[:1]:
                os.replace(spare, path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(fd, _MAGIC, 0)
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self.number, self.size = fd, self.next_lsn, len(_MAGIC)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @property
    def fd(self) -> int:
        """The file that is written to."""
        assert self._fd is not None
        return self._fd

    def grow(self, size: int, next_lsn: int) -> None:
        """Records were written at the end of the newest segment."""
        self.size, self.next_lsn = size, next_lsn

    def cut_back(self, size: int, next_lsn: int) -> None:
        """Take back what a failed write or sync left behind."""
        self.grow(size, next_lsn)
        os.ftruncate(self.fd, size)

    def sync(self) -> None:
        """Force what was written to the disk."""
        if self._fd is not None:
            _sync(self._fd)

    def give_up_dead(self, live: set[int], covered_lsn: int) -> None:
        """Segments that hold no needed group and only records up to `covered_lsn` become spares."""
        for number, following in itertools.pairwise(self.numbers()):
            if number not in live and following <= covered_lsn + 1 and number != self.number:
                with self._readers_lock:
                    fd = self._readers.pop(number, None)
                if fd is not None:
                    os.close(fd)
                path = self._path(number)
                os.replace(path, path.with_suffix(".spare"))

    def trim_spares(self, keep: int = 1) -> None:
        """Delete the spares but so many. Deleting a large file takes long: nobody should wait for it."""
        with self._spares_lock:
            doomed = [spare.rename(spare.with_suffix(".gone")) for spare in self._spares()[keep:]]
        for path in (*doomed, *self.folder.glob("*.gone")):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave no more behind than is needed."""
        if self._fd is not None:
            os.ftruncate(self._fd, self.size)
        self.trim_spares(keep=0)
        for fd in (*self._readers.values(), *([self._fd] if self._fd is not None else [])):
            os.close(fd)
        self._readers.clear()
        self._fd = None


def _number_of(head: bytes) -> int | None:
    """The number in the head of a record; None where there is no whole head."""
    return _HEAD.unpack(head)[3] if len(head) == _HEAD.size else None


def _read_record(read: Callable[[int], bytes], lsn: int) -> tuple[Event, bytes] | None:
    """The record with this number; None where it is not, or not whole."""
    head = read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    event_length, payload_length, checksum, number = _HEAD.unpack(head)
    if number != lsn or not 0 < event_length <= _MAX_EVENT:
        return None
    event, payload = read(event_length), read(payload_length)
    if len(event) < event_length or len(payload) < payload_length:
        return None
    if crc32(payload, zlib.crc32(_NUMBER.pack(lsn) + event)) != checksum:
        return None
    try:
        return decode_event(event), payload
    except msgspec.MsgspecError as error:
        raise JournalError(
            f"record {lsn} of the journal is whole but unknown ({error}); it was written by another version"
        ) from error


def _chunks(fd: int, offset: int, length: int) -> Iterator[bytes]:
    while length:
        data = os.pread(fd, length, offset)
        if not data:
            return
        yield data
        offset += len(data)
        length -= len(data)
