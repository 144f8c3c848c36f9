"""White space out of queued JSON groups, when the server has nothing better to do.

Most clients write a blank after every comma; on disk and on the wire that does no harm, in memory it is a tenth. Taking it
out costs as much as a third of reading a group, so it waits until no group has come in for a moment, works in slices of a
few milliseconds, and hands the freed pages back to the operating system when it is done.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections import deque
from collections.abc import Sequence

from atroposlib.api.store import RolloutStore, StoredGroup

Spans = Sequence[tuple[int, int]]

QUIET_S = 0.1
"""No group for this long counts as quiet."""
_SLICE_S = 0.003


def without_blanks(payload: bytes, spans: Spans) -> bytes:
    """The text with the blanks taken out of these parts of it."""
    parts: list[bytes] = []
    position = 0
    for start, end in spans:
        parts += (payload[position:start], payload[start:end].replace(b" ", b""))
        position = end
    return b"".join((*parts, payload[position:]))


class Compactor:
    """Groups that still have blanks in memory. Belongs to the event loop."""

    def __init__(self, store: RolloutStore) -> None:
        self._store = store
        self._waiting: deque[tuple[StoredGroup, Spans]] = deque()
        self._last_added = 0.0
        self._scheduled = False

    def add(self, key: int, spans: Spans) -> None:
        """This group was stored; these parts of its payload hold blanks (maybe none: then only freed memory is given back)."""
        group = self._store.groups.get(key)
        if spans and group is not None:
            self._waiting.append((group, spans))
        self._last_added = time.monotonic()
        if not self._scheduled:
            self._schedule(QUIET_S)

    def _schedule(self, delay: float) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_later(delay, self._work)

    def _work(self) -> None:
        self._scheduled = False
        quiet = time.monotonic() - self._last_added
        if quiet < QUIET_S:
            self._schedule(QUIET_S - quiet)
            return
        stop_at = time.monotonic() + _SLICE_S
        while self._waiting and time.monotonic() < stop_at:
            group, spans = self._waiting.popleft()
            if group.payload is not None and self._store.groups.get(group.key) is group:
                group.payload = without_blanks(bytes(group.payload), spans)
        if self._waiting:
            self._schedule(0.001)
        else:
            asyncio.get_running_loop().run_in_executor(None, _give_pages_back)


def _give_pages_back() -> None:
    """Where the C library can (glibc), return freed memory to the operating system."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return
