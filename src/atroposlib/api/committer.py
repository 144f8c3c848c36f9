"""Writes one commit of the journal at a time, beside the event loop: records at the end of a file, and a sync if wanted.

`NativeCommitter` has a thread in C (`commit.c`), which needs no interpreter and so never waits for the event loop nor makes it
wait; `ThreadCommitter` is the same in Python, for machines without a C compiler. Both are fed and answer on the event loop:
`add` the records, `begin`, and `done` is called with the result; only then may the next one be fed.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import functools
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from atroposlib import native

SOURCE = Path(__file__).with_name("commit.c")
_MAX_PARTS = 1024  # buffers in one system call
_sync = getattr(os, "fdatasync", os.fsync)


class Committed(NamedTuple):
    """How a commit went."""

    error: OSError | None
    in_sync: bool
    """What was written is in the file, whole: it was the sync that failed, if anything did."""
    sync_seconds: float


Done = Callable[[Committed], None]


class Committer(Protocol):
    """What the journal needs of it."""

    def add(self, head: bytes, payload: bytes) -> None:
        """A record of the next commit."""

    def begin(self, fd: int, offset: int, *, sync: bool) -> None:
        """Write what was added to the file from `offset` on. `done` is called on the loop when it is there, or is not."""

    def close(self) -> None:
        """End the thread; nothing may be under way."""


def prepare() -> None:
    """Compile what there is to compile, if it is not in the cache."""
    _library()


def new_committer(done: Done) -> Committer:
    """The best this machine has. Call it on the event loop."""
    return NativeCommitter(done) if _library() is not None else ThreadCommitter(done)


class ThreadCommitter:
    """In Python."""

    def __init__(self, done: Done) -> None:
        self._loop = asyncio.get_running_loop()
        self._done = done
        self._parts: list[bytes] = []
        self._given: queue.SimpleQueue[tuple[list[bytes], int, int, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def add(self, head: bytes, payload: bytes) -> None:
        self._parts.append(head)
        if payload:
            self._parts.append(payload)

    def begin(self, fd: int, offset: int, *, sync: bool) -> None:
        parts, self._parts = self._parts, []
        self._given.put((parts, fd, offset, sync))

    def close(self) -> None:
        self._given.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            self._loop.call_soon_threadsafe(self._done, write_and_sync(*given))


def write_and_sync(parts: list[bytes], fd: int, offset: int, sync: bool) -> Committed:
    """Write the parts one after the other from `offset` on; sync if wanted."""
    in_sync, started = False, 0.0
    try:
        for first in range(0, len(parts), _MAX_PARTS):
            some = parts[first : first + _MAX_PARTS]
            total, written = sum(map(len, some)), os.pwritev(fd, some, offset)
            while written < total:  # a short write: a signal, or the disk is nearly full
                written += os.pwrite(fd, b"".join(some)[written:], offset + written)
            offset += total
        started = time.monotonic()
        if sync:
            in_sync = True
            _sync(fd)
    except Exception as error:  # without an answer the clients would wait for ever: whatever it is, they hear of it
        reason = error if isinstance(error, OSError) else OSError(errno.EIO, f"{type(error).__name__}: {error}")
        return Committed(reason, in_sync, 0.0)
    return Committed(None, in_sync, time.monotonic() - started if sync else 0.0)


class _Commit(ctypes.Structure):
    """As `commit` in commit.c."""

    _fields_ = (
        ("offset", ctypes.c_int64),
        ("sync_ns", ctypes.c_int64),
        ("fd", ctypes.c_int32),
        ("sync", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("in_sync", ctypes.c_int32),
    )


class NativeCommitter:
    """In C."""

    def __init__(self, done: Done) -> None:
        library = _library()
        assert library is not None
        self._done = done
        self._commit = _Commit()
        self._kept: list[bytes] = []  # what the thread reads has to stay
        self._done_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._handle = ctypes.c_void_p(library.atropos_committer_new(ctypes.addressof(self._commit), self._done_fd))
        if not self._handle:
            os.close(self._done_fd)
            raise MemoryError("the journal's thread could not be started")
        self._add, self._begin, self._end = (
            library.atropos_committer_add,
            library.atropos_committer_begin,
            library.atropos_committer_end,
        )
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._done_fd, self._finished)

    def add(self, head: bytes, payload: bytes) -> None:
        place = native.address(payload)
        if place is None:
            payload = place = bytes(payload)
        self._kept += (head, payload)
        if self._add(self._handle, head, len(head), place, len(payload)):
            raise MemoryError("no memory for the parts of a commit")

    def begin(self, fd: int, offset: int, *, sync: bool) -> None:
        commit = self._commit
        commit.fd, commit.offset, commit.sync = fd, offset, sync
        self._begin(self._handle)

    def _finished(self) -> None:
        os.eventfd_read(self._done_fd)
        self._kept.clear()
        commit = self._commit
        error = OSError(commit.error, os.strerror(commit.error)) if commit.error else None
        self._done(Committed(error, bool(commit.in_sync), commit.sync_ns / 1e9))

    def close(self) -> None:
        self._loop.remove_reader(self._done_fd)
        self._end(self._handle)
        os.close(self._done_fd)


@functools.cache
def _load() -> ctypes.PyDLL | None:
    library = native.load(SOURCE, "-pthread") if hasattr(os, "eventfd") else None
    if library is None:
        return None
    # Calls that return at once keep the interpreter's lock: handing it over would take longer than what they do.
    quick = ctypes.PyDLL(library._name, handle=library._handle)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    quick.atropos_committer_new.restype = pointer
    quick.atropos_committer_new.argtypes = [pointer, ctypes.c_int32]
    quick.atropos_committer_add.argtypes = [pointer, ctypes.c_char_p, size, pointer, size]
    quick.atropos_committer_begin.argtypes = [pointer]
    quick.atropos_committer_end.argtypes = [pointer]
    quick.atropos_committer_begin.restype = quick.atropos_committer_end.restype = None
    return quick


def _library() -> ctypes.PyDLL | None:
    return _load() if native.enabled() else None
