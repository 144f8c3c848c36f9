"""The proxy over real HTTP: an agent needs nothing but a base URL, and strangers get nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import uvicorn
from fastapi.testclient import TestClient

from atroposlib.envs.server_handling.managed_server_proxy import create_app, main
from atroposlib.envs.server_handling.policy_versions import record_policy_versions
from atroposlib.envs.server_handling.proxy_client import create_proxy_session
from atroposlib.envs.server_handling.proxy_sessions import SessionState, SessionStore
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import InferenceServerError
from atroposlib.testing.harness_server import HarnessServer

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
CALL = '<tool_call>{"name": "search", "arguments": {"query": "cats"}}</tool_call>'
USER = {"role": "user", "content": "hi"}


@contextmanager
def _serving(app: Any, port: int) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def _manager(harness: HarnessServer, kind: str = "vllm") -> ServerManager:
    config = APIServerConfig(base_url=harness.base_url, model_name="m", server_type=kind, health_check=False)  # type: ignore[arg-type]
    return ServerManager([config])


@pytest.fixture
def proxy_url(harness: HarnessServer, free_port: int) -> Iterator[str]:
    with _serving(create_app(_manager(harness), harness.tokenizer, "policy"), free_port) as url:
        yield url


def _agent(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="anything", max_retries=0)


async def test_an_agent_with_a_base_url_is_recorded(harness: HarnessServer, proxy_url: str) -> None:
    harness.reply, harness.policy_versions = "hello", [7]
    async with await create_proxy_session(proxy_url) as session:
        async with _agent(session.get_url()) as agent:
            first = await agent.chat.completions.create(
                model="any", messages=[USER], n=2, seed=3, top_p=0.5, stop="END"
            )  # type: ignore[list-item]
            reply = {"role": "assistant", "content": first.choices[0].message.content}
            await agent.chat.completions.create(model="any", messages=[USER, reply, USER])  # type: ignore[list-item]
            assert [model.id async for model in agent.models.list()] == ["policy"]
        nodes = session.get_state()["nodes"]
        assert len(nodes) == 2
        assert nodes == (await session.fetch_state())["nodes"]
    assert first.id.startswith("chatcmpl-")
    assert first.model == "policy"
    assert first.policy_versions == [7]  # type: ignore[attr-defined]
    decode = harness.tokenizer.decode
    assert decode([token for token in nodes[0].masked_tokens if token != -100]) == "hello<|im_end|>hello<|im_end|>"
    assert nodes[0].metadata == {"finish_reason": "stop", "policy_versions": [7]}
    sent = harness.bodies("/generate")[0]
    assert (sent["seed"], sent["top_p"], sent["stop"], sent["n"], sent["max_tokens"]) == (3, 0.5, ["END"], 2, 1024)


async def test_streaming_gives_the_same_reply_in_pieces(harness: HarnessServer, proxy_url: str) -> None:
    harness.reply = "a reply that is longer than one piece of a stream, surely"
    async with await create_proxy_session(proxy_url) as session, _agent(session.get_url()) as agent:
        stream: Any = await agent.chat.completions.create(
            model="x",
            messages=[USER],
            stream=True,
            stream_options={"include_usage": True},  # type: ignore[list-item]
        )
        chunks = [chunk async for chunk in stream]
        assert len(session.get_state()["nodes"]) == 1
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(pieces) > 2
    assert "".join(pieces) == harness.reply
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == len(harness.reply) + 1


async def test_tools_pass_through_streamed_and_not(harness: HarnessServer, proxy_url: str) -> None:
    harness.reply = CALL
    async with await create_proxy_session(proxy_url) as session, _agent(session.get_url()) as agent:
        plain: Any = await agent.chat.completions.create(model="x", messages=[USER], tools=TOOLS, tool_choice="auto")  # type: ignore[call-overload]
        call = plain.choices[0].message.tool_calls[0]
        assert (plain.choices[0].finish_reason, call.function.name) == ("tool_calls", "search")
        stream: Any = await agent.chat.completions.create(model="x", messages=[USER], tools=TOOLS, stream=True)  # type: ignore[call-overload]
        deltas = [chunk.choices[0].delta async for chunk in stream]
        streamed = next(delta.tool_calls[0] for delta in deltas if delta.tool_calls)
        assert json.loads(streamed.function.arguments) == {"query": "cats"}
        harness.reply = "done"
        answered = [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "5 cats"}]},
        ]
        await agent.chat.completions.create(model="x", messages=answered, tools=TOOLS)  # type: ignore[call-overload]
        nodes = session.get_state()["nodes"]
    trained = [harness.tokenizer.decode([token for token in node.masked_tokens if token != -100]) for node in nodes]
    assert trained == [f"{CALL}<|im_end|>done<|im_end|>", f"{CALL}<|im_end|>"]


async def test_token_ids_and_log_probs_on_request(harness: HarnessServer, proxy_url: str) -> None:
    harness.reply = "ab"
    async with await create_proxy_session(proxy_url) as session, _agent(session.get_url()) as agent:
        reply: Any = await agent.chat.completions.create(
            model="x",
            messages=[USER],
            logprobs=True,
            extra_body={"return_token_ids": True},  # type: ignore[list-item]
        )
        (node,) = session.get_state()["nodes"]
    choice = reply.choices[0]
    assert choice.token_ids == harness.tokenizer.encode("ab<|im_end|>")
    assert reply.prompt_token_ids + choice.token_ids == node.tokens
    assert [entry.logprob for entry in choice.logprobs.content] == node.logprobs[-3:]
    assert [entry.token for entry in choice.logprobs.content] == ["a", "b", "<|im_end|>"]


async def test_the_client_is_a_session_like_any_other(harness: HarnessServer, proxy_url: str) -> None:
    harness.reply, harness.policy_versions = CALL, [4]
    manager = _manager(harness)
    manager.proxy_url = proxy_url
    with record_policy_versions() as seen:
        async with manager.managed_server() as managed:
            reply = await managed.chat_completion(messages=[USER], n=2, tools=TOOLS, top_k=5, max_tokens=77)
            tool_calls: Any = reply.choices[0].message.tool_calls
            assert tool_calls[0]["function"]["name"] == "search"
            assert len(managed.get_state()["nodes"]) == 2
            await managed.completion(prompt="p", max_tokens=5)
            assert len(managed.get_state()["nodes"]) == 3
            url = managed.get_url()
    assert seen == {4}
    body = harness.bodies("/generate")[0]
    assert (body["n"], body["top_k"], body["max_tokens"]) == (2, 5, 77)
    async with _agent(url) as agent:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await agent.chat.completions.create(model="x", messages=[USER])  # type: ignore[list-item]


async def test_a_session_that_cannot_be_closed_keeps_what_it_recorded(
    harness: HarnessServer, proxy_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = _manager(harness)
    manager.proxy_url = proxy_url
    async with manager.managed_server() as managed:
        await managed.chat_completion(messages=[USER], max_tokens=5)
        nodes = managed.get_state()["nodes"]
        managed.proxy_url = "http://127.0.0.1:1"  # the proxy has gone
    assert len(nodes) == 1
    assert "could not be closed and is left to expire: inference server http://127.0.0.1:1/" in caplog.text


async def test_proxy_mode_by_variable(harness: HarnessServer, proxy_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_PROXY_URL", proxy_url)
    manager = _manager(harness)
    async with manager.managed_server(base_url=harness.base_url) as managed:
        assert managed.get_url().startswith(proxy_url)
    with pytest.raises(InferenceServerError, match="404"):
        async with manager.managed_server(base_url="http://elsewhere/v1"):
            pass


def test_backend_errors_are_openai_errors(harness: HarnessServer, proxy_url: str) -> None:
    with openai.OpenAI(base_url=_new_session(proxy_url), api_key="x", max_retries=0) as agent:
        harness.fail_next(1, status=400, body="context length exceeded")
        with pytest.raises(openai.BadRequestError, match="context length exceeded"):
            agent.chat.completions.create(model="x", messages=[USER])  # type: ignore[list-item]


def _new_session(proxy_url: str) -> str:
    import httpx

    return f"{proxy_url}/{httpx.post(f'{proxy_url}/sessions/create', json={}).json()['uuid']}/v1"


# -- routes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def client(harness: HarnessServer) -> TestClient:
    return TestClient(create_app(_manager(harness), harness.tokenizer, "policy"))


def _open(client: TestClient, **body: Any) -> str:
    return str(client.post("/sessions/create", json=body).json()["uuid"])


@pytest.mark.parametrize("body", [b"{", b"[1]", b"{}", b'{"prompt": [1, 2]}', b"\xff"])
def test_a_completion_without_a_prompt_is_the_callers_mistake(client: TestClient, body: bytes) -> None:
    reply = client.post(f"/{_open(client)}/v1/completions", content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("the body")


def test_sessions_and_their_routes(client: TestClient, harness: HarnessServer) -> None:
    health = client.get("/health").json()
    assert health == {"status": "ok", "model": "policy", "sessions": 0, "servers": 1, "healthy_servers": 1}
    created = client.post("/sessions/create", json={"tool_parser": "mistral"}).json()
    assert (created["tool_parser"], created["model_name"], created["base_url"]) == (
        "mistral",
        "policy",
        harness.base_url,
    )
    session = created["uuid"]
    listed = client.get("/sessions").json()["sessions"]
    assert [(entry["uuid"], entry["num_nodes"]) for entry in listed] == [(session, 0)]
    assert client.get("/v1/models").json()["data"][0]["owned_by"] == "atropos"
    servers = client.get("/servers").json()["servers"]
    assert servers == [
        {"index": 0, "healthy": True, "base_url": harness.base_url, "model_name": "m", "server_type": "vllm"}
    ]
    rendered = client.post(f"/{session}/v1/chat/completions/render", json={"messages": [USER]}).json()
    assert rendered["prompt_text"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered["num_tokens"] == len(rendered["token_ids"])
    assert client.get(f"/{session}/nodes").json() == {"nodes": []}
    reply = client.post(f"/{session}/v1/chat/completions", json={"messages": [USER], "max_tokens": 5}).json()
    assert reply["object"] == "chat.completion"
    assert reply["choices"][0]["finish_reason"] == "length"
    (node,) = client.get(f"/{session}/nodes").json()["nodes"]
    assert set(node) == {"full_text", "tokens", "masked_tokens", "logprobs", "metadata"}
    assert client.delete(f"/{session}").json() == {"status": "deleted", "uuid": session}
    assert client.get("/health").json()["sessions"] == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nope/nodes", None, 404),
        ("DELETE", "/nope", None, 404),
        ("POST", "/nope/v1/chat/completions", {"messages": [USER]}, 404),
        ("POST", "/{id}/v1/chat/completions", {"messages": []}, 400),
        ("POST", "/{id}/v1/chat/completions", {"messages": "x"}, 400),
        ("POST", "/{id}/v1/completions", {}, 400),
        ("POST", "/sessions/create", {"tool_parser": "unknown"}, 400),
        ("POST", "/sessions/create", {"base_url": "http://other/v1"}, 404),
    ],
)
def test_errors_have_the_openai_shape(client: TestClient, method: str, path: str, body: Any, status: int) -> None:
    reply = client.request(method, path.replace("{id}", _open(client)), json=body)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "code"}


def test_tree_sessions(client: TestClient) -> None:
    session = _open(client, track_tree=True)
    for _ in range(2):
        client.post(f"/{session}/v1/chat/completions", json={"messages": [USER]})
    assert len(client.get(f"/{session}/nodes").json()["nodes"]) == 2


def test_openai_backends_record_placeholders(harness: HarnessServer) -> None:
    client = TestClient(create_app(_manager(harness, "openai"), harness.tokenizer, "policy"))
    session = _open(client)
    assert client.post(f"/{session}/v1/chat/completions", json={"messages": [USER]}).status_code == 200
    (node,) = client.get(f"/{session}/nodes").json()["nodes"]
    assert node["metadata"]["dummy_tokens"] is True
    assert client.post(f"/{session}/v1/chat/completions/render", json={"messages": [USER]}).status_code == 400


# -- who may do what ------------------------------------------------------------------------------------------------


def _setup_body(harness: HarnessServer, tokenizer_dir: Any) -> dict[str, Any]:
    return {"model_name": "new", "servers": [{"base_url": harness.base_url}], "tokenizer_name": str(tokenizer_dir)}


def test_strangers_cannot_redirect_traffic(client: TestClient, harness: HarnessServer, tiny_tokenizer_dir: Any) -> None:
    assert client.post("/setup", json=_setup_body(harness, tiny_tokenizer_dir)).status_code == 403
    local = TestClient(client.app, client=("127.0.0.1", 5000))
    forwarded = local.post(
        "/setup", json=_setup_body(harness, tiny_tokenizer_dir), headers={"X-Forwarded-For": "1.2.3.4"}
    )
    assert forwarded.status_code == 403
    session = _open(client)
    assert local.post("/setup", json=_setup_body(harness, tiny_tokenizer_dir)).json()["model_name"] == "new"
    assert client.get("/health").json()["model"] == "new"
    assert client.get(f"/{session}/nodes").status_code == 404


def test_a_token_guards_everything_but_the_sessions_themselves(harness: HarnessServer, tiny_tokenizer_dir: Any) -> None:
    app = create_app(_manager(harness), harness.tokenizer, "policy", token="secret")
    client, local = TestClient(app), TestClient(app, client=("127.0.0.1", 5000))
    assert client.post("/sessions/create", json={}).status_code == 401
    assert client.get("/sessions").status_code == 401
    assert client.get("/servers", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert local.post("/setup", json=_setup_body(harness, tiny_tokenizer_dir)).status_code == 403
    owner = {"Authorization": "Bearer secret"}
    session = client.post("/sessions/create", json={}, headers=owner).json()["uuid"]
    assert client.post(f"/{session}/v1/chat/completions", json={"messages": [USER]}).status_code == 200
    assert client.post("/setup", json=_setup_body(harness, tiny_tokenizer_dir), headers=owner).status_code == 200
    assert client.get("/health").status_code == 200


async def test_the_client_takes_the_token_from_the_environment(
    harness: HarnessServer, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _serving(create_app(_manager(harness), harness.tokenizer, "policy", token="secret"), free_port) as url:
        with pytest.raises(InferenceServerError, match="401"):
            await create_proxy_session(url)
        monkeypatch.setenv("ATROPOS_PROXY_TOKEN", "secret")
        async with await create_proxy_session(url) as session:
            await session.chat_completion(messages=[USER])
            assert len(session.get_state()["nodes"]) == 1
            session.reset()
            assert session.get_state()["nodes"] == []


def test_a_proxy_open_to_the_network_makes_up_a_token(
    harness: HarnessServer,
    tiny_tokenizer_dir: Any,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    served: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: served.update(app=app, **options))
    config = tmp_path / "servers.json"
    config.write_text(json.dumps(_setup_body(harness, tiny_tokenizer_dir)))
    main(["--config", str(config), "--port", "9111"])
    assert (served["host"], served["port"]) == ("0.0.0.0", 9111)
    assert "ATROPOS_PROXY_TOKEN=" in caplog.text
    assert TestClient(served["app"]).post("/sessions/create", json={}).status_code == 401
    main(["--config", str(config), "--host", "127.0.0.1"])
    assert TestClient(served["app"]).post("/sessions/create", json={}).status_code == 200


# -- expiry ---------------------------------------------------------------------------------------------------------


def test_sessions_expire_unless_in_use() -> None:
    clock, closed = [0.0], []
    store = SessionStore(10.0, on_close=lambda session: closed.append(session.uuid), now=lambda: clock[0])
    idle, busy = (
        store.add(SessionState(managed_server=None, model_name="m", tool_parser="hermes", base_url=None))
        for _ in range(2)
    )
    assert len({idle.uuid, busy.uuid}) == 2
    clock[0] = 8.0
    assert store.get(idle.uuid) is idle
    busy.num_in_flight = 1
    clock[0] = 17.0
    assert len(store) == 2
    clock[0] = 28.5
    assert store.get(idle.uuid) is None
    assert closed == [idle.uuid]
    busy.num_in_flight = 0
    assert store.all() == []
    assert store.close("none") is False


def test_an_expired_session_frees_its_server(harness: HarnessServer) -> None:
    app = create_app(_manager(harness), harness.tokenizer, session_ttl_s=0.05)
    client = TestClient(app)
    server = app.state.proxy.manager.servers[0]
    session = _open(client)
    assert server.num_open_sessions == 1
    time.sleep(0.1)
    assert client.get(f"/{session}/nodes").status_code == 404
    assert server.num_open_sessions == 0
