"""``[]`` in an optional field means "none": environments that make one rollout at a time send it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atroposlib.api.client import EnvClient, TrainerClient, encode_groups
from atroposlib.envs.groups import group_from_items
from atroposlib.testing.api import serve_api

ITEMS: list[Any] = [
    {"tokens": [1, 2], "masks": [-100, 2], "scores": 1.0},
    {"tokens": [1, 3], "masks": [-100, 3], "scores": 0.0},
]


@pytest.mark.parametrize("prefer_binary", [True, False])
def test_a_group_of_single_rollouts_can_be_encoded(prefer_binary: bool) -> None:
    group: Any = group_from_items(ITEMS)
    assert group["ref_logprobs"] == []
    body, content_type = encode_groups([dict(group)], many=False, prefer_binary=prefer_binary)
    assert body
    assert ("json" in content_type) != prefer_binary


async def test_and_is_accepted_and_delivered() -> None:
    import asyncio
    import urllib.request

    with serve_api() as api:
        trainer = TrainerClient(api.url)
        await asyncio.to_thread(
            trainer.register,
            batch_size=2,
            max_token_len=64,
            num_steps=5,
            checkpoint_dir="",
            save_checkpoint_interval=-1,
        )
        await asyncio.to_thread(trainer.next_batch, timeout_s=0.2)
        client = EnvClient(api.url)
        await client.register(name="e", max_token_length=64, weight=1.0, group_size=2)
        await client.submit(dict(group_from_items(ITEMS)))
        plain = urllib.request.Request(
            f"{api.url}/scored_data",
            data=json.dumps(group_from_items(ITEMS)).encode(),
            headers={"Content-Type": "application/json"},
        )
        with await asyncio.to_thread(urllib.request.urlopen, plain) as reply:
            assert reply.status == 200
        for _ in range(2):
            batch = await asyncio.to_thread(trainer.next_batch, timeout_s=10.0)
            assert batch is not None
            assert [list(map(int, row)) for row in batch.groups[0]["tokens"]] == [[1, 2], [1, 3]]
            await asyncio.to_thread(trainer.ack, batch.seq)
        await client.aclose()
        await asyncio.to_thread(trainer.close)
