"""No full garbage collection while replies are being sampled.

A full collection walks through every container of the process; with torch and transformers loaded that takes 0.2 to
0.5 s, in which no step is launched. Young objects are collected as ever.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 1 << 30
_lock = threading.Lock()
_inside = 0
_before = gc.get_threshold()


@contextmanager
def full_collections_later() -> Iterator[None]:
    """Inside this block, in any thread, full collections wait; the first object after it may start one."""
    global _inside, _before
    with _lock:
        if _inside == 0:
            _before = gc.get_threshold()
            gc.set_threshold(_before[0], _before[1], _NEVER)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                gc.set_threshold(*_before)
