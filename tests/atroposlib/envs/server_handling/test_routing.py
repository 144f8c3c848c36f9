"""The choice of a server, on snapshots."""

from __future__ import annotations

from atroposlib.envs.server_handling.routing import ServerLoad, pick_for_request, pick_for_session


def _load(free: float, healthy: bool = True, sessions: int = 0) -> ServerLoad:
    return ServerLoad(healthy=healthy, free_slots=free, num_sessions=sessions)


def test_requests_go_to_the_most_free_healthy_server() -> None:
    assert pick_for_request([_load(1), _load(3), _load(2)]) == 1
    assert pick_for_request([_load(2), _load(2)]) == 0
    assert pick_for_request([_load(9, healthy=False), _load(1)]) == 1
    assert pick_for_request([_load(0), _load(5, healthy=False)]) is None
    assert pick_for_request([]) is None


def test_sessions_count_the_ones_already_open() -> None:
    assert pick_for_session([_load(8, sessions=2), _load(8, sessions=1), _load(8, sessions=1)]) == 1
    assert pick_for_session([_load(8, healthy=False), _load(0)]) == 1
    assert pick_for_session([_load(8, healthy=False), _load(9, healthy=False)]) == 1
