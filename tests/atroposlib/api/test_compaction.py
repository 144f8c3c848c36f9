"""Blanks leave queued JSON groups once it is quiet, and nothing else changes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from atroposlib.api import native_scan
from atroposlib.api.compaction import QUIET_S, without_blanks
from atroposlib.api.schemas import Registration
from atroposlib.api.service import RolloutService
from atroposlib.api.store import RolloutStore
from atroposlib.api.wire import parse_json_groups

GROUP: dict[str, Any] = {
    "tokens": [[1, 2, 3], [4, 5, 6]],
    "masks": [[-100, 2, 3], [4, 5, 6]],
    "scores": [0.5, 1.0],
    "inference_logprobs": [[1.0, -0.5, -2.5e-05], [1.0, -0.25, -1.0]],
    "messages": [[{"role": "user", "content": "a, b,  c"}]] * 2,
    "group_overrides": {"note": "x, y"},
}


def test_only_the_named_parts_lose_their_blanks() -> None:
    text = b'{"a": [1, 2], "b": "x, y", "c": [3, 4]}'
    assert without_blanks(text, [(6, 12), (32, 38)]) == b'{"a": [1,2], "b": "x, y", "c": [3,4]}'
    assert without_blanks(text, []) == text


def test_a_queued_group_becomes_smaller_and_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_scan, "_library", None)  # the compiled reader strips blanks as it reads

    async def work() -> None:
        service = RolloutService(RolloutStore())
        settings = {
            "batch_size": 2,
            "max_token_len": 8,
            "num_steps": 1,
            "save_checkpoint_interval": 1,
            "starting_step": 0,
        }
        await service.register(Registration(wandb_group="g", wandb_project="p", checkpoint_dir="c", **settings))
        [parsed] = parse_json_groups(json.dumps(GROUP).encode(), many=False)
        await service.submit([parsed])
        [stored] = service.store.groups.values()
        before = bytes(stored.payload or b"")
        await asyncio.sleep(QUIET_S * 2)
        after = bytes(stored.payload or b"")
        assert len(after) < len(before)
        assert json.loads(after) == json.loads(before)
        assert b"a, b,  c" in after
        delivery = await service.next_batch(plain=True)
        assert delivery is not None
        assert delivery.payloads == [after]

    asyncio.run(work())


def test_a_group_that_is_gone_meanwhile_is_left_alone() -> None:
    async def work() -> None:
        service = RolloutService(RolloutStore())
        [parsed] = parse_json_groups(json.dumps(GROUP).encode(), many=False)
        await service.submit([parsed])
        [stored] = service.store.groups.values()
        before = stored.payload
        await service.reset()
        await asyncio.sleep(QUIET_S * 2)
        assert stored.payload == before

    asyncio.run(work())
