"""Several coroutines at once of which the results count together or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def gather_or_cancel(*work: Awaitable[T]) -> list[T]:
    """As ``asyncio.gather``, but when one fails, or the caller is cancelled, nothing goes on behind the caller's back.

    The others are cancelled and have ended before the first failure is raised.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:  # also a cancellation: whatever it is goes on to the caller
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
