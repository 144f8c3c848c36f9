"""The request path every backend shares: limits per split, retries, health, records."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from typing import Any

import pytest

from atroposlib.envs.server_handling.api_server import APIServer, is_retryable
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_config import APIServerConfig, ReasoningConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import InferenceServerError, InferenceTimeoutError, InferenceUnavailableError
from atroposlib.testing.harness_server import HarnessServer

MESSAGES = [{"role": "user", "content": "hi"}]


class StubServer(APIServer):
    """Replies from a list; an exception in it is raised."""

    def __init__(self, replies: list[Any], **settings: Any) -> None:
        super().__init__(APIServerConfig(**settings), reasoning_config=settings.pop("reasoning_config", None))
        self.replies = replies
        self.calls: list[dict[str, Any]] = []

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        self.server_healthy = True

    async def _next(self, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        reply = self.replies.pop(0) if self.replies else "reply"
        if isinstance(reply, Exception):
            raise reply
        return reply

    _chat_completion_wrapper = _completion_wrapper = _tokens_and_logprobs_completion_wrapper = _next


def _config(harness: HarnessServer, **settings: Any) -> APIServerConfig:
    return APIServerConfig(base_url=harness.base_url, model_name="m", **settings)


def test_the_base_class_is_abstract() -> None:
    assert inspect.isabstract(APIServer)
    assert not inspect.isabstract(OpenAIServer)


async def test_model_is_forced_and_split_is_not_sent_on() -> None:
    server = StubServer([], model_name="mine")
    assert await server.chat_completion(messages=MESSAGES, model="other", split="eval") == "reply"
    assert server.calls == [{"messages": MESSAGES, "model": "mine"}]


async def test_each_split_has_its_own_records() -> None:
    server = StubServer([])
    await server.chat_completion(messages=MESSAGES)
    await server.completion(prompt="p", split="eval")
    await server.tokens_and_logprobs_completion(prompt="p", split="eval")
    assert server.attempts_list == [1]
    assert len(server.request_timings) == 1
    assert server.eval_attempts_list == [1, 1]
    assert len(server.eval_request_timings) == 2


async def test_train_and_eval_limits_are_separate(harness: HarnessServer) -> None:
    harness.latency_s = 0.06
    server = VLLMServer(_config(harness, num_max_requests_at_once=3, num_requests_for_eval=2))
    await asyncio.gather(*(server.chat_completion(messages=MESSAGES) for _ in range(9)))
    assert harness.max_in_flight == 3
    harness.max_in_flight = 0
    await asyncio.gather(*(server.chat_completion(messages=MESSAGES, split="eval") for _ in range(6)))
    assert harness.max_in_flight == 2
    harness.max_in_flight = 0
    calls = [server.chat_completion(messages=MESSAGES, split=split) for split in ["train", "eval"] * 6]
    await asyncio.gather(*calls)
    assert harness.max_in_flight == 5
    await server.aclose()


async def test_timings_keep_the_newest_entries_only() -> None:
    server = StubServer([], rolling_buffer_length=3)
    for _ in range(7):
        await server.chat_completion(messages=MESSAGES)
    assert server.attempts_list == [1, 1, 1]
    assert len(server.request_timings) == 3


@pytest.mark.usefixtures("quick_retries")
async def test_a_5xx_is_retried_and_counted(harness: HarnessServer) -> None:
    harness.fail_next(2, status=503)
    server = OpenAIServer(_config(harness))
    reply = await server.chat_completion(messages=MESSAGES)
    assert reply.choices[0].message.content
    assert server.attempts_list == [3]
    assert len(harness.requests) == 3


@pytest.mark.usefixtures("quick_retries")
async def test_the_last_5xx_is_the_error_with_its_cause(harness: HarnessServer) -> None:
    harness.fail_next(3, status=500, body="CUDA out of memory")
    server = OpenAIServer(_config(harness))
    with pytest.raises(
        InferenceServerError, match=rf"{harness.base_url}/chat/completions.*500.*CUDA out of memory"
    ) as caught:
        await server.chat_completion(messages=MESSAGES)
    assert (caught.value.status, caught.value.body) == (500, "CUDA out of memory")
    assert len(harness.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_4xx_is_not_retried(harness: HarnessServer, status: int) -> None:
    harness.fail_next(1, status=status, body="context too long")
    server = OpenAIServer(_config(harness))
    with pytest.raises(InferenceServerError, match="context too long"):
        await server.completion(prompt="p")
    assert len(harness.requests) == 1
    assert server.server_healthy


@pytest.mark.usefixtures("quick_retries")
async def test_a_busy_server_is_asked_again_for_as_long_as_one_that_is_down(harness: HarnessServer) -> None:
    harness.fail_next(7, status=429)
    server = OpenAIServer(_config(harness, health_check=False))
    await server.chat_completion(messages=MESSAGES)
    assert len(harness.requests) == 8
    harness.fail_next(1000, status=429, body="slow down")
    server.config.server_wait_s = 0.1
    with pytest.raises(InferenceServerError, match="429: slow down"):
        await server.chat_completion(messages=MESSAGES)


async def test_the_wait_a_server_asks_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = InferenceServerError("busy", url="u", status=429, retryable=True)
    busy.retry_after_s = 7.0
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    server = StubServer([busy, busy])
    assert await server.chat_completion(messages=MESSAGES) == "reply"
    assert waits == [7.0, 7.0]


async def test_requests_are_shown_on_demand_without_keys(
    harness: HarnessServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ATROPOS_DEBUG_REQUESTS", "1")
    server = OpenAIServer(_config(harness, api_key="sk-secret", health_check=False))
    with caplog.at_level(logging.INFO):
        await server.completion(prompt="show me")
    assert "show me" in caplog.text
    assert "sk-secret" not in caplog.text


async def test_other_errors_are_passed_on_at_once() -> None:
    server = StubServer([KeyError("mistake in a wrapper")])
    with pytest.raises(KeyError):
        await server.chat_completion(messages=MESSAGES)
    assert len(server.calls) == 1


def test_which_errors_may_be_retried() -> None:
    class StatusError(Exception):
        status_code = 502

    assert is_retryable(ConnectionResetError())
    assert is_retryable(TimeoutError())
    assert is_retryable(StatusError())
    assert not is_retryable(ValueError())
    assert not is_retryable(InferenceServerError("no", url="u", status=400))


@pytest.mark.usefixtures("quick_retries")
async def test_a_slow_server_times_out_and_is_named(harness: HarnessServer) -> None:
    harness.latency_s = 5.0
    server = OpenAIServer(_config(harness, timeout=1))
    server.MAX_ATTEMPTS = 1
    with pytest.raises(InferenceTimeoutError, match=rf"{harness.base_url}.*did not answer within 1 s"):
        await server.chat_completion(messages=MESSAGES)


@pytest.mark.usefixtures("quick_retries")
async def test_a_restarted_server_is_waited_for(harness: HarnessServer, caplog: pytest.LogCaptureFixture) -> None:
    server = VLLMServer(_config(harness))
    await server.chat_completion(messages=MESSAGES)
    harness.stop()
    with caplog.at_level(logging.INFO):
        call = asyncio.create_task(server.chat_completion(messages=MESSAGES))
        await asyncio.sleep(0.2)
        assert not call.done()
        assert not server.server_healthy
        harness.start()
        reply = await asyncio.wait_for(call, 10)
    assert reply.choices[0].message.content
    assert server.server_healthy
    assert "is down" in caplog.text
    assert "is up again" in caplog.text
    await server.aclose()


@pytest.mark.usefixtures("quick_retries")
async def test_a_server_that_stays_down_is_an_error(free_port: int) -> None:
    config = APIServerConfig(base_url=f"http://127.0.0.1:{free_port}/v1", model_name="m", server_wait_s=0.2)
    server = OpenAIServer(config)
    started = time.monotonic()
    with pytest.raises(InferenceUnavailableError, match=rf"127.0.0.1:{free_port}.*down for 0.2 s.*cannot be reached"):
        await server.chat_completion(messages=MESSAGES)
    assert time.monotonic() - started < 10
    await server.aclose()


@pytest.mark.usefixtures("quick_retries")
async def test_health_checks_never_generate(harness: HarnessServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(APIServer, "HEALTHY_CHECK_INTERVAL_S", 0.02)
    for kind in (OpenAIServer, VLLMServer):
        harness.requests.clear()
        harness.num_health_checks = 0
        server = kind(_config(harness))
        await server.chat_completion(messages=MESSAGES)
        await asyncio.sleep(0.2)
        assert harness.num_health_checks >= 2
        assert len(harness.requests) == 1
        await server.aclose()


async def test_an_idle_server_that_dies_is_noticed(harness: HarnessServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(APIServer, "HEALTHY_CHECK_INTERVAL_S", 0.02)
    server = VLLMServer(_config(harness))
    await server.chat_completion(messages=MESSAGES)
    harness.stop()
    async with asyncio.timeout(10):
        while server.server_healthy:
            await asyncio.sleep(0.01)
    await server.aclose()


async def test_without_a_health_check_nothing_is_watched(harness: HarnessServer) -> None:
    server = VLLMServer(_config(harness, health_check=False))
    await server.chat_completion(messages=MESSAGES)
    assert server.check_task is None
    assert harness.num_health_checks == 0


async def test_metrics_name_the_server() -> None:
    server = StubServer([])
    await server.chat_completion(messages=MESSAGES)
    await server.chat_completion(messages=MESSAGES, split="eval")
    metrics = await server.wandb_metrics({"kept": 1}, "server_0")
    names = {f"server/server_0_{split}request_time_{what}" for split in ("", "eval_") for what in ("avg", "std", "99p")}
    assert set(metrics) == names | {"kept", "server/server_0_average_num_attempts", "server/server_0_eval_retry_rate"}
    assert metrics["server/server_0_average_num_attempts"] == 1.0


async def test_weight_reaches_both_limits() -> None:
    server = StubServer([], num_max_requests_at_once=10, num_requests_for_eval=4)
    await server.update_weight(0.5)
    assert (server.sem.free_slots(), server.eval_sem.free_slots()) == (5, 2)


def _inject(
    base_url: str | None, reasoning: ReasoningConfig | None, kind: type[APIServer] = StubServer, **kwargs: Any
) -> Any:
    server = kind([]) if kind is StubServer else kind(APIServerConfig(base_url=base_url))  # type: ignore[arg-type,call-arg]
    server.config.base_url = base_url
    server.reasoning_config = reasoning
    return server._inject_reasoning_kwargs(dict(kwargs))


def test_reasoning_settings_per_provider() -> None:
    high = ReasoningConfig(effort="high")
    assert _inject("http://x/v1", None, max_tokens=5) == {"max_tokens": 5}
    assert _inject("http://x/v1", high, skip_reasoning=True) == {}
    assert _inject("http://x/v1", high, extra_body={"a": 1, "reasoning": "old"}) == {
        "extra_body": {"a": 1, "reasoning": {"enabled": True, "effort": "high"}}
    }
    assert _inject("https://api.openai.com/v1", high, max_tokens=7, temperature=0.2) == {
        "extra_body": {"reasoning_effort": "high"},
        "temperature": 1.0,
        "max_completion_tokens": 7,
    }
    assert _inject(None, high, OpenAIServer) == {"extra_body": {"reasoning_effort": "high"}, "temperature": 1.0}


async def test_get_logprobs_is_refused_where_it_cannot_work() -> None:
    with pytest.raises(NotImplementedError, match="StubServer does not implement get_logprobs"):
        await StubServer([]).get_logprobs(prompt="p")


def test_errors_survive_pickling() -> None:
    import pickle

    error = InferenceTimeoutError("slow", url="u", status=504, body="b", retryable=True)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.url, copy.status, copy.body, copy.retryable) == (
        InferenceTimeoutError,
        "slow",
        "u",
        504,
        "b",
        True,
    )


def test_health_can_be_set_before_the_constructor_ran() -> None:
    server = StubServer.__new__(StubServer)
    server.server_healthy = False
    assert server.server_healthy is False
