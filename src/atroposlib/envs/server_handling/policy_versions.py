"""Which policy versions made the tokens of a rollout: replies note them, the environment loop collects them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_recorder: ContextVar[set[int] | None] = ContextVar("atropos_policy_versions", default=None)
_sequence_recorder: ContextVar[list[list[int]] | None] = ContextVar("atropos_sequence_policy_versions", default=None)


@contextmanager
def record_policy_versions() -> Iterator[set[int]]:
    """Collect every version noted inside the block, also by tasks started in it.

    Example: ``with record_policy_versions() as seen: await env.collect_trajectories(item)``
    """
    seen: set[int] = set()
    token = _recorder.set(seen)
    try:
        yield seen
    finally:
        _recorder.reset(token)
        note_policy_versions(seen)  # an outer recorder sees what an inner one saw


def note_policy_versions(versions: Iterable[int]) -> None:
    """Add versions to the recorder that is open in this context, if any."""
    seen = _recorder.get()
    if seen is not None:
        seen.update(versions)


@contextmanager
def record_sequence_versions() -> Iterator[list[list[int]]]:
    """Collect one list of versions per sampled sequence, in the order of the reply; empty when the server sends none."""
    per_sequence: list[list[int]] = []
    token = _sequence_recorder.set(per_sequence)
    try:
        yield per_sequence
    finally:
        _sequence_recorder.reset(token)


def note_reply_versions(reply: Any, num_sequences: int) -> None:
    """Note the versions a reply carries, for the rollout and for the sequences of the present call."""
    per_sequence = versions_per_sequence(reply, num_sequences)
    if per_sequence is None:
        return
    for versions in per_sequence:
        note_policy_versions(versions)
    recorder = _sequence_recorder.get()
    if recorder is not None:
        recorder.extend(per_sequence)


def versions_per_sequence(reply: Any, num_sequences: int) -> list[list[int]] | None:
    """The ``policy_versions`` of a reply as one ascending list per sequence; None when the server sends none.

    Accepts one flat list for the whole reply (OpenAI routes) or one list per sequence (token routes).
    """
    raw = reply.get("policy_versions") if isinstance(reply, dict) else getattr(reply, "policy_versions", None)
    if not isinstance(raw, list) or not raw:
        return None
    if all(isinstance(entry, list) for entry in raw):
        per_sequence = [sorted({int(version) for version in entry}) for entry in raw]
        return per_sequence if len(per_sequence) == num_sequences else None
    flat = sorted({int(version) for version in raw})
    return [list(flat) for _ in range(num_sequences)]
