"""How many groups may be in flight, and when a step boundary was passed. Pure functions.

The rule: what waits at the rollout server plus what is being made stays within ``max_batches_offpolicy`` batches.
An environment knows the queue but not the work of its neighbours, so of the free places it takes only its own
share (``env_weight``): together they fill the room once, not once per environment. A running group is never
cancelled because the room shrank; it finishes, and only new ones wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueStatus:
    """What the rollout server says about the queue (sizes in groups of this environment's size)."""

    current_step: int = 0
    queue_size: int = 0
    self_queue_size: int = 0
    unallocated_fraction: float = 1.0
    max_group_size: int = 1
    env_weight: float = 1.0

    @classmethod
    def from_reply(cls, reply: Mapping[str, Any]) -> QueueStatus:
        """Read a ``/status-env`` reply; fields an older server lacks keep their defaults."""
        return cls(
            current_step=int(reply.get("current_step", 0)),
            queue_size=int(reply.get("queue_size", 0)),
            self_queue_size=int(reply.get("self_queue_size", 0)),
            unallocated_fraction=float(reply.get("unallocated_fraction", 1.0)),
            max_group_size=max(1, int(reply.get("max_group_size", 1))),
            env_weight=float(reply.get("env_weight", 1.0)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetLimits:
    """The settings that bound the work of one environment."""

    group_size: int
    batch_size: int
    max_num_workers: int
    max_batches_offpolicy: int = 3
    min_batch_allocation: float | None = None
    ignores_share: bool = False
    """True for a negative ``inference_weight``: take all free places, not a share of them."""


def derived_batch_size(batch_size: int, status: QueueStatus | None, min_batch_allocation: float | None) -> int:
    """The part of a batch this environment may fill: what nobody reserved plus its own reservation."""
    if status is None or batch_size == -1:
        return batch_size
    return int(batch_size * (status.unallocated_fraction + (min_batch_allocation or 0.0)))


def free_places(limits: BudgetLimits, status: QueueStatus) -> int | None:
    """Groups that may still be queued or made before the off-policy bound; None without a bound."""
    if limits.max_batches_offpolicy <= 0:
        return None
    room = derived_batch_size(limits.batch_size, status, limits.min_batch_allocation)
    return limits.max_batches_offpolicy * room // limits.group_size - status.queue_size


def reserved_places(limits: BudgetLimits, status: QueueStatus) -> int:
    """Groups in flight that the environment's own minimum share of the coming batches asks for."""
    if limits.min_batch_allocation is None or limits.max_batches_offpolicy <= 0:
        return 0
    largest = max(status.max_group_size, limits.group_size)
    bundles = math.ceil(limits.min_batch_allocation * limits.batch_size * limits.max_batches_offpolicy / largest)
    sequences_wanted = (bundles + largest // limits.group_size) * largest
    sequences_queued = status.self_queue_size * limits.group_size
    return max(0, math.ceil((sequences_wanted - sequences_queued) / limits.group_size))


def allowed_workers(limits: BudgetLimits, status: QueueStatus, *, cap: int | None = None) -> int:
    """How many groups may be in flight now; never above ``max_num_workers`` (or ``cap`` during an evaluation)."""
    most = limits.max_num_workers if cap is None else min(cap, limits.max_num_workers)
    if limits.batch_size <= 0:
        return 0
    free = free_places(limits, status)
    if free is None:
        return max(0, most)
    share = 1.0 if limits.ignores_share else min(1.0, max(0.0, status.env_weight))
    own_places = math.ceil(free * share) if free > 0 else 0
    return max(0, min(most, max(own_places, reserved_places(limits, status))))


def eval_cap(max_num_workers: int, eval_limit_ratio: float) -> int:
    """Training workers that go on during an evaluation under LIMIT_TRAIN."""
    return int(max_num_workers * eval_limit_ratio)


def is_enough(status: QueueStatus, *, group_size: int, batch_size: int, total_steps: int) -> bool:
    """True when the batches taken and those waiting already reach beyond ``total_steps``: no more groups are needed."""
    if batch_size <= 0:
        return False
    return status.current_step + status.queue_size * group_size // batch_size > total_steps


def crosses_boundary(old_step: int, new_step: int, interval: int) -> bool:
    """True when a multiple of ``interval`` lies in ``(old_step, new_step]``; also for ``interval=1``."""
    return interval > 0 and new_step > old_step and new_step // interval > old_step // interval
