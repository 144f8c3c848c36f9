"""Which policy versions a rollout saw."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from atroposlib.envs.server_handling.policy_versions import (
    note_policy_versions,
    note_reply_versions,
    record_policy_versions,
    record_sequence_versions,
    versions_per_sequence,
)


async def test_versions_are_seen_by_the_block_and_its_tasks_only() -> None:
    async def call(version: int) -> None:
        await asyncio.sleep(0)
        note_policy_versions([version])

    note_policy_versions([99])
    with record_policy_versions() as outer:
        with record_policy_versions() as inner:
            await asyncio.gather(call(1), call(2))
        assert inner == {1, 2}
        note_policy_versions([3])
    assert outer == {1, 2, 3}


def test_forms_of_replies() -> None:
    assert versions_per_sequence({"policy_versions": [2, 1, 2]}, 2) == [[1, 2], [1, 2]]
    assert versions_per_sequence({"policy_versions": [[2, 1], [3]]}, 2) == [[1, 2], [3]]
    assert versions_per_sequence({"policy_versions": [[1]]}, 2) is None
    assert versions_per_sequence({}, 1) is None
    assert versions_per_sequence(SimpleNamespace(policy_versions=[4]), 1) == [[4]]


def test_sequences_of_one_call() -> None:
    with record_policy_versions() as seen, record_sequence_versions() as sequences:
        note_reply_versions({"policy_versions": [[5], [5, 6]]}, 2)
        note_reply_versions({}, 2)
    assert (seen, sequences) == ({5, 6}, [[5], [5, 6]])
