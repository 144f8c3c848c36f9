"""The limit on requests in flight to one server, scaled by the environment's share of it."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable


class AsyncSemWithAdaptiveWeight(asyncio.Semaphore):
    """A semaphore of which only the share ``weight`` may be used; the share can change while requests run.

    ``_value`` counts free slots of the whole; a slot is given out only while ``_value > min_val()``, so with a weight
    of 0.25 and 8 slots at most 2 are in use. At least one slot can always be used. Waiters are served in order.

    Example: ``async with AsyncSemWithAdaptiveWeight(512): ...``
    """

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.max_val = value
        self.weight = 1.0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._subscribers: list[Callable[[], None]] = []

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever a slot may have become free."""
        self._subscribers.append(callback)

    def update_weight(self, weight: float) -> None:
        """Set the usable share, between 0 and 1."""
        self.weight = min(1.0, max(0.0, weight))
        self._hand_out()

    def min_val(self) -> float:
        """Slots that stay free at the present weight."""
        return self.max_val * (1.0 - self.weight)

    def free_slots(self) -> int:
        """How many requests could start now."""
        floor = min(self.min_val(), self.max_val - 1)
        return max(0, math.ceil(self._value - floor - 1e-9))

    def locked(self) -> bool:
        """Whether ``acquire`` would wait."""
        return self.free_slots() == 0 or any(not future.done() for future in self._queue)

    async def acquire(self) -> bool:  # type: ignore[override]
        """Take a slot, waiting for one if needed."""
        if not self.locked():
            self._value -= 1
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release()
            else:
                future.cancel()
            raise
        return True

    def release(self) -> None:
        """Give a slot back and start the next waiter if the weight allows."""
        self._value += 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._queue and self.free_slots() > 0:
            future = self._queue.popleft()
            if future.done() or future.get_loop().is_closed():
                continue
            self._value -= 1
            future.set_result(None)
        for callback in self._subscribers:
            callback()
