"""Inference servers that fail, drop connections and restart while rollouts run: every rollout ends, every token is exact."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from atroposlib.envs.server_handling.api_server import APIServer
from atroposlib.envs.server_handling.server_manager import APIServerConfig, ServerManager
from atroposlib.testing.harness_server import HarnessServer

NUM_ROLLOUTS, TURNS = 60, 3


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(APIServer, "FIRST_BACKOFF_S", 0.005)
    monkeypatch.setattr(APIServer, "MAX_BACKOFF_S", 0.02)
    monkeypatch.setattr(APIServer, "FIRST_RECOVERY_CHECK_S", 0.01)
    monkeypatch.setattr(APIServer, "MAX_RECOVERY_CHECK_S", 0.05)


async def _rollout(manager: ServerManager, tokenizer: Any, number: int) -> Any:
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        messages = [{"role": "user", "content": f"rollout {number}"}]
        for turn in range(TURNS):
            reply = await managed.chat_completion(messages=messages, max_tokens=64)
            content = reply.choices[0].message.content
            messages = [
                *messages,
                {"role": "assistant", "content": content},
                {"role": "user", "content": f"turn {turn}"},
            ]
        (node,) = managed.get_state()["nodes"]
        return node, messages[:-1]


async def _trouble(servers: list[HarnessServer], rng: random.Random, stop: asyncio.Event) -> int:
    restarts = 0
    while not stop.is_set():
        victim = rng.choice(servers)
        await asyncio.sleep(0.05)
        if restarts < 6:
            victim.fail_next(1, status=rng.choice([500, 503, 429, 0]))
            await asyncio.to_thread(victim.stop)
            await asyncio.sleep(rng.uniform(0.0, 0.1))
            await asyncio.to_thread(victim.start)
            restarts += 1
    return restarts


async def test_rollouts_survive_failing_and_restarting_servers(tiny_tokenizer: Any) -> None:
    rng = random.Random(0)
    with (
        HarnessServer(tokenizer=tiny_tokenizer, latency_s=0.01) as first,
        HarnessServer(tokenizer=tiny_tokenizer, latency_s=0.01) as second,
    ):
        servers = [first, second]
        configs = [
            APIServerConfig(base_url=server.base_url, server_type="vllm", num_max_requests_at_once=8)
            for server in servers
        ]
        manager = ServerManager(configs)
        stop = asyncio.Event()
        trouble = asyncio.create_task(_trouble(servers, rng, stop))
        async with asyncio.timeout(60):
            done = await asyncio.gather(*(_rollout(manager, tiny_tokenizer, i) for i in range(NUM_ROLLOUTS)))
        stop.set()
        assert await trouble >= 1
        for node, messages in done:
            rendered = tiny_tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")
            assert node.tokens == tiny_tokenizer.encode(rendered)
            assert sum(1 for mask in node.masked_tokens if mask == tiny_tokenizer.eos_token_id) == TURNS
        assert [server.sem._value for server in manager.servers] == [8, 8]
        assert [server.num_open_sessions for server in manager.servers] == [0, 0]
        assert max(first.max_in_flight, second.max_in_flight) <= 8
        await manager.aclose()
