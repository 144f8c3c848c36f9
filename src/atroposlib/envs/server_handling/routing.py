"""Which server takes the next request: a pure choice over a snapshot of loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.adaptive_semaphore import AsyncSemWithAdaptiveWeight


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLoad:
    """One server as the choice sees it."""

    healthy: bool
    free_slots: float  # requests that could start now
    num_sessions: int = 0  # open managed sessions: requests that will come


def snapshot(servers: Sequence[Any], is_train: bool) -> list[ServerLoad]:
    """The present load of every server, for training or evaluation requests."""
    return [_load(server, is_train) for server in servers]


def _load(server: Any, is_train: bool) -> ServerLoad:
    semaphore = server.sem if is_train else server.eval_sem
    if isinstance(semaphore, AsyncSemWithAdaptiveWeight):
        free: float = semaphore.free_slots()
    else:  # a stand-in of a test: anything with the counter of a semaphore
        floor = semaphore.min_val() if hasattr(semaphore, "min_val") else 0
        free = max(0, semaphore._value - floor)
    return ServerLoad(
        healthy=bool(getattr(server, "server_healthy", True)),
        free_slots=free,
        num_sessions=int(getattr(server, "num_open_sessions", 0) or 0),
    )


def pick_for_request(loads: Sequence[ServerLoad]) -> int | None:
    """Index of the healthy server with the most free slots, the first on ties; None when none can start a request."""
    return _best([index for index, load in enumerate(loads) if load.healthy and load.free_slots > 0], loads)


def pick_for_session(loads: Sequence[ServerLoad]) -> int:
    """Index of the server for a session: healthy, fewest promised requests; the first when all are down.

    Sessions are opened before their requests start, so the ones already open count against a server.
    """
    candidates = [index for index, load in enumerate(loads) if load.healthy] or list(range(len(loads)))
    return max(candidates, key=lambda index: (loads[index].free_slots - loads[index].num_sessions, -index))


def _best(candidates: Sequence[int], loads: Sequence[ServerLoad]) -> int | None:
    if not candidates:
        return None
    return max(candidates, key=lambda index: (loads[index].free_slots, -index))
