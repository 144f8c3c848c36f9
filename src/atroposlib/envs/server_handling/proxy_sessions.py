"""The sessions of the proxy: created, found by their unguessable id, forgotten when nobody uses them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class SessionState:
    """One session of the proxy."""

    managed_server: Any
    model_name: str
    tool_parser: str
    base_url: str | None
    track_tree: bool = False
    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))
    created_at: float = field(default_factory=time.time)
    last_accessed: float = field(default_factory=time.time)
    num_in_flight: int = 0

    def num_nodes(self) -> int:
        """How many sequences are recorded."""
        return len(self.nodes())

    def nodes(self) -> list[Any]:
        """The recorded sequences."""
        state = self.managed_server.get_state()
        return list(state["sequences"].values() if "sequences" in state else state["nodes"])


class SessionStore:
    """All sessions; the ones not used for ``ttl_s`` seconds are closed at the next look."""

    def __init__(
        self, ttl_s: float, on_close: Callable[[SessionState], None], now: Callable[[], float] = time.time
    ) -> None:
        self.ttl_s = ttl_s
        self._on_close = on_close
        self._now = now
        self._sessions: dict[str, SessionState] = {}

    def __len__(self) -> int:
        self.expire()
        return len(self._sessions)

    def all(self) -> list[SessionState]:
        """Every open session."""
        self.expire()
        return list(self._sessions.values())

    def add(self, session: SessionState) -> SessionState:
        """Keep a new session."""
        self.expire()
        session.created_at = session.last_accessed = self._now()
        self._sessions[session.uuid] = session
        return session

    def get(self, session_id: str) -> SessionState | None:
        """The session, noted as used now."""
        self.expire()
        session = self._sessions.get(session_id)
        if session is not None:
            session.last_accessed = self._now()
        return session

    def close(self, session_id: str) -> bool:
        """Forget a session; False when there is none."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        self._on_close(session)
        return True

    def expire(self) -> None:
        """Close what nobody has used for too long; a session with a request in flight is in use."""
        oldest = self._now() - self.ttl_s
        stale = [s.uuid for s in self._sessions.values() if s.last_accessed < oldest and s.num_in_flight == 0]
        for session_id in stale:
            self.close(session_id)
