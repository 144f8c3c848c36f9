"""What the rollout store tells others about: the live page, the run log, anything that wants to watch.

Observers are called synchronously in the order things happen and must return at once (put it in a queue, come back). An
observer that raises is logged and left out of that event; it never harms the store. Nothing is told again while the
journal is read back at start.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(kw_only=True, slots=True)
class GroupEvent:
    """A group that was accepted."""

    key: int
    """Ascending with age, unique in a data folder."""
    group_id: str
    """The client's id, or one made by the server."""
    env_id: int | None
    env_name: str | None
    size: int
    """Sequences in the group."""
    num_tokens: int
    scores: list[float]
    policy_versions: list[list[int]] | None
    reward_components: dict[str, list[float]] | None
    payload: bytes
    binary: bool
    time: float = field(default_factory=time.time)

    def decode(self) -> dict[str, Any]:
        """The whole group as a dict (per-token fields are lists or numpy arrays). Costs time: not on the event loop."""
        if not self.binary:
            group: dict[str, Any] = json.loads(bytes(self.payload))
            return group
        from atroposlib.api.binary import decode_group

        return decode_group(self.payload)


class StoreObserver:
    """What an observer is told; override what you care about."""

    def group_accepted(self, event: GroupEvent) -> None:
        """A group was validated, journalled and stored."""

    def group_rejected(self, env_id: int | None, reason: str) -> None:
        """A group was refused with this reason."""

    def batch_formed(self, seq: int, group_ids: list[str]) -> None:
        """These groups became batch `seq`."""

    def batch_delivered(self, seq: int) -> None:
        """The reply with batch `seq` was sent in full."""

    def batch_acked(self, seq: int) -> None:
        """The trainer has used batch `seq`."""

    def committed(self, seq: int, step: int) -> None:
        """The trainer's checkpoint of `step` contains every batch up to `seq`."""

    def reported(self, source: str, step: int, time: float, metrics: dict[str, float]) -> None:
        """A process reported numbers."""


@runtime_checkable
class LaggingObserver(Protocol):
    """An observer that writes later than it is told; it is asked to finish before batches are forgotten."""

    def flush(self) -> None:
        """Wait until everything told so far is kept."""
