"""The policy server over real HTTP, with the official OpenAI client and a tiny real model."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from atlaslib.engine import Engine, EngineConfig, EngineThread, policy_service
from atlaslib.engine.policy_service import PolicyService
from atlaslib.engine.server import LARGE_BODY, MAX_BODY, ServerHandle, serve_in_thread
from atlaslib.errors import ConfigError
from atlaslib.models.tiny import tiny_llama
from atroposlib.testing.tiny_tokenizer import build_tiny_tokenizer

CHAT = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[EngineThread, Any, ServerHandle]]:
    tokenizer = build_tiny_tokenizer()
    loop = EngineThread(Engine(tiny_llama(), tokenizer, EngineConfig(max_model_len=256, max_num_seqs=16)))
    loop.start()
    handle = serve_in_thread(loop, tokenizer, "tiny", max_open=64)
    yield loop, tokenizer, handle
    handle.stop()
    loop.stop()


@pytest.fixture
def client(served: tuple[EngineThread, Any, ServerHandle]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[2].url}/v1", api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture
def http(served: tuple[EngineThread, Any, ServerHandle]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[2].url, timeout=60) as made:
        yield made


def requests(http: httpx.Client, route: str, status: int) -> int:
    """How often a route gave this status."""
    found = http.get("/metrics").text.partition(f'{{route="{route}",status="{status}"}} ')[2].split()
    return int(found[0]) if found else 0


def wait_until_idle(http: httpx.Client) -> None:
    wait_until_open(http, 0)


def wait_until_open(http: httpx.Client, samples: int) -> None:
    deadline = time.monotonic() + 30
    while f"atropos_engine_open_samples {samples}\n" not in http.get("/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The choices of a streamed reply put together: text, token ids, log-probs, finish reason."""
    whole: dict[int, dict[str, Any]] = {}
    with http.stream("POST", path, json=body | {"stream": True}) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    for choice in (choice for line in lines[:-1] for choice in json.loads(line)["choices"]):
        one = whole.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": [], "reason": None})
        one["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        one["token_ids"] += choice.get("token_ids", [])
        one["logprobs"] += flat_logprobs(choice)
        one["reason"] = choice["finish_reason"] or one["reason"]
    return whole[0]


def flat_logprobs(choice: dict[str, Any]) -> list[Any]:
    found = choice["logprobs"] or {"content": []}
    if "content" in found:
        return list(found["content"])
    return list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], found["text_offset"], strict=True))


def test_chat_through_the_official_client(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="anything", messages=CHAT, n=3, max_completion_tokens=5, seed=1, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len("user\nhi\nassistant\n") + 3
    assert reply.model == "tiny"
    for choice in reply.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content)
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
        for (
            entry
        ) in choice.logprobs.content:  # a part of a character has no text of its own, so its bytes are not known
            assert entry.bytes == (None if "\ufffd" in entry.token else list(entry.token.encode()))
    assert reply.model_extra is not None
    assert reply.model_extra["policy_versions"] == [0]


def test_same_seed_same_reply(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        return (
            client.chat.completions.create(model="m", messages=CHAT, max_tokens=12, seed=seed)
            .choices[0]
            .message.content
        )

    assert ask(5) == ask(5)
    assert ask(5) != ask(6)


def test_streaming_gives_the_same_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="m", messages=CHAT, max_tokens=20, seed=3)
    text, reasons, usage = "", [], None
    with client.chat.completions.create(
        model="m", messages=CHAT, max_tokens=20, seed=3, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert reasons == [whole.choices[0].finish_reason]
    assert usage == whole.usage


def test_plain_completion_with_echo_and_prompt_logprobs(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="m", prompt="abc", max_tokens=2, echo=True, logprobs=0, temperature=0)
    choice = reply.choices[0]
    assert choice.text.startswith("abc")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.token_logprobs) == 3 + 2
    several = client.completions.create(model="m", prompt=["a", "b"], n=2, max_tokens=1)
    assert len(several.choices) == 4


def test_streamed_completion(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="m", prompt="abc", max_tokens=9, seed=4)
    with client.completions.create(model="m", prompt="abc", max_tokens=9, seed=4, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole.choices[0].text


@pytest.mark.parametrize(
    "extra",
    [
        {"stop": "xB"},
        {"stop": "xB", "include_stop_str_in_output": True},
        {"stop": "xB", "min_tokens": 20},
        {"stop_token_ids": [145]},
        {"echo": True, "logprobs": 2},
        {"logprobs": 2},
        {"max_tokens": 0, "echo": True, "logprobs": 1},
        {"messages": CHAT, "logprobs": True, "top_logprobs": 1},
        {"messages": CHAT, "tools": TOOLS, "logprobs": True},
    ],
)
def test_a_stream_adds_up_to_the_whole_reply(http: httpx.Client, extra: dict[str, Any]) -> None:
    body = {"max_tokens": 30, "seed": 2, "ignore_eos": True, "return_token_ids": True} | extra
    path = "/v1/chat/completions" if "messages" in extra else "/v1/completions"
    body |= {} if "messages" in extra else {"prompt": "q"}
    whole = http.post(path, json=body).json()["choices"][0]
    if "stop" in extra:
        assert (whole["finish_reason"] == "stop") == ("min_tokens" not in extra)
    assert streamed(http, path, body) == {
        "text": whole["message"]["content"] if "messages" in extra else whole["text"],
        "token_ids": whole["token_ids"],
        "logprobs": json.loads(json.dumps(flat_logprobs(whole))) if "messages" in extra else flat_logprobs(whole),
        "reason": whole["finish_reason"],
    }


def test_alternatives_that_read_the_same_are_the_likeliest(http: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 8, "seed": 1, "logprobs": 20, "ignore_eos": True}
    tables = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert any(len(table) < 20 for table in tables)  # several parts of characters
    for table in tables:
        assert list(table.values()) == sorted(table.values(), reverse=True)


def test_the_field_to_blame(http: httpx.Client) -> None:
    asked = [
        ("/generate", {"prompt": [5], "logprobs": -1}, "logprobs"),
        ("/v1/score", {"token_ids": [5, 999999]}, "token_ids"),
        ("/v1/score", {"token_ids": [[5]] * 65}, "token_ids"),
        ("/v1/completions", {"prompt": ["a"] * 65}, "prompt"),
        ("/v1/completions", {"prompt": "a", "n": 65}, "n"),
    ]
    for path, body, field in asked:
        reply = http.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


def test_alternatives_of_a_truncated_distribution(http: httpx.Client) -> None:
    body = {"prompt": "q", "max_tokens": 3, "top_k": 2, "logprobs": 5, "seed": 1, "ignore_eos": True}
    rows = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert all(1 <= len(row) <= 2 for row in rows)  # tokens that are parts of characters read the same
    exact = http.post("/generate", json=body).json()
    assert all(len(row[0]) == 2 for row in exact["logprobs"][0])


def test_prompt_logprobs_come_back_where_they_were_asked_for(http: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "prompt_logprobs": 2}
    reply, exact = http.post("/v1/completions", json=body), http.post("/generate", json=body)
    table = reply.json()["prompt_logprobs"]
    assert table == exact.json()["prompt_logprobs"]
    assert (table[0], len(table)) == (None, 3)
    echoed = http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 1, "echo": True, "logprobs": 2}).json()
    tops = echoed["choices"][0]["logprobs"]["top_logprobs"]
    assert [top and len(top) for top in tops] == [None, 2, 2, 2]
    assert sorted(tops[1].values()) == sorted(table[1].values())[-2:]
    # no token was sampled, and yet the version is known
    assert (reply.json()["policy_versions"], exact.json()["policy_versions"]) == ([0], [[0]])
    assert reply.headers["x-policy-version"] == "0"


def test_generate_is_token_exact(served: tuple[EngineThread, Any, ServerHandle], http: httpx.Client) -> None:
    prompt = [70, 71, 72]
    body = {
        "prompt": {"prompt_token_ids": prompt},
        "n": 2,
        "max_tokens": 6,
        "logprobs": 0,
        "temperature": 0.7,
        "seed": 9,
    }
    reply = http.post("/generate", json=body)
    assert reply.status_code == 200
    data = reply.json()
    assert data["prompt_token_ids"] == prompt
    assert data["policy_versions"] == [[0], [0]]
    assert reply.headers["x-policy-version"] == "0"
    for ids, rows in zip(data["token_ids"], data["logprobs"], strict=True):
        assert [int(next(iter(row[0]))) for row in rows] == ids
        scored = served[0].submit_score(prompt + ids, temperature=0.7).result(timeout=60)[0].prompt_logprobs
        assert scored is not None
        assert [row[0][str(token)] for token, row in zip(ids, rows, strict=True)] == pytest.approx(scored[3:], abs=1e-4)


def test_score_route(served: tuple[EngineThread, Any, ServerHandle], http: httpx.Client) -> None:
    one = http.post("/v1/score", json={"token_ids": [70, 71, 72]}).json()
    two = http.post("/v1/score", json={"token_ids": [[70, 71, 72], [5, 6]], "temperature": 1.0}).json()
    assert one["logprobs"][0] == pytest.approx(two["logprobs"][0], abs=1e-5)
    assert one["logprobs"][0][0] == 0.0
    assert len(two["logprobs"][1]) == 2
    assert two["policy_versions"] == [0]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", {"messages": []}, "non-empty list"),
        ("/v1/chat/completions", {"messages": CHAT, "temprature": 1}, "did you mean 'temperature'"),
        ("/v1/chat/completions", {"messages": CHAT, "temperature": -1}, "temperature"),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 3}, "logprobs=true"),
        ("/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0]"),
        ("/v1/completions", {"prompt": "x" * 300}, "256"),
        ("/v1/completions", {"prompt": [999999]}, "999999"),
        ("/v1/completions", {"prompt": "a", "stop": [""]}, "stop"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/generate", {"prompt": {"prompt_token_ids": []}}, "prompt"),
        ("/v1/score", {"token_ids": "abc"}, "token_ids"),
        ("/v1/score", {"token_ids": [5, 6], "temperature": 1e-40}, "temperature"),
        ("/v1/completions", {"prompt": [["a", "b"], "c"]}, "prompt is ['a', 'b']"),
        ("/v1/completions", {"prompt": "a", "n": 65}, "65 samples are more than the 64"),
        ("/v1/completions", {"prompt": "a", "stream": "no"}, "stream is 'no'"),
        ("/v1/completions", {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "cannot be streamed"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"a": 1}}]}, "not text"),
        ("/v1/chat/completions", {"messages": CHAT, "tools": "add"}, "tools is 'add'"),
        ("/v1/chat/completions", {"messages": CHAT, "tools": TOOLS, "tool_choice": "required"}, "cannot force a call"),
        ("/v1/chat/completions", {"messages": CHAT, "tools": TOOLS, "chat_template_kwargs": [1]}, "give an object"),
        ("/generate", {"prompt": {"prompt_token_ids": "text"}}, "prompt_token_ids"),
        ("/generate", {"prompt": {"prompt_token_ids": [70]}, "stream": True}, "does not stream"),
    ],
)
def test_bad_requests_are_named(http: httpx.Client, path: str, body: dict[str, Any], words: str) -> None:
    reply = http.post(path, json=body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 1 << 70),
        ("min_tokens", 1 << 70),
        ("temperature", 10**400),
        ("temperature", 1e-40),
        ("repetition_penalty", 1e-45),
        ("logit_bias", {"70": 10**400}),
        ("logit_bias", {"70": 1e300}),
        ("logit_bias", {"9999": 1}),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", 5),
        ("ignore_eos", "false"),
        ("stream_options", {"include_usag": True}),
        ("stream_options", []),
    ],
)
def test_impossible_values_are_refused_and_the_engine_goes_on(http: httpx.Client, field: str, value: Any) -> None:
    reply = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1 << 30, field: value})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("body", [b"{nope", b'{"prompt": "\\ud800"}', b'{"prompt":' + b"[" * 100_000, b"[1]", b"\xff"])
def test_body_that_is_not_json(http: httpx.Client, body: bytes) -> None:
    reply = http.post("/v1/completions", content=body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "words"),
    [
        (
            "POST",
            "/chat/completions",
            404,
            "unknown_url",
            "/chat/completions; did you mean /v1/chat/completions? There is POST",
        ),
        ("GET", "/nothing", 404, "unknown_url", "unknown path /nothing; there is POST /v1/chat/completions, POST"),
        ("GET", "/v1/completions", 405, "method_not_supported", "GET does not go with /v1/completions; use POST"),
    ],
)
def test_errors_of_the_framework_have_the_form_of_ours(
    http: httpx.Client, method: str, path: str, status: int, code: str, words: str
) -> None:
    reply = http.request(method, path)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["code"]) == (status, "invalid_request_error", code)
    assert words in error["message"]
    assert reply.headers.get("allow") == ("POST" if status == 405 else None)


def test_a_model_is_found_by_its_name(http: httpx.Client) -> None:
    card = http.get("/v1/models").json()["data"][0]
    assert http.get(f"/v1/models/{card['id']}").json() == card
    reply = http.get("/v1/models/org/other")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert "'org/other'" in reply.json()["error"]["message"]
    assert repr(card["id"]) in reply.json()["error"]["message"]


def test_a_crash_is_told_in_the_same_form(
    served: tuple[EngineThread, Any, ServerHandle], http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(served[0].engine, "max_model_len")
    reply = http.get("/v1/models")
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
    assert "AttributeError" in reply.json()["error"]["message"]


def test_a_large_body_holds_nobody_up(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "abc", "max_tokens": 4, "seed": 1}
    wanted = http.post("/v1/completions", json=body).json()["choices"]
    real, may_go_on = PolicyService.parse_completion, threading.Event()

    def slow(service: PolicyService, body: dict[str, Any]) -> Any:
        assert may_go_on.wait(30)
        return real(service, body)

    monkeypatch.setattr(PolicyService, "parse_completion", slow)
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(http.post, "/v1/completions", json=body | {"user": "x" * LARGE_BODY})
        assert http.get("/health").status_code == 200
        assert not reply.done()
        may_go_on.set()
        assert reply.result().json()["choices"] == wanted


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "x" * 100_000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
    ],
)
def test_a_text_that_can_never_fit_is_not_tokenized(
    http: httpx.Client, path: str, body: dict[str, Any], field: str
) -> None:
    error = http.post(path, json=body).json()["error"]
    assert "characters, which never fit into max_model_len=256" in error["message"]
    assert error["param"] == field


def test_a_client_that_leaves_while_it_speaks_is_no_failure(http: httpx.Client) -> None:
    address, before = http.base_url, requests(http, "/v1/score", 499)
    with socket.create_connection((address.host, address.port)) as half:
        half.sendall(b'POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{"token_ids"')
        http.get("/health")
    deadline = time.monotonic() + 30
    while requests(http, "/v1/score", 499) == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_too_much_at_once_is_429(served: tuple[EngineThread, Any, ServerHandle], http: httpx.Client) -> None:
    body = {"prompt": "a", "n": 64, "max_tokens": 250, "ignore_eos": True, "stream": True}
    with served[0].engine.exclusive(), http.stream("POST", "/v1/completions", json=body) as running:
        assert running.status_code == 200
        for path, more in (("/v1/completions", {"prompt": "a"}), ("/v1/score", {"token_ids": [5, 6]})):
            reply = http.post(path, json=more)
            assert reply.status_code == 429
            assert reply.headers["retry-after"] == "1"
    wait_until_idle(http)


def test_a_429_says_when_there_will_be_room(
    served: tuple[EngineThread, Any, ServerHandle], http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(policy_service, "time", SimpleNamespace(monotonic=lambda: clock.now))
    body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True}

    def retry_after(n: int) -> str:
        reply = http.post("/v1/completions", json={"prompt": "a", "n": n})
        assert reply.status_code == 429
        return reply.headers["retry-after"]

    with served[0].engine.exclusive(), http.stream("POST", "/v1/completions", json=body | {"n": 56}):
        with http.stream("POST", "/v1/completions", json=body | {"n": 8}):
            clock.now += 16.0
            assert retry_after(64) == "1"  # nothing has ended yet: no rate
        wait_until_open(http, 56)
        assert [retry_after(n) for n in (9, 10, 13, 64)] == ["2", "4", "10", "60"]  # 8 in 16 s
    wait_until_idle(http)
    clock.now += 3600.0
    with served[0].engine.exclusive(), http.stream("POST", "/v1/completions", json=body | {"n": 64}):
        assert retry_after(64) == "1"  # the idle hour does not count
    wait_until_idle(http)


def test_a_body_too_large_is_refused_before_it_is_held(served: tuple[EngineThread, Any, ServerHandle]) -> None:
    loop, tokenizer, _ = served
    handle = serve_in_thread(loop, tokenizer, max_body_bytes=1000)
    body = json.dumps({"prompt": "a", "max_tokens": 1})
    try:
        with httpx.Client(base_url=handle.url, timeout=30) as http:
            whole = http.post("/v1/completions", content=body.ljust(1000))
            assert whole.status_code == 200
            for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/v1/score"):
                over = http.post(path, content=body.ljust(1001))
                assert over.status_code == 413
                assert over.json()["error"] == {
                    "message": "the body has 1001 bytes or more and the limit is 1000; ask in smaller parts",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": None,
                }
            parts = (b" " * 2**16 for _ in range(64))  # a body that does not say how long it is
            chunked = http.post("/v1/completions", content=parts)
            assert chunked.status_code == 413
            assert "and the limit is 1000;" in chunked.json()["error"]["message"]
            assert requests(http, "/v1/completions", 413) == 2
            assert http.post("/v1/completions", content=body).status_code == 200
    finally:
        handle.stop()


def test_a_body_that_says_it_is_too_large_is_not_waited_for(http: httpx.Client) -> None:
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=30) as raw:
        raw.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000000\r\n\r\n{")
        reply = ""
        while "}" not in reply and (part := raw.recv(10_000)):  # head and body may come one after the other
            reply += part.decode()
    assert reply.startswith("HTTP/1.1 413 ")
    assert f"the body has 10000000000 bytes or more and the limit is {MAX_BODY};" in reply


def test_all_bodies_together_are_bounded(served: tuple[EngineThread, Any, ServerHandle]) -> None:
    loop, tokenizer, _ = served
    handle = serve_in_thread(loop, tokenizer, max_body_bytes=1000)
    host, port = handle.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "a", "max_tokens": 1})

    def begin() -> socket.socket:
        """A request that never sends the last one of its 900 bytes."""
        raw = socket.create_connection((host, int(port)), timeout=30)
        raw.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n" + b" " * 899)
        return raw

    def wait_until_held(size: int) -> None:
        deadline = time.monotonic() + 30
        while f"atropos_engine_open_body_bytes {size}\n" not in http.get("/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    try:
        with httpx.Client(base_url=handle.url, timeout=30) as http, begin() as first:
            with begin():
                wait_until_held(2 * 899)
                for content in (body.ljust(203), iter([body.ljust(203).encode()])):  # with and without a length
                    over = http.post("/generate", content=content)
                    assert (over.status_code, over.headers["retry-after"]) == (429, "1")
                    assert over.json()["error"]["type"] == "rate_limit_error"
                    assert (
                        "have 1798 bytes and 203 more would pass the limit of 2000" in over.json()["error"]["message"]
                    )
                assert http.post("/generate", content=body.ljust(202)).status_code == 200
            wait_until_held(899)  # a client that left gives its share back
            assert http.post("/generate", content=body.ljust(1000)).status_code == 200
            stream = {"prompt": "a", "max_tokens": 9, "stream": True}
            with loop.engine.exclusive(), http.stream("POST", "/v1/completions", json=stream) as reply:
                wait_until_held(899 + int(reply.request.headers["content-length"]))  # until the stream has ended
            first.sendall(b" ")
            assert first.recv(100).startswith(b"HTTP/1.1 400 ")
            wait_until_held(0)
    finally:
        handle.stop()


def test_a_stopped_engine_is_503_not_the_clients_fault() -> None:
    tokenizer = build_tiny_tokenizer()
    loop = EngineThread(Engine(tiny_llama(), tokenizer, EngineConfig(max_model_len=64))).start()
    handle = serve_in_thread(loop, tokenizer)
    try:
        loop.stop()
        assert httpx.post(f"{handle.url}/v1/completions", json={"prompt": "a"}).status_code == 503
        assert httpx.get(f"{handle.url}/health").status_code == 503
    finally:
        handle.stop()


async def test_a_client_that_leaves_frees_its_slot(served: tuple[EngineThread, Any, ServerHandle]) -> None:
    _, _, handle = served
    before = aborted(httpx.get(f"{handle.url}/metrics").text)
    body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "n": 16}
    async with aiohttp.ClientSession() as session:
        with pytest.raises(asyncio.TimeoutError):
            await session.post(f"{handle.url}/v1/completions", json=body, timeout=aiohttp.ClientTimeout(total=0.05))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        text = httpx.get(f"{handle.url}/metrics").text
        if "atropos_engine_open_samples 0\n" in text:
            break
        await asyncio.sleep(0.05)
    assert "atropos_engine_open_samples 0\n" in text
    assert aborted(text) == before + 1


def aborted(metrics: str) -> int:
    return int(metrics.split("\natropos_engine_aborted_total ")[1].split()[0])


def test_a_client_that_leaves_takes_its_scoring_along(
    served: tuple[EngineThread, Any, ServerHandle], http: httpx.Client
) -> None:
    before = aborted(http.get("/metrics").text)
    with served[0].engine.exclusive():  # nothing is scored before the server has seen the client go
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/score", json={"token_ids": [[5, 6, 7], [8, 9]]}, timeout=1.0)
        wait_until_idle(http)
    assert aborted(http.get("/metrics").text) == before + 2


def test_health_models_metrics(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok", "model": "tiny", "policy_version": 0}
    card = http.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", 256)
    before = requests(http, "other", 404)
    for path in ('/a"b', "/c"):
        assert http.get(path).status_code == 404
    text = http.get("/metrics").text
    assert 'atropos_engine_requests_total{route="/health",status="200"}' in text
    assert requests(http, "other", 404) == before + 2
    assert '/a"b' not in text
    assert "# TYPE atropos_engine_open_samples gauge\natropos_engine_open_samples 0\n" in text


def test_stop_string_and_token(http: httpx.Client) -> None:
    whole = http.post("/v1/completions", json={"prompt": "q", "max_tokens": 30, "seed": 2, "ignore_eos": True}).json()[
        "choices"
    ][0]["text"]
    stop = whole[4]
    cut = http.post(
        "/v1/completions", json={"prompt": "q", "max_tokens": 30, "seed": 2, "ignore_eos": True, "stop": stop}
    ).json()
    assert cut["choices"][0]["text"] == whole[: whole.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"


def test_tools_go_through_the_template_and_come_back_as_calls() -> None:
    from atlaslib.engine.config import SamplingParams
    from atlaslib.engine.openai_protocol import ParsedRequest
    from atlaslib.engine.openai_replies import ReplyWriter
    from atlaslib.engine.sequence import Completion

    tokenizer = build_tiny_tokenizer()
    text = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    ids = tokenizer(text)["input_ids"]
    zeros = [0.0] * len(ids)
    done = Completion(
        token_ids=ids,
        logprobs=zeros,
        temperature_logprobs=zeros,
        raw_logprobs=zeros,
        versions=[3] * len(ids),
        finish_reason="stop",
    )
    parsed = ParsedRequest(params=SamplingParams(), prompt_ids=[[1]], tools=TOOLS)
    reply = ReplyWriter(tokenizer, "m", "hermes").chat(parsed, [done], [3])
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see.\n"
    call = choice["message"]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 1})
    assert reply["policy_versions"] == [3]


def test_messages_reach_the_template_as_templates_expect_them(
    served: tuple[EngineThread, Any, ServerHandle], client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = served[1]
    template = (
        "{% for m in messages %}{{ m.role + ':' + m.content }}{{ m.tool_calls | tojson if m.tool_calls }};{% endfor %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    call: Any = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": " + 1?"}]},
        {"role": "assistant", "content": "<think>hm</think>", "tool_calls": [call]},
    ]
    reply = client.chat.completions.create(
        model="m", messages=messages, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert reply.model_extra is not None
    call["function"]["arguments"] = {"a": 1}  # JSON text would be quoted twice
    expected = f"user:1 + 1?;assistant:<think>hm</think>{json.dumps([call])};"
    assert tokenizer.decode(reply.model_extra["prompt_token_ids"]) == expected


def test_idle_connections_are_the_clients_to_close(served: tuple[EngineThread, Any, ServerHandle]) -> None:
    """Clients keep theirs for up to 30 s; a connection closed while it is being reused is a failed request."""
    assert served[2].server.config.timeout_keep_alive > 60


def test_new_weights_carry_a_new_version() -> None:
    import torch

    tokenizer = build_tiny_tokenizer()
    model = tiny_llama()
    engine = Engine(model, tokenizer, EngineConfig(max_model_len=64))
    loop = EngineThread(engine)
    loop.start()
    handle = serve_in_thread(loop, tokenizer)
    try:
        ask = {"prompt": "a", "max_tokens": 2, "temperature": 0}
        assert httpx.post(f"{handle.url}/v1/completions", json=ask).json()["policy_versions"] == [0]
        with engine.updating(), torch.no_grad():
            model.lm_head.weight.mul_(2.0)
        assert httpx.post(f"{handle.url}/v1/completions", json=ask).json()["policy_versions"] == [1]
    finally:
        handle.stop()
        loop.stop()


def test_other_addresses_need_a_token(served: tuple[EngineThread, Any, ServerHandle]) -> None:
    loop, tokenizer, _ = served
    with pytest.raises(ConfigError, match="set a token"):
        serve_in_thread(loop, tokenizer, host="0.0.0.0")
    handle = serve_in_thread(loop, tokenizer, token="secret")
    try:
        assert httpx.get(f"{handle.url}/v1/models").status_code == 401
        assert httpx.get(f"{handle.url}/health").status_code == 200
        assert httpx.get(f"{handle.url}/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
        assert httpx.get(f"{handle.url}/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
    finally:
        handle.stop()


@pytest.mark.parametrize(("options", "words"), [({"port": 99999}, "port is 99999"), ({"max_open": 0}, "max_open is 0")])
def test_settings_with_which_nothing_can_be_served(
    served: tuple[EngineThread, Any, ServerHandle], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        serve_in_thread(served[0], served[1], **options)


def test_many_clients_at_once(served: tuple[EngineThread, Any, ServerHandle]) -> None:
    url = f"{served[2].url}/v1/completions"
    replies: list[int] = []

    def ask(number: int) -> None:
        body = {"prompt": f"prompt {number}", "max_tokens": 8, "ignore_eos": True}
        replies.append(httpx.post(url, json=body, timeout=60).json()["usage"]["completion_tokens"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == [8] * 24
