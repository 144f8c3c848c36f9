"""The loopback inference endpoint itself."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from atroposlib.testing.harness_server import HarnessServer

USER = {"role": "user", "content": "hi"}


def test_replies_are_deterministic_and_recorded(tiny_tokenizer: Any) -> None:
    with HarnessServer(tokenizer=tiny_tokenizer, policy_versions=[2]) as server:
        with openai.OpenAI(base_url=server.base_url, api_key="x", max_retries=0) as client:
            replies = [client.chat.completions.create(model="m", messages=[USER], n=2) for _ in range(2)]  # type: ignore[list-item]
            stream = client.chat.completions.create(model="m", messages=[USER], stream=True)  # type: ignore[list-item]
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            text = client.completions.create(model="m", prompt="p").choices[0].text
        first, second = ([choice.message.content for choice in reply.choices] for reply in replies)
        assert first == second
        assert first[0] != first[1]
        assert streamed == first[0]
        assert text
        ids = {"prompt_token_ids": [40, 41]}
        generated = httpx.post(f"{server.url}/generate", json={"prompt": ids, "n": 2, "max_tokens": 4}).json()
        assert [len(tokens) for tokens in generated["token_ids"]] == [4, 4]
        assert generated["policy_versions"] == [[2], [2]]
        assert generated["finish_reasons"] == ["length", "length"]
        assert httpx.get(f"{server.base_url}/models").status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert (server.num_health_checks, len(server.bodies("/v1/chat/completions"))) == (2, 3)


def test_failures_keys_and_restarts() -> None:
    server = HarnessServer(api_key="k", reply=lambda prompt, choice: f"{prompt}/{choice}").start()
    try:
        post = {"messages": [USER]}
        server.fail_next(1, status=418, body="teapot")
        assert httpx.post(f"{server.base_url}/chat/completions", json=post).text == "teapot"
        assert httpx.post(f"{server.base_url}/chat/completions", json=post).status_code == 401
        server.fail_next(1, status=0)
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(f"{server.base_url}/chat/completions", json=post)
        port = server.port
        server.stop()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/health")
        server.start()
        assert server.port == port
        reply = httpx.post(
            f"{server.base_url}/chat/completions", json=post, headers={"Authorization": "Bearer k"}
        ).json()
        assert reply["choices"][0]["message"]["content"] == "user:hi/0"
    finally:
        server.stop()
