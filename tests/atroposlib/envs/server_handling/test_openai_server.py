"""OpenAI routes: n, keys, extra fields; and how server settings of three sources are combined."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from openai.types.chat.chat_completion import ChatCompletion
from openai.types.completion import Completion

from atroposlib.envs.server_handling.openai_server import (
    APIServerConfig,
    OpenaiConfig,
    OpenAIServer,
    ServerBaseline,
    resolve_openai_configs,
)
from atroposlib.errors import ConfigError, FailedExecutionException
from atroposlib.testing.harness_server import HarnessServer

MESSAGES = [{"role": "user", "content": "hi"}]


def _server(harness: HarnessServer, **settings: Any) -> OpenAIServer:
    return OpenAIServer(APIServerConfig(base_url=harness.base_url, model_name="m", health_check=False, **settings))


async def test_replies_are_openai_objects(harness: HarnessServer) -> None:
    harness.policy_versions = [3, 4]
    chat = await _server(harness).chat_completion(messages=MESSAGES, n=2, temperature=0.5)
    assert isinstance(chat, ChatCompletion)
    assert [choice.index for choice in chat.choices] == [0, 1]
    assert chat.policy_versions == [3, 4]  # type: ignore[attr-defined]
    completion = await _server(harness).completion(prompt="p")
    assert isinstance(completion, Completion)
    assert harness.bodies("/v1/chat/completions") == [{"messages": MESSAGES, "n": 2, "temperature": 0.5, "model": "m"}]


async def test_n_is_asked_as_n_requests_where_it_is_ignored(harness: HarnessServer) -> None:
    harness.ignore_n = True
    reply = await _server(harness, n_kwarg_is_ignored=True).chat_completion(messages=MESSAGES, n=5)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3, 4]
    assert len(harness.requests) == 5
    assert all("n" not in body for body in harness.bodies("/v1/chat/completions"))


async def test_single_requests_for_n_respect_the_limit(harness: HarnessServer) -> None:
    harness.ignore_n, harness.latency_s = True, 0.04
    server = _server(harness, n_kwarg_is_ignored=True, num_max_requests_at_once=2)
    assert len((await server.chat_completion(messages=MESSAGES, n=6)).choices) == 6
    assert harness.max_in_flight == 2


async def test_a_server_that_ignores_n_is_found_out(harness: HarnessServer, caplog: pytest.LogCaptureFixture) -> None:
    harness.ignore_n = True
    server = _server(harness)
    reply = await server.completion(prompt="p", n=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert server.config.n_kwarg_is_ignored is True
    assert "ignores n" in caplog.text
    assert len(harness.requests) == 3


async def test_a_wrong_number_of_choices_is_an_error(harness: HarnessServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HarnessServer, "_texts", lambda self, prompt, n: ["a", "b"])
    with pytest.raises(ValueError, match="returned 2 choices where n=3"):
        await _server(harness).chat_completion(messages=MESSAGES, n=3)


async def test_prompts_are_required() -> None:
    server = OpenAIServer(APIServerConfig(base_url="http://127.0.0.1:1/v1"))
    with pytest.raises(ValueError, match="needs 'messages'"):
        await server.chat_completion(prompt="p")
    with pytest.raises(ValueError, match="needs 'prompt'"):
        await server.completion(messages=MESSAGES)
    with pytest.raises(ValueError, match="stream=True"):
        await server.chat_completion(messages=MESSAGES, stream=True)
    with pytest.raises(NotImplementedError, match="server_type"):
        await server._tokens_and_logprobs_completion_wrapper(prompt="p")


async def test_the_key_is_sent_as_bearer_only_when_set(harness: HarnessServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    await _server(harness).chat_completion(messages=MESSAGES)
    assert "Authorization" not in harness.requests[0].headers
    harness.api_key = "k"
    await _server(harness, api_key="k").chat_completion(messages=MESSAGES)
    assert harness.requests[1].headers["Authorization"] == "Bearer k"


def test_the_environment_key_is_for_the_official_api_only(monkeypatch: pytest.MonkeyPatch) -> None:
    official = OpenAIServer(APIServerConfig())
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert official.effective_base_url() == "https://api.openai.com/v1"
    assert official.request_headers() == {"Authorization": "Bearer sk-secret"}
    assert OpenAIServer(APIServerConfig(base_url="http://other/v1")).request_headers() == {}
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        official.request_headers()


def test_the_key_is_never_shown() -> None:
    config = APIServerConfig(api_key="sk-secret", base_url="http://x/v1")
    assert "sk-secret" not in repr(config)
    assert "sk-secret" not in str(config)
    assert "***" in repr(config)


async def test_openai_client_options_reach_the_request(harness: HarnessServer) -> None:
    from openai import NOT_GIVEN

    await _server(harness).chat_completion(
        messages=MESSAGES,
        extra_body={"guided_regex": "a+"},
        extra_headers={"X-Trace": "7"},
        timeout=30,
        seed=NOT_GIVEN,
        stop=None,
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    body = harness.bodies("/v1/chat/completions")[0]
    assert set(body) == {"messages", "model", "guided_regex", "tools"}
    assert harness.requests[0].headers["X-Trace"] == "7"


async def test_the_openai_client_is_there_for_code_that_wants_it(harness: HarnessServer) -> None:
    server = _server(harness)
    reply = await server.openai.chat.completions.create(model="m", messages=MESSAGES)
    assert reply.choices[0].message.content
    await server.aclose()


async def test_one_connection_is_reused(harness: HarnessServer) -> None:
    server = _server(harness)
    await server.chat_completion(messages=MESSAGES)
    first = await server.http.session()
    await server.chat_completion(messages=MESSAGES)
    assert await server.http.session() is first
    await server.aclose()
    assert first.closed


# -- combining settings ---------------------------------------------------------------------------------------------

A, B = {"base_url": "http://a/v1", "model_name": "a"}, {"base_url": "http://b/v1", "model_name": "b"}
D, E = APIServerConfig(base_url="http://d/v1"), APIServerConfig(base_url="http://e/v1")


def _resolve(
    default: Any, yaml: Any = None, flags: dict[str, Any] | None = None, merged: dict[str, Any] | None = None
) -> Any:
    return resolve_openai_configs(
        default, merged or {}, {"openai": yaml} if yaml is not None else {}, flags or {}, logging.getLogger("test")
    )


def _urls(configs: Any) -> Any:
    return [config.base_url for config in configs] if isinstance(configs, list) else configs.base_url


def test_alias_of_the_older_document() -> None:
    assert OpenaiConfig is APIServerConfig


@pytest.mark.parametrize("default", [ServerBaseline(), [D], [D, E], D])
def test_a_yaml_list_of_two_always_wins(default: Any) -> None:
    assert _urls(_resolve(default, [A, B])) == ["http://a/v1", "http://b/v1"]


@pytest.mark.parametrize("yaml", [A, [A]])
def test_one_server_of_the_yaml_file_is_used_as_given(yaml: Any) -> None:
    assert _urls(_resolve(ServerBaseline(timeout=7), yaml)) == ["http://a/v1"]
    assert _resolve(ServerBaseline(timeout=7), yaml)[0].timeout == 7
    assert _urls(_resolve([D], yaml)) == ["http://a/v1"]
    assert _urls(_resolve(D, yaml)) == ["http://a/v1"]
    assert _urls(_resolve([D, E], yaml)) == ["http://a/v1"]


def test_flags_reach_the_server() -> None:
    flags = {"openai.base_url": "http://f/v1", "openai.model_name": "f"}
    for default in (ServerBaseline(), [D]):
        resolved = _resolve(default, flags=flags)
        assert (_urls(resolved), resolved[0].model_name) == (["http://f/v1"], "f")
    assert _urls(_resolve(D, flags=flags)) == ["http://f/v1"]
    assert _urls(_resolve(D)) == ["http://d/v1"]
    assert _resolve([D], A, {"openai.model_name": "f"})[0].model_name == "f"


def test_a_baseline_keeps_being_one_until_a_server_is_named() -> None:
    baseline = ServerBaseline()
    assert _resolve(baseline) is baseline
    changed = _resolve(baseline, flags={"openai.model_name": "new"})
    assert type(changed) is ServerBaseline
    assert changed.model_name == "new"


@pytest.mark.parametrize(("default", "yaml"), [([D, E], None), ([D], [A, B])])
def test_flags_and_several_servers_are_refused(default: Any, yaml: Any) -> None:
    with pytest.raises(FailedExecutionException, match="2 servers") as caught:
        _resolve(default, yaml, {"openai.base_url": "http://f/v1"})
    assert caught.value.exit_code == 2


def test_two_default_servers_stay_without_a_named_one(caplog: pytest.LogCaptureFixture) -> None:
    default = [D, E]
    assert _resolve(default) is default
    assert _resolve(default, {"model_name": "x"}) is default
    assert "ignored" in caplog.text


def test_merged_values_are_used() -> None:
    assert _resolve([D], merged={**D.model_dump(), "timeout": 5})[0].timeout == 5
    assert _resolve([], merged=A)[0].base_url == "http://a/v1"


def test_a_server_must_be_a_mapping() -> None:
    with pytest.raises(ConfigError, match="mapping"):
        _resolve([D], ["http://a", "http://b"])
