"""Memory for queued groups: large mappings, filled from one end and used again, with huge pages where the system has them.

A queue grows and shrinks by hundreds of megabytes. Taken from the heap, every group costs a page fault per 4 KiB on its way
in and again as many pages to give back on its way out: more time than it takes to check the group. Here groups lie one after
the other in mappings of `SLAB_BYTES`, which the system fills 2 MiB at a time. A mapping whose last group is gone is filled anew;
when more than `SPARE_BYTES` are empty, the rest goes back to the system. Groups leave in the order in which they came, so few
mappings are ever half empty.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections.abc import Sequence

SLAB_BYTES = 64 * 2**20
SPARE_BYTES = 256 * 2**20
_ALIGN = 64


class Slabs:
    """Hands out pieces of memory; a piece is free when nobody refers to it any more. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mappings: list[mmap.mmap] = []  # the one that was begun last is the last
        self._slab = memoryview(b"")  # the one that is being filled
        self._used = 0
        self._begun = 0  # how many have been begun

    def take(self, length: int) -> memoryview:
        """So many writable bytes, with anything in them."""
        if length > SLAB_BYTES // 4:  # would leave too much of a mapping empty
            return memoryview(new_mapping(length))
        with self._lock:
            return self._next(length)

    def _next(self, length: int) -> memoryview:
        if self._used + length > len(self._slab):
            self._begin_another()
        start, self._used = self._used, _aligned(self._used + length)
        return self._slab[start : start + length]

    def join(self, parts: Sequence[bytes | memoryview]) -> memoryview:
        """The parts one after the other in one piece."""
        piece = self.take(sum(map(len, parts)))
        position = 0
        for part in parts:
            end = position + len(part)
            piece[position:end] = part
            position = end
        return piece

    def trim(self) -> None:
        """Groups are gone: give back what is empty and more than is kept for the next ones."""
        if len(self._mappings) * SLAB_BYTES <= SPARE_BYTES:
            return
        with self._lock:
            empty = self._empty()
            for index in reversed(empty[SPARE_BYTES // SLAB_BYTES :]):
                del self._mappings[index]

    def _begin_another(self) -> None:
        self._slab = memoryview(b"")  # a mapping is as empty as its groups say, not kept by this
        empty = self._empty()
        self._mappings.append(self._mappings.pop(empty[0]) if empty else new_mapping(SLAB_BYTES))
        self._slab, self._used = memoryview(self._mappings[-1]), 0
        self._begun += 1

    def _empty(self) -> list[int]:
        """Which mappings nobody refers to: every piece of memory holds a reference to the mapping it is in."""
        return [index for index in range(len(self._mappings)) if sys.getrefcount(self._mappings[index]) <= _OURS]


class Window:
    """Where a reader puts what comes, again and again, until some of it is to be kept: that stays where it is.

    A window lies at the end of what is used, so that the room behind the kept part is the next window. When something else was
    taken since, what is kept is copied instead. The first window is ordinary memory: a reader that keeps nothing holds no mapping.
    """

    def __init__(self, slabs: Slabs, length: int) -> None:
        self._slabs, self._length = slabs, length
        self.view = memoryview(bytearray(length))
        self._start, self._begun = 0, -1  # where it lies, and in which mapping

    def keep(self, start: int, end: int) -> memoryview:
        """Bytes [start, end) of the view as a piece of their own. The view is another one afterwards."""
        slabs, piece = self._slabs, self.view[start:end]
        with slabs._lock:
            if self._begun == slabs._begun and slabs._used == _aligned(self._start + self._length):
                slabs._used = _aligned(self._start + end)
                self._move()
                return piece
        piece = slabs.join([piece])
        if self._begun != slabs._begun:
            with slabs._lock:
                self._move()
        return piece

    def _move(self) -> None:
        self.view = self._slabs._next(self._length)
        self._start, self._begun = self._slabs._used - _aligned(self._length), self._slabs._begun


def _aligned(length: int) -> int:
    return (length + _ALIGN - 1) // _ALIGN * _ALIGN


def new_mapping(length: int) -> mmap.mmap:
    """Memory that goes back to the system as soon as nobody refers to it; for what is large and short-lived, too."""
    mapped = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system that was built without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


_OURS = 2  # the list's reference and that of the question itself

slabs = Slabs()
"""Those of this process."""
