"""Segment files of the journal: records in, records out. Knows bytes and files, not what the records mean.

A record is `event length u32 | payload length u32 | crc32 u32 | number u64 | event | payload`, little-endian; the checksum covers
number, event and payload.
"""

from __future__ import annotations

import itertools
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator
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

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:016d}.log"

    def numbers(self) -> list[int]:
        """First record number of every segment, ascending."""
        return sorted(int(path.stem) for path in self.folder.glob("*.log") if path.stem.isdigit())

    def total_bytes(self) -> int:
        return sum(self._path(number).stat().st_size for number in self.numbers())

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
        for index, number in enumerate(numbers[first:], first):
            yield from self._read_segment(number, lsn, last=index == len(numbers) - 1)

    def _read_segment(
        self, number: int, after: int, *, last: bool
    ) -> Iterator[tuple[int, Event, bytes, Location | None]]:
        path = self._path(number)
        with open(path, "rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                self._damaged(path, 0, last=last)
                return
            position = len(_MAGIC)
            while True:
                record = _read_record(file.read)
                if record is None:
                    if position < path.stat().st_size:
                        self._damaged(path, position, last=last)
                    return
                record_lsn, event, payload = record
                payload_at = file.tell() - len(payload)
                position = file.tell()
                self.next_lsn = max(self.next_lsn, record_lsn + 1)
                if record_lsn > after:
                    yield record_lsn, event, payload, (number, payload_at, len(payload)) if payload else None

    def _damaged(self, path: Path, position: int, *, last: bool) -> None:
        if not last:
            raise JournalError(
                f"the journal segment {path} is damaged at byte {position}; move the data folder away to start afresh, or restore it"
            )
        logger.warning("cutting off an unfinished record at the end of the journal (%s, byte %d)", path.name, position)
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
        if len(data) != length:
            raise JournalError(
                f"the journal segment {self._path(number)} is shorter than it was; restore the data folder"
            )
        return data

    # ---- writing ------------------------------------------------------------------------------------------------------

    def start_new(self) -> None:
        """Open a new segment, which begins with the next record."""
        path = self._path(self.next_lsn)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(fd, _MAGIC)
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self.number, self.size = fd, self.next_lsn, len(_MAGIC)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def append(self, parts: list[bytes], count: int) -> None:
        """Write `count` records; all of them, or none and OSError."""
        assert self._fd is not None
        total = sum(map(len, parts))
        try:
            written = os.writev(self._fd, parts)
            while written < total:  # a short write: a signal, or the disk is nearly full
                rest = b"".join(parts)[written:]
                written += os.write(self._fd, rest)
        except OSError:
            self.cut_back(self.size, self.next_lsn)
            raise
        self.size += total
        self.next_lsn += count

    def cut_back(self, size: int, next_lsn: int) -> None:
        """Take back what a failed write or sync left behind."""
        assert self._fd is not None
        os.ftruncate(self._fd, size)
        os.lseek(self._fd, size, os.SEEK_SET)
        self.size, self.next_lsn = size, next_lsn

    def sync(self) -> None:
        """Force what was written to the disk."""
        if self._fd is not None:
            _sync(self._fd)

    def delete_dead(self, live: set[int], covered_lsn: int) -> None:
        """Delete segments that hold no needed group and only records up to `covered_lsn`."""
        numbers = self.numbers()
        for number, following in itertools.pairwise(numbers):
            if number not in live and following <= covered_lsn + 1 and number != self.number:
                with self._readers_lock:
                    fd = self._readers.pop(number, None)
                if fd is not None:
                    os.close(fd)
                self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        for fd in (*self._readers.values(), *([self._fd] if self._fd is not None else [])):
            os.close(fd)
        self._readers.clear()
        self._fd = None


def _read_record(read: object) -> tuple[int, Event, bytes] | None:
    """The next record, or None at the end or where it is not whole."""
    take = read
    head = take(_HEAD.size)  # type: ignore[operator]
    if len(head) < _HEAD.size:
        return None
    event_length, payload_length, checksum, lsn = _HEAD.unpack(head)
    if not 0 < event_length <= _MAX_EVENT:
        return None
    event = take(event_length)  # type: ignore[operator]
    payload = take(payload_length)  # type: ignore[operator]
    if len(event) < event_length or len(payload) < payload_length:
        return None
    if crc32(payload, zlib.crc32(_NUMBER.pack(lsn) + event)) != checksum:
        return None
    try:
        return lsn, decode_event(event), payload
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
