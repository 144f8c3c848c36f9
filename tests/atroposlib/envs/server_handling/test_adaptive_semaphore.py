"""The weighted limit: how many slots a weight opens, order of waiters, cancellation."""

from __future__ import annotations

import asyncio

import pytest

from atroposlib.envs.server_handling.adaptive_semaphore import AsyncSemWithAdaptiveWeight
from atroposlib.envs.server_handling.signals import Signal


async def _count_at_once(semaphore: AsyncSemWithAdaptiveWeight, num_tasks: int) -> int:
    running = peak = 0

    async def work() -> None:
        nonlocal running, peak
        async with semaphore:
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0.002)
            running -= 1

    await asyncio.gather(*(work() for _ in range(num_tasks)))
    return peak


@pytest.mark.parametrize(("weight", "expected"), [(1.0, 8), (0.5, 4), (0.25, 2), (0.3, 3), (0.01, 1), (0.0, 1)])
async def test_weight_bounds_what_runs_at_once(weight: float, expected: int) -> None:
    semaphore = AsyncSemWithAdaptiveWeight(8)
    semaphore.update_weight(weight)
    assert await _count_at_once(semaphore, 30) == expected
    assert semaphore._value == 8
    assert semaphore.free_slots() == expected


def test_min_val_follows_the_weight() -> None:
    semaphore = AsyncSemWithAdaptiveWeight(10)
    assert (semaphore.max_val, semaphore.min_val()) == (10, 0.0)
    semaphore.update_weight(0.2)
    assert semaphore.min_val() == pytest.approx(8.0)
    assert isinstance(semaphore, asyncio.Semaphore)


async def test_a_growing_weight_starts_waiters_in_order() -> None:
    semaphore = AsyncSemWithAdaptiveWeight(4)
    semaphore.update_weight(0.25)
    order: list[int] = []

    async def work(number: int) -> None:
        await semaphore.acquire()
        order.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(4)]
    await asyncio.sleep(0.01)
    assert order == [0]
    semaphore.update_weight(1.0)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3]
    assert semaphore.free_slots() == 0


async def test_a_cancelled_waiter_gives_its_turn_on() -> None:
    semaphore = AsyncSemWithAdaptiveWeight(1)
    await semaphore.acquire()
    first, second = (asyncio.create_task(semaphore.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    semaphore.release()
    assert await second is True
    semaphore.release()
    assert semaphore._value == 1


async def test_a_waiter_cancelled_after_its_wake_up_returns_the_slot() -> None:
    semaphore = AsyncSemWithAdaptiveWeight(1)
    await semaphore.acquire()
    waiter = asyncio.create_task(semaphore.acquire())
    await asyncio.sleep(0)
    semaphore.release()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert semaphore._value == 1


async def test_signal_wakes_in_order_and_times_out() -> None:
    signal = Signal()
    calls: list[str] = []
    signal.subscribe(lambda: calls.append("told"))
    woken: list[int] = []

    async def wait(number: int) -> None:
        assert await signal.wait(5.0)
        woken.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(3)]
    await asyncio.sleep(0)
    signal.notify_one()
    await asyncio.sleep(0.01)
    assert woken == [0]
    signal.notify_all()
    await asyncio.gather(*tasks)
    assert woken == [0, 1, 2]
    assert calls == ["told", "told"]
    assert await signal.wait(0.01) is False


async def test_signal_passes_on_the_wake_up_of_a_cancelled_waiter() -> None:
    signal = Signal()
    first, second = (asyncio.create_task(signal.wait(5.0)) for _ in range(2))
    await asyncio.sleep(0)
    signal.notify_one()
    first.cancel()
    assert await asyncio.wait_for(second, 1.0) is True
