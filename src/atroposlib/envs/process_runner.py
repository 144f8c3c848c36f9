"""``ProcessRunner``: make a number of groups and write them to a file, with a progress bar and a page at the end.

Groups are made concurrently up to the environment's worker limit. A failure costs one item: it is counted, shown
once per kind, and the next item is taken. Only groups that were really written count.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atroposlib.envs import groups
from atroposlib.envs.group_workers import postprocess
from atroposlib.envs.server_handling.policy_versions import record_policy_versions
from atroposlib.errors import AtroposError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from atroposlib.envs.base import BaseEnv

logger = logging.getLogger(__name__)
MIN_FRUITLESS = 20
"""Items in a row without a group before the run gives up (or five rounds of workers, if that is more)."""
EMPTY_PATIENCE = 10
"""So many times more items may pass of which the environment itself makes no group: too easy or too hard, no fault."""


class ProcessRunner:
    """Makes ``n_groups_to_process`` groups of one environment.

    Example: ``await ProcessRunner(env).run()``
    """

    def __init__(self, env: BaseEnv) -> None:
        self.env = env
        self.no_more_items = False
        self.fruitless = 0
        self.empty = 0
        self.num_empty = 0
        self.written = 0

    async def run(self) -> None:
        """Make the groups, close the file, write the page; an error when not one group came out."""
        env = self.env
        await env.setup()
        env.start_own_wandb_run()
        env.curr_step = 0
        env.config.group_size = env.group_size_to_process or env.config.group_size
        try:
            with _progress_bar() as progress:
                await self._make_groups(progress, progress.add_task("groups", total=env.n_groups_to_process))
        finally:
            if env.jsonl_writer is not None:
                env.jsonl_writer.close()
            await env.close_servers()
        self._write_page()
        self._judge()

    async def _make_groups(self, progress: Progress, bar: TaskID) -> None:
        env = self.env
        limit = max(1, env.max_num_workers)
        try:
            while True:
                await self._start_workers(limit)
                if not env.workers:
                    return
                done, _ = await asyncio.wait(env.workers, return_when=asyncio.FIRST_COMPLETED)
                env.workers -= done
                for worker in done:
                    await self._settle(worker)
                progress.update(bar, completed=self.written)
        finally:
            for worker in env.workers:
                worker.cancel()

    async def _start_workers(self, limit: int) -> None:
        env = self.env
        while len(env.workers) < min(limit, env.n_groups_to_process - self.written) and not self._gives_up():
            item = await self._next_item()
            if item is not None:
                env.workers.add(asyncio.create_task(self._make_group(item)))
            elif self.no_more_items or env.workers:  # the end, or a failure: tried again when a worker is done
                return

    async def _next_item(self) -> Any:
        env = self.env
        if env.backlog:
            return env.backlog.pop(0)
        if self.no_more_items:
            return None
        try:
            item = await env.get_next_item()
        except Exception as error:  # user code: counted and shown; a stream that keeps failing ends the run
            env.statistics.failures.record("get_next_item", error)
            self.fruitless += 1
            return None
        self.no_more_items = item is None
        return item

    async def _make_group(self, item: Any) -> int | None:
        """Groups of ``item`` that passed the checks and were written; None when the environment made none."""
        env = self.env
        with record_policy_versions() as versions:
            result, backlog = await env.collect_trajectories(item)
        env.backlog.extend(backlog or [])
        groups.add_policy_versions(result, versions)
        try:
            result = await postprocess(env, result)
        except Exception as error:  # user code: counted and shown, costs this item
            env.statistics.failures.record("postprocess_histories", error)
            return 0
        made = [group for group in (result if isinstance(result, list) else [result]) if group]
        written = 0
        for group in made:
            before = env.statistics.num_groups_accepted
            await env.handle_send_to_api(group, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False)
            written += int(env.statistics.num_groups_accepted > before)
        await env.cleanup()
        return written if made else None

    async def _settle(self, worker: asyncio.Task[Any]) -> None:
        env = self.env
        error = asyncio.CancelledError("cancelled from inside") if worker.cancelled() else worker.exception()
        if error is not None:
            env.statistics.failures.record("collect_trajectories", error)
        written = 0 if error is not None else worker.result()
        if written is None:
            self.empty += 1
            self.num_empty += 1
            return
        if not written:
            self.fruitless += 1
            return
        self.fruitless = self.empty = 0
        self.written += written
        try:
            await env.wandb_log()
        except Exception as failure:  # user code or wandb: shown, the data is safe already
            env.statistics.failures.record("wandb_log", failure)
        env.curr_step += 1

    def _gives_up(self) -> bool:
        limit = max(MIN_FRUITLESS, 5 * min(self.env.max_num_workers, self.env.n_groups_to_process))
        return self.fruitless >= limit or self.empty >= EMPTY_PATIENCE * limit

    def _write_page(self) -> None:
        path = self.env.config.data_path_to_save_groups
        if path and self.written:
            from atroposlib.frontend.jsonl2html import generate_html

            generate_html(path, str(Path(path).with_suffix(".html")))
            logger.info("%d groups in %s, page in %s", self.written, path, Path(path).with_suffix(".html"))

    def _judge(self) -> None:
        env = self.env
        if self.written >= env.n_groups_to_process:
            return
        failures = env.statistics.failures.counts
        causes = [f"{cause}: {count}" for cause, count in {**env.statistics.rejected, **failures}.items()]
        if self.num_empty:
            causes.append(f"no group from the environment: {self.num_empty}")
        if self.no_more_items:
            causes.append("get_next_item returned None")
        summary = "; ".join(causes)
        message = f"{self.written} of {env.n_groups_to_process} groups made ({summary})"
        if self.written == 0 and env.n_groups_to_process > 0:
            raise AtroposError(f"{message}; nothing was written{', see the first error above' if failures else ''}")
        logger.warning("%s", message)


def _progress_bar() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))
