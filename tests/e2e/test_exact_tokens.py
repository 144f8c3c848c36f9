"""Sessions over the real policy server: the recorded ids, scored again by the model, give the recorded log-probs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from atroposlib.envs.server_handling.policy_versions import record_policy_versions
from atroposlib.envs.server_handling.server_manager import APIServerConfig, ServerManager

TURNS, ROLLOUTS, MAX_TOKENS = 4, 3, 12


@pytest.fixture
def engine() -> Any:
    import torch

    from atlaslib.engine import Engine, EngineConfig
    from atlaslib.models.tiny import tiny_llama

    torch.set_num_threads(1)
    return Engine(tiny_llama(max_len=1024), config=EngineConfig())


@pytest.fixture
def policy_url(engine: Any, tiny_tokenizer: Any) -> Iterator[str]:
    from atlaslib.engine import EngineThread
    from atlaslib.engine.server import serve_in_thread

    thread = EngineThread(engine)
    thread.start()
    server = serve_in_thread(thread, tiny_tokenizer, "policy")
    try:
        yield server.url
    finally:
        server.stop()
        thread.stop()


async def _play(managed: Any, rollout: int) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"rollout {rollout}"}]
    for turn in range(TURNS):
        reply = await managed.chat_completion(messages=messages, max_tokens=MAX_TOKENS, temperature=1.0)
        messages = [*messages, {"role": "assistant", "content": reply.choices[0].message.content}]
        messages.append({"role": "user", "content": f"turn {turn}"})


async def test_what_is_recorded_is_what_was_sampled(engine: Any, policy_url: str, tiny_tokenizer: Any) -> None:
    manager = ServerManager([APIServerConfig(base_url=f"{policy_url}/v1", server_type="vllm", model_name="policy")])
    with record_policy_versions() as seen:
        async with manager.managed_server(tokenizer=tiny_tokenizer) as managed:
            await asyncio.gather(*(_play(managed, rollout) for rollout in range(ROLLOUTS)))
            nodes = managed.get_state()["nodes"]
    await manager.aclose()
    assert len(nodes) == ROLLOUTS
    assert seen == {engine.version}
    scored = engine.score([node.tokens for node in nodes])
    for node, logprobs in zip(nodes, scored, strict=True):
        trained = [i for i, mask in enumerate(node.masked_tokens) if mask != -100]
        assert TURNS * 1 <= len(trained) <= TURNS * MAX_TOKENS
        assert [node.logprobs[i] for i in trained] == pytest.approx([logprobs[i] for i in trained], abs=2e-4)
        assert node.metadata["policy_versions"] == [engine.version]
        # An untrained model writes bytes that are no text: encoding its replies again would give other ids.
        sampled = [node.tokens[i] for i in trained]
        assert tiny_tokenizer.encode(tiny_tokenizer.decode(sampled)) != sampled
