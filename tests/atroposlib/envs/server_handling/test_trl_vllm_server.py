"""TRL's vLLM server: prompt text in, completion ids out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs.server_handling import trl_vllm_server
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.trl_vllm_server import TrlVllmServer
from atroposlib.errors import InferenceServerError
from atroposlib.testing.harness_server import HarnessServer


def _server(harness: HarnessServer, tokenizer_dir: Any) -> TrlVllmServer:
    return TrlVllmServer(APIServerConfig(base_url=harness.url, model_name=str(tokenizer_dir)))


async def test_chat_and_completion(harness: HarnessServer, tiny_tokenizer_dir: Any) -> None:
    harness.reply = ["hello", "yo"]
    server = _server(harness, tiny_tokenizer_dir)
    chat = await server.chat_completion(messages=[{"role": "user", "content": "hi"}], n=2, temperature=0.3)
    assert [choice.message.content for choice in chat.choices] == ["hello<|im_end|>", "yo<|im_end|>"]
    assert [choice.finish_reason for choice in chat.choices] == ["stop", "stop"]
    assert harness.bodies("/generate/")[0] == {
        "prompts": ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"],
        "n": 2,
        "repetition_penalty": 1.0,
        "temperature": 0.3,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 1024,
    }
    cut = await server.completion(prompt="p", max_tokens=2)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("he", "length")


async def test_what_it_cannot_do_and_what_fails(harness: HarnessServer, tiny_tokenizer_dir: Any) -> None:
    server = _server(harness, tiny_tokenizer_dir)
    with pytest.raises(NotImplementedError, match=r"Token-level logprobs are not supported.*VLLMServer"):
        await server.tokens_and_logprobs_completion(prompt="p")
    harness.fail_next(1, status=422, body="bad sampling")
    with pytest.raises(InferenceServerError, match="422: bad sampling"):
        await server.completion(prompt="p")
    assert harness.num_health_checks == 0
    assert server.check_task is None


async def test_module_names_can_be_replaced(monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any) -> None:
    class Response:
        async def json(self) -> Any:
            return {"completion_ids": [[*tiny_tokenizer.encode("ok"), tiny_tokenizer.eos_token_id]]}

        async def __aenter__(self) -> Response:
            return self

        async def __aexit__(self, *_: object) -> None: ...

    class Session(Response):
        def post(self, *_: Any, **__: Any) -> Response:
            return Response()

    stand_in = SimpleNamespace(ClientSession=Session, ClientTimeout=lambda **_: None)
    monkeypatch.setattr(trl_vllm_server, "aiohttp", stand_in)
    monkeypatch.setattr(trl_vllm_server, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda name: tiny_tokenizer))
    server = TrlVllmServer(APIServerConfig(base_url="http://x", model_name="any"))
    assert (await server.completion(prompt="p")).choices[0].text == "ok<|im_end|>"
