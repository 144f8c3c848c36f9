"""A broadcast that coroutines wait on without polling, independent of any one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Signal:
    """Waiters in arrival order; a notification wakes one or all, and calls every subscriber.

    Futures belong to the loop of the waiter, so one object survives several event loops (tests, notebooks).
    """

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._subscribers: list[Callable[[], None]] = []

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on every notification."""
        self._subscribers.append(callback)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a notification; False when ``timeout_s`` passed first."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return False
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.notify_one()  # the wake-up this waiter will not use belongs to the next one
            raise
        finally:
            if not future.done():
                future.cancel()
        return True

    def notify_one(self) -> None:
        """Wake the waiter that has waited longest."""
        while self._waiters:
            future = self._waiters.popleft()
            if self._wake(future):
                break
        self._tell()

    def notify_all(self) -> None:
        """Wake every waiter."""
        while self._waiters:
            self._wake(self._waiters.popleft())
        self._tell()

    def _tell(self) -> None:
        for callback in self._subscribers:
            callback()

    @staticmethod
    def _wake(future: asyncio.Future[None]) -> bool:
        if future.done() or future.get_loop().is_closed():
            return False
        future.set_result(None)
        return True
