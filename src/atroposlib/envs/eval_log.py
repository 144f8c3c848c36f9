"""Results of an evaluation on disk and on the terminal, and a bounded pool to run one in."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from atroposlib.envs.group_writer import JsonlWriter, to_plain
from atroposlib.utils.display import display_metrics_table
from atroposlib.utils.gathering import gather_or_cancel

logger = logging.getLogger(__name__)
T = TypeVar("T")
PROGRESS_EVERY_S = 10.0


def evaluation_record(
    metrics: Mapping[str, Any],
    *,
    task_name: str,
    model_name: str | None,
    seconds: float | None,
    generation_parameters: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of ``metrics.json``."""
    return {
        "config_general": {
            "model_name": model_name,
            "total_evaluation_time_seconds": str(seconds),
            "generation_parameters": dict(generation_parameters),
        },
        "results": {f"atropos|{task_name}|0": dict(metrics), "all": dict(metrics)},
    }


def write_evaluation(
    metrics: Mapping[str, Any],
    *,
    eval_dir: str | None,
    task_name: str,
    model_name: str | None,
    start_time: float | None,
    end_time: float | None,
    generation_parameters: Mapping[str, Any],
    samples: Sequence[Any] | None,
    verbose: bool,
) -> None:
    """Write ``metrics.json`` (and ``samples.jsonl``) under ``eval_dir`` and print a table."""
    if verbose:
        display_metrics_table(task_name, metrics, start_time, end_time)
    if eval_dir is None:
        logger.warning("evaluation of %s not written: set data_dir_to_save_evals (EvalBase: eval_dir)", task_name)
        return
    folder = Path(eval_dir)
    folder.mkdir(parents=True, exist_ok=True)
    seconds = end_time - start_time if start_time is not None and end_time is not None else None
    record = evaluation_record(
        metrics,
        task_name=task_name,
        model_name=model_name,
        seconds=seconds,
        generation_parameters=generation_parameters,
    )
    (folder / "metrics.json").write_text(json.dumps(record, indent=2, default=to_plain), encoding="utf-8")
    if samples:
        path = folder / "samples.jsonl"
        path.unlink(missing_ok=True)
        with JsonlWriter(path) as writer:
            for sample in samples:
                writer.write(sample)


def model_name_of(config: Any, servers: Sequence[Any]) -> str | None:
    """The model under evaluation: the config's own ``model_name``, else that of the first server."""
    own = getattr(config, "model_name", None)
    if own:
        return str(own)
    for server in servers:
        name = getattr(getattr(server, "config", None), "model_name", None)
        if name:
            return str(name)
    return None


async def gather_bounded(tasks: Iterable[Awaitable[T]], *, max_at_once: int, title: str) -> list[T]:
    """Await all of ``tasks`` with at most ``max_at_once`` running; results in order, progress in the log.

    When one fails the others are cancelled.
    """
    waiting = list(tasks)
    slots = asyncio.Semaphore(max(1, max_at_once))
    done = 0
    loop = asyncio.get_running_loop()
    shown_at = loop.time()

    async def run(task: Awaitable[T]) -> T:
        nonlocal done, shown_at
        async with slots:
            result = await task
        done += 1
        if loop.time() - shown_at > PROGRESS_EVERY_S:
            shown_at = loop.time()
            logger.info("%s: %d of %d", title, done, len(waiting))
        return result

    try:
        return await gather_or_cancel(*(run(task) for task in waiting))
    finally:
        for task in waiting:  # after a failure: those whose turn never came
            if asyncio.iscoroutine(task):
                task.close()
