"""``GroupWorkers``: the tasks that make groups, one per item: start, collect, send, time out, cancel.

A worker is cancelled only when an evaluation asks for the machine (STOP_TRAIN), when it is overdue, or when the run
ends. A group that is already on its way to the rollout server is never cancelled for any of these.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

from atroposlib.envs import groups
from atroposlib.envs.env_metrics import Stopwatch
from atroposlib.envs.server_handling.policy_versions import record_policy_versions
from atroposlib.errors import InferenceUnavailableError

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv

logger = logging.getLogger(__name__)
MAX_BACKOFF_S = 15.0
TIMINGS_KEPT = 10_000


class GroupWorkers:
    """The running groups of one environment (kept in its ``workers``, ``running_items`` and ``backlog``)."""

    def __init__(self, env: BaseEnv, wake: asyncio.Event) -> None:
        self.env = env
        self.wake = wake
        self._failures_in_a_row = 0
        self._start_again_at = 0.0
        self._tried_again: dict[int, Any] = {}  # id(item) -> item that timed out once

    def may_start(self) -> bool:
        """False while the limit is reached, or for a moment after many failures in a row."""
        return time.monotonic() >= self._start_again_at and len(self.env.workers) < self.env.max_num_workers

    async def fill(self, allowed: int) -> None:
        """Start groups until ``allowed`` are in flight or no item is left; running ones are left alone."""
        env = self.env
        if env.curr_step != 0 or env.workers:
            append_bounded(env.workers_added_list, allowed - len(env.workers))
        while len(env.workers) < allowed:
            item = await self._next_item()
            if item is None:
                break
            self.start(item)

    async def _next_item(self) -> Any:
        """The oldest item of the backlog, else a new one; None when there is nothing now."""
        if self.env.backlog:
            return self.env.backlog.pop(0)
        try:
            return await self.env.get_next_item()
        except Exception as error:  # user code: counted and shown, tried again after a pause
            self.env.statistics.failures.record("get_next_item", error)
            self._back_off()
            return None

    def start(self, item: Any) -> str:
        """Begin a group for ``item``; returns its uuid."""
        env = self.env
        item_uuid = str(uuid.uuid4())
        worker = asyncio.create_task(env.handle_env(item_uuid), name=f"group {item_uuid}")
        env.running_items[item_uuid] = {"item": item, "worker": worker, "start_time": time.time()}
        env.workers.add(worker)

        def ended(task: asyncio.Task[Any]) -> None:
            env.workers.discard(task)
            if not task.cancelled():
                error = task.exception()
                if error is not None:
                    env.statistics.failures.record("handle_env", error)
                elif task.result():
                    env.last_completed_item = item
            self.wake.set()

        worker.add_done_callback(ended)
        return item_uuid

    async def run_item(self, item_uuid: str) -> Any:
        """One group from item to rollout server: collect, postprocess, send, clean up."""
        env = self.env
        item = env.running_items[item_uuid]["item"]
        watch = Stopwatch()
        result = await self._collect(item)
        try:
            result = await postprocess(env, result)
        except Exception as error:  # user code: counted and shown, never a score
            env.statistics.failures.record("postprocess_histories", error)
            result = None
        env.running_items.pop(item_uuid, None)
        self._tried_again.pop(id(item), None)
        append_bounded(env.task_duration, watch.seconds)
        env.task_successful.append(int(result is not None))
        del env.task_successful[:-TIMINGS_KEPT]
        if result is not None:
            env.statistics.recent_seconds.append(watch.seconds)
            append_bounded(env.succeeded_task_duration, watch.seconds)
            try:
                await env.handle_send_to_api(result, item)
            except Exception as error:  # user code (overrides, add_rollouts_for_wandb): counted and shown
                env.statistics.failures.record("handle_send_to_api", error)
        else:
            append_bounded(env.failed_task_duration, watch.seconds)
        await env.cleanup()
        return result

    async def _collect(self, item: Any) -> Any:
        env = self.env
        try:
            with record_policy_versions() as versions:
                result, backlog = await env.collect_trajectories(item)
        except InferenceUnavailableError as error:  # not the item's fault: it is done when a server is back
            env.statistics.failures.record("inference_unavailable", error)
            env.backlog.append(item)
            self._back_off()
            return None
        except Exception as error:  # user code: counted and shown, never a score
            env.statistics.failures.record("collect_trajectories", error)
            self._back_off()
            return None
        self._failures_in_a_row = 0
        env.backlog.extend(backlog or [])
        groups.add_policy_versions(result, versions)
        return result

    def _back_off(self) -> None:
        """After many failures in a row new groups wait a little, longer each time."""
        self._failures_in_a_row += 1
        excess = self._failures_in_a_row - max(4, self.env.max_num_workers)
        if excess >= 0:
            self._start_again_at = time.monotonic() + min(MAX_BACKOFF_S, 0.25 * 2 ** min(excess, 8))

    def cancel_running(self) -> None:
        """Cancel every rollout in the making; its item goes to the front of the backlog. Groups being sent go on."""
        env = self.env
        records = sorted(env.running_items.values(), key=lambda record: record["start_time"])
        env.running_items.clear()
        env.backlog[:0] = [record["item"] for record in records]
        for record in records:
            self._cancel(record)

    def _cancel(self, record: dict[str, Any]) -> None:
        self.env.statistics.num_worker_cancellations += 1
        worker = record["worker"]
        if worker is not None:
            worker.cancel()
            self.env.workers.discard(worker)

    def cancel_overdue(self) -> None:
        """Cancel groups older than ``worker_timeout``; their item is tried once more, then given up."""
        env = self.env
        if env.config.worker_timeout <= 0:
            return
        now = time.time()
        overdue = [
            key for key, record in env.running_items.items() if now - record["start_time"] > env.config.worker_timeout
        ]
        for item_uuid in overdue:
            record = env.running_items.pop(item_uuid)
            item = record["item"]
            env.statistics.num_timeouts += 1
            again = id(item) not in self._tried_again
            fate = "tried once more" if again else "given up"
            logger.warning(
                "a group took longer than worker_timeout=%s s; its item is %s", env.config.worker_timeout, fate
            )
            if again:
                self._tried_again[id(item)] = item
                env.backlog.append(item)
            else:
                del self._tried_again[id(item)]
            self._cancel(record)


async def postprocess(env: BaseEnv, result: Any) -> Any:
    """What the environment's ``postprocess_histories``, a coroutine or a plain function, makes of a result; no result stays none."""
    if not result:
        return result
    processed = env.postprocess_histories(result)
    return await processed if inspect.isawaitable(processed) else processed


def append_bounded(values: list[float], value: float) -> None:
    """Append and forget the oldest entries beyond a bound: nobody may read these lists."""
    values.append(value)
    if len(values) > TIMINGS_KEPT:
        del values[: TIMINGS_KEPT // 2]
