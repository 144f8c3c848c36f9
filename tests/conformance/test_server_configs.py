"""Every documented parameter of ServerManagerConfig, ServerBaseline and APIServerConfig, seen by its effect."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from atroposlib.envs.server_handling import openai_server, server_building, server_manager
from atroposlib.envs.server_handling.api_server import APIServer
from atroposlib.envs.server_handling.openai_server import APIServerConfig, OpenaiConfig, OpenAIServer
from atroposlib.envs.server_handling.server_config import ReasoningConfig
from atroposlib.envs.server_handling.server_manager import ServerBaseline, ServerManager, ServerManagerConfig
from atroposlib.errors import InferenceTimeoutError
from atroposlib.testing.harness_server import HarnessServer

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def harness() -> Iterator[HarnessServer]:
    with HarnessServer() as server:
        yield server


def _manager(harness: HarnessServer, **settings: Any) -> ServerManager:
    return ServerManager([APIServerConfig(base_url=harness.base_url, **settings)])


def test_documented_defaults() -> None:
    assert ServerManagerConfig().model_dump() == {
        "slurm": True,
        "testing": False,
        "max_n_completions": 8,
        "proxy_url": None,
    }
    baseline = {
        "timeout": 1200,
        "num_max_requests_at_once": 512,
        "num_requests_for_eval": 64,
        "model_name": "default",
        "rolling_buffer_length": 1000,
        "server_type": "openai",
        "tokenizer_name": "none",
        "server_wait_s": 600.0,
    }
    assert ServerBaseline().model_dump() == baseline
    own = {"api_key": None, "base_url": None, "n_kwarg_is_ignored": False, "health_check": True}
    assert APIServerConfig().model_dump() == {**baseline, **own}


def test_both_names_are_one_class_and_stay_mutable() -> None:
    assert OpenaiConfig is APIServerConfig is openai_server.OpenaiConfig
    assert isinstance(APIServerConfig(), ServerBaseline)
    config = APIServerConfig(weight=2.0, unknown_key="ignored")  # type: ignore[call-arg]
    config.n_kwarg_is_ignored = True
    assert config.n_kwarg_is_ignored
    assert not hasattr(config, "weight")


@pytest.mark.parametrize("name", ["timeout", "num_max_requests_at_once", "rolling_buffer_length"])
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ServerBaseline(**{name: 0})


def test_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server_building, "_said_outside_slurm", False)
    baseline = ServerBaseline(server_type="vllm")
    for name in ("SLURM_JOB_NODELIST", "NUM_TRAINING_NODES", "INFER_TP"):
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.DEBUG):
        outside = [ServerManager(baseline, slurm=slurm) for slurm in (True, False, True)]
    assert len({tuple(server.config.base_url for server in manager.servers) for manager in outside}) == 1
    assert caplog.text.count("not a Slurm job") == 1
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-3]")
    monkeypatch.setenv("NUM_TRAINING_NODES", "2")
    monkeypatch.setenv("INFER_TP", "8")
    inside = ServerManager(baseline, slurm=True)
    assert [server.config.base_url for server in inside.servers] == ["http://gpu3:9000/v1"]
    assert len(ServerManager(baseline, slurm=False).servers) == 4


async def test_testing() -> None:
    unreachable = APIServerConfig(base_url="http://127.0.0.1:1/v1")
    texts = []
    for _ in range(2):
        manager = ServerManager([unreachable], testing=True)
        reply = await manager.chat_completion(messages=MESSAGES, n=2)
        texts.append([choice.message.content for choice in reply.choices])
    assert texts[0] == texts[1]


async def test_max_n_completions(harness: HarnessServer) -> None:
    manager = ServerManager([APIServerConfig(base_url=harness.base_url)], max_n_completions=3)
    reply = await manager.chat_completion(messages=MESSAGES, n=7)
    assert [choice.index for choice in reply.choices] == list(range(7))
    assert sorted(body["n"] for body in harness.bodies("/v1/chat/completions")) == [1, 3, 3]
    await manager.aclose()


async def test_timeout(harness: HarnessServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(APIServer, "MAX_ATTEMPTS", 1)
    harness.latency_s = 4.0
    manager = _manager(harness, timeout=1)
    started = time.monotonic()
    with pytest.raises(InferenceTimeoutError, match=harness.base_url):
        await manager.chat_completion(messages=MESSAGES)
    assert 0.9 < time.monotonic() - started < 3.9
    await manager.aclose()


@pytest.mark.parametrize(
    ("split", "eval_limit", "limit"), [("train", 3, 5), ("eval", 3, 3), ("eval", 0, 1), ("train", 0, 5)]
)
async def test_requests_in_flight(harness: HarnessServer, split: str, eval_limit: int, limit: int) -> None:
    harness.latency_s = 0.06
    manager = _manager(harness, num_max_requests_at_once=5, num_requests_for_eval=eval_limit)
    await asyncio.gather(*(manager.chat_completion(messages=MESSAGES, n=4, split=split) for _ in range(15)))
    assert harness.max_in_flight == limit
    await manager.aclose()


async def test_model_name(harness: HarnessServer) -> None:
    manager = _manager(harness, model_name="my/model")
    await manager.chat_completion(messages=MESSAGES)
    await manager.completion(prompt="p")
    assert [request.body["model"] for request in harness.requests] == ["my/model", "my/model"]
    await manager.aclose()


async def test_rolling_buffer_length(harness: HarnessServer) -> None:
    manager = _manager(harness, rolling_buffer_length=4)
    for split in ("train", "eval"):
        for _ in range(6):
            await manager.chat_completion(messages=MESSAGES, split=split)
    server = manager.servers[0]
    kept = (server.request_timings, server.attempts_list, server.eval_request_timings, server.eval_attempts_list)
    assert [len(values) for values in kept] == [4, 4, 4, 4]
    await manager.aclose()


async def test_api_key(
    harness: HarnessServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-from-environment")
    with caplog.at_level(logging.DEBUG):
        for settings in ({}, {"api_key": "sk-given"}):
            manager = _manager(harness, **settings)
            await manager.chat_completion(messages=MESSAGES)
            await manager.aclose()
    assert [request.headers.get("Authorization") for request in harness.requests] == [None, "Bearer sk-given"]
    official = OpenAIServer(APIServerConfig())
    assert official.request_headers() == {"Authorization": "Bearer sk-from-environment"}
    shown = caplog.text + repr(APIServerConfig(api_key="sk-given")) + str(APIServerConfig(api_key="sk-given"))
    assert "sk-" not in shown


async def test_base_url(harness: HarnessServer) -> None:
    with HarnessServer() as other:
        manager = _manager(other)
        await manager.chat_completion(messages=MESSAGES)
        assert (len(harness.requests), len(other.requests)) == (0, 1)
        await manager.aclose()
    assert OpenAIServer(APIServerConfig()).effective_base_url() == "https://api.openai.com/v1"


@pytest.mark.parametrize("ignored", [True, False])
async def test_n_kwarg_is_ignored(harness: HarnessServer, ignored: bool) -> None:
    manager = _manager(harness, n_kwarg_is_ignored=ignored)
    assert len((await manager.chat_completion(messages=MESSAGES, n=4)).choices) == 4
    assert len(harness.requests) == (4 if ignored else 1)
    await manager.aclose()


async def test_server_type_and_health_check(harness: HarnessServer) -> None:
    for kind, expected in {"openai": "OpenAIServer", "vllm": "VLLMServer", "sglang": "SGLangServer"}.items():
        assert type(_manager(harness, server_type=kind).servers[0]).__name__ == expected
    assert _manager(harness, health_check=False).servers[0].is_watched() is False
    assert _manager(harness).servers[0].is_watched() is True


def test_tokenizer_name(tiny_tokenizer_dir: Any) -> None:
    config = APIServerConfig(base_url="http://x/v1", server_type="vllm", tokenizer_name=str(tiny_tokenizer_dir))
    assert ServerManager(config).servers[0].tokenizer.eos_token == "<|im_end|>"


def test_reasoning_config() -> None:
    assert ReasoningConfig().build_extra_body("http://x") is None
    assert ReasoningConfig(max_tokens=100).enabled
    with pytest.raises(ValueError, match="Invalid reasoning_effort"):
        ReasoningConfig(effort="extreme")
    high = ReasoningConfig(effort="high", max_tokens=5)
    assert high.is_reasoning_kwargs_active()
    assert high.build_extra_body("https://api.openai.com/v1") == {"reasoning_effort": "high"}
    assert ReasoningConfig(enabled=True).build_extra_body("https://api.openai.com/v1") == {"reasoning_effort": "medium"}
    assert high.build_extra_body("http://x") == {"reasoning": {"enabled": True, "effort": "high"}}
    assert high.build_extra_body("http://x", use_max_tokens=True) == {
        "reasoning": {"enabled": True, "max_tokens": 25600}
    }
    assert ReasoningConfig(max_tokens=5).build_extra_body() == {"reasoning": {"enabled": True, "max_tokens": 5}}

    class EnvConfig:
        thinking_mode = True
        reasoning_effort = "low"

    assert ReasoningConfig.from_env_config(EnvConfig()) == ReasoningConfig(enabled=True, effort="low")
    assert ReasoningConfig.EFFORT_TO_MAX_TOKENS == {
        "none": 1024,
        "minimal": 3200,
        "low": 6400,
        "medium": 16000,
        "high": 25600,
        "xhigh": 30400,
    }


async def test_reasoning_reaches_the_request(harness: HarnessServer) -> None:
    config = APIServerConfig(base_url=harness.base_url)
    manager = ServerManager([config], reasoning_config=ReasoningConfig(effort="low"))
    await manager.chat_completion(messages=MESSAGES)
    await manager.chat_completion(messages=MESSAGES, skip_reasoning=True)
    first, second = harness.bodies("/v1/chat/completions")
    assert first["reasoning"] == {"enabled": True, "effort": "low"}
    assert "reasoning" not in second
    assert "skip_reasoning" not in second
    await manager.aclose()


def test_the_manager_module_offers_the_documented_names() -> None:
    assert server_manager.APIServerConfig is APIServerConfig
