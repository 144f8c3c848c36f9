"""What an environment counts and shows: failures of user code, groups sent and rejected, timings, wandb.

``EnvStatistics`` goes to the rollout server (the live page), ``perf_stats`` and ``length_stats`` go to wandb.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import string
import time
import traceback
from collections import Counter, deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from atroposlib.utils.metrics import get_std_min_max_avg

logger = logging.getLogger(__name__)
RECENT = 256
"""Rewards and durations kept for the means on the live page."""


class FailureLog:
    """Counts exceptions by kind and shows the traceback of each kind once.

    A kind is where it happened, the exception's type and the line that raised it.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.by_place: Counter[str] = Counter()

    def record(self, place: str, error: BaseException) -> str:
        """Count ``error``; returns its kind."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown line"
        kind = f"{place}: {type(error).__name__} at {where}"
        self.counts[kind] += 1
        self.by_place[place] += 1
        if self.counts[kind] == 1:
            text = "".join(traceback.format_exception(error))
            logger.error("%s failed (shown once per kind, counted from now on):\n%s", place, text)
        else:
            logger.debug("%s failed again (%d times): %s", place, self.counts[kind], error)
        return kind


@dataclass(kw_only=True, slots=True)
class EnvStatistics:
    """Counters of one environment process since its start."""

    num_groups_accepted: int = 0
    """Groups that passed every check of ours."""
    num_groups_sent: int = 0
    num_sequences_sent: int = 0
    num_timeouts: int = 0
    num_worker_cancellations: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Groups not sent, or refused by the rollout server, by reason."""
    failures: FailureLog = field(default_factory=FailureLog)
    recent_scores: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    recent_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _shown: set[str] = field(default_factory=set)

    def note_sent(self, group: Any) -> None:
        """Count a group that was handed over."""
        self.num_groups_sent += 1
        self.num_sequences_sent += len(group["tokens"])
        self.recent_scores.extend(float(score) for score in group.get("scores") or [])

    def note_rejected(self, reason: str, detail: str) -> None:
        """Count a group that is not sent; the first of each reason is shown."""
        self.rejected[reason] += 1
        if reason not in self._shown:
            self._shown.add(reason)
            logger.warning("group rejected (%s): %s; further ones are only counted", reason, detail)

    def report(self, *, num_workers: int, num_backlog: int) -> dict[str, float]:
        """The numbers for the live page."""
        metrics: dict[str, float] = {
            "rollout/num_groups_sent": self.num_groups_sent,
            "rollout/num_sequences_sent": self.num_sequences_sent,
            "rollout/num_groups_rejected": sum(self.rejected.values()),
            "rollout/num_failures": sum(self.failures.counts.values()),
            "rollout/num_timeouts": self.num_timeouts,
            "rollout/num_workers": num_workers,
            "rollout/num_backlog": num_backlog,
        }
        metrics.update({f"rollout/num_groups_rejected_{reason}": count for reason, count in self.rejected.items()})
        metrics.update({f"rollout/num_failures_{place}": count for place, count in self.failures.by_place.items()})
        get_std_min_max_avg("rollout/reward", list(self.recent_scores), metrics)
        get_std_min_max_avg("rollout/seconds", list(self.recent_seconds), metrics)
        return metrics


PERF_LISTS = (
    # attribute of the environment, metric, counter that goes with it
    ("task_duration", "train_perf/task_duration", None),
    ("succeeded_task_duration", "train_perf/succeeded_task_duration", "train/items_sent_to_api"),
    ("failed_task_duration", "train_perf/failed_task_duration", "train/items_rejected"),
    ("mainloop_timings", "train_perf/mainloop_timings", None),
    ("workers_added_list", "train_perf/workers_added_per_attempt", None),
)


def perf_stats(env: Any, metrics: dict[str, Any]) -> dict[str, Any]:
    """Timings of the environment's loop; each list with more than one entry is summed up and emptied."""
    for attribute, name, counter in PERF_LISTS:
        values = getattr(env, attribute)
        if len(values) <= 1:
            continue
        get_std_min_max_avg(name, values, metrics)
        if counter is not None:
            metrics[counter] = len(values)
        setattr(env, attribute, [])
    return metrics


def length_stats(lengths: list[int], max_token_len: int, metrics: dict[str, Any]) -> None:
    """Completion lengths; the ``_p95`` entry is the share of completions longer than 95 % of the limit."""
    if not lengths:
        return
    stats = get_std_min_max_avg("lengths", lengths, {})
    metrics["train/completion_lengths"] = stats["lengths_mean"]
    for part in ("std", "max", "min"):
        metrics[f"train/completion_lengths_{part}"] = stats[f"lengths_{part}"]
    metrics["train/completion_lengths_p95"] = sum(length > 0.95 * max_token_len for length in lengths) / len(lengths)


async def server_metrics(servers: list[Any]) -> dict[str, Any]:
    """The metrics of every inference server, not only of the last one."""
    merged: dict[str, Any] = {}
    for index, server in enumerate(servers):
        collect = getattr(server, "wandb_metrics", None)
        if collect is None:
            continue
        own = collect({}, f"server_{index}")
        own = await own if inspect.isawaitable(own) else own
        merged.update(own or {})
    return merged


def run_name(prefix: str | None) -> str | None:
    """``{prefix}-{date}-{six letters}``; None stays None."""
    if prefix is None:
        return None
    letters = "".join(random.choices(string.ascii_lowercase, k=6))
    return f"{prefix}-{datetime.now(tz=UTC).strftime('%Y-%m-%d')}-{letters}"


def is_wandb_installed() -> bool:
    """True when wandb can be imported; otherwise one warning says what to do."""
    try:
        import wandb  # noqa: F401
    except ImportError:
        logger.warning(
            "wandb is not installed, so nothing is logged there; pip install 'atropos-atlas[wandb]' or set use_wandb=False"
        )
        return False
    return True


def _is_wandb_set_up(wandb: Any) -> bool:
    """False when ``wandb.init`` would stop to ask for a key."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return True
    api = getattr(wandb, "api", None)
    return api is None or bool(api.api_key)


def start_wandb(**settings: Any) -> bool:
    """``wandb.init(**settings)``; False, with one warning, when wandb is absent or not set up."""
    if not is_wandb_installed():
        return False
    import wandb

    try:
        if not _is_wandb_set_up(wandb):
            raise ConnectionError("no API key")
        wandb.init(**settings)
    except Exception as error:  # wandb raises many kinds (no key, no network, bad mode); none may stop an environment
        hint = "set WANDB_API_KEY, WANDB_MODE=offline or use_wandb=False"
        logger.warning("wandb could not start (%s: %s), nothing is logged there; %s", type(error).__name__, error, hint)
        return False
    return True


class Stopwatch:
    """Seconds since it was made.

    Example: ``watch = Stopwatch(); ...; watch.seconds``
    """

    def __init__(self) -> None:
        self.start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self.start
