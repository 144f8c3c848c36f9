"""Token-exact sessions behind an OpenAI-compatible endpoint: any agent that takes a base URL becomes an environment.

Each session has a URL of its own, ``{proxy}/{uuid}/v1``; what an agent samples there is recorded with its exact ids and
read back from ``/{uuid}/nodes``. Session ids cannot be guessed. With a token, creating and listing sessions needs it; the
backends can only be changed with the token, or from the same machine when there is none.
"""

from __future__ import annotations

import argparse
import json
import logging
import secrets
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse

from atroposlib.access import KEEP_ALIVE_S, bears_token, is_loopback
from atroposlib.envs.server_handling.managed_server import DummyManagedServer, ManagedServer
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.proxy_models import (
    ChatCompletionProxyRequest,
    ChatMessage,
    RenderResponse,
    SessionCreateRequest,
    SessionCreateResponse,
    SetupRequest,
)
from atroposlib.envs.server_handling.proxy_sessions import SessionState, SessionStore
from atroposlib.envs.server_handling.proxy_streaming import event_lines
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.server_handling.tool_formats import tool_format
from atroposlib.errors import AtroposError, ConfigError, InferenceServerError, InferenceUnavailableError

__all__ = [
    "ChatCompletionProxyRequest",
    "ChatMessage",
    "RenderResponse",
    "SessionCreateRequest",
    "SessionCreateResponse",
    "SessionState",
    "create_app",
    "main",
    "openai_error",
]

logger = logging.getLogger(__name__)

DEFAULT_SESSION_TTL_S = 3600.0


def openai_error(
    status_code: int, message: str, error_type: str = "invalid_request_error", code: str | None = None
) -> JSONResponse:
    """An error body as the OpenAI API sends it."""
    body = {"message": message, "type": error_type, "code": code or str(status_code)}
    return JSONResponse({"error": body}, status_code=status_code)


class Proxy:
    """The state behind the routes: backends, tokenizer, sessions."""

    def __init__(self, manager: ServerManager, tokenizer: Any, model_name: str, session_ttl_s: float) -> None:
        self.manager, self.tokenizer, self.model_name = manager, tokenizer, model_name
        self.sessions = SessionStore(session_ttl_s, on_close=self._closed)

    def open(self, request: SessionCreateRequest) -> SessionState:
        """A new session on the server asked for, or on the least loaded one."""
        try:
            tool_format(request.tool_parser)
        except ConfigError as error:
            raise HTTPException(400, str(error)) from error
        server = self._server(request.base_url)
        if isinstance(server, OpenAIServer):
            managed: Any = DummyManagedServer(server, tokenizer=self.tokenizer, track_tree=request.track_tree)
        else:
            managed = ManagedServer(
                server,
                tokenizer=self.tokenizer,
                track_tree=request.track_tree,
                tool_parser=request.tool_parser,
                preserve_think_blocks=request.preserve_think_blocks,
            )
        if hasattr(server, "num_open_sessions"):
            server.num_open_sessions += 1
        return self.sessions.add(
            SessionState(
                managed_server=managed,
                model_name=self.model_name,
                tool_parser=request.tool_parser,
                base_url=request.base_url or getattr(server.config, "base_url", None),
                track_tree=request.track_tree,
            )
        )

    def _server(self, base_url: str | None) -> Any:
        if base_url is None:
            return self.manager.pick_session_server()
        for server in self.manager.servers:
            if (getattr(server.config, "base_url", None) or "").rstrip("/") == base_url.rstrip("/"):
                return server
        raise HTTPException(404, f"no backend has the base_url {base_url!r}; see /servers")

    @staticmethod
    def _closed(session: SessionState) -> None:
        server = session.managed_server.server
        if hasattr(server, "num_open_sessions"):
            server.num_open_sessions -= 1
        session.managed_server.reset()

    def session(self, session_id: str) -> SessionState:
        """The session of a URL; 404 when it does not exist (any more)."""
        session = self.sessions.get(session_id)
        if session is None:
            raise HTTPException(404, f"session {session_id!r} does not exist or has expired")
        return session

    async def setup(self, request: SetupRequest) -> None:
        """Replace the backends; sessions on the old ones are closed."""
        from atroposlib.utils.tokenizers.loading import load_tokenizer

        manager = ServerManager(request.server_configs())
        tokenizer = load_tokenizer(request.tokenizer_name or request.model_name)
        for session in self.sessions.all():
            self.sessions.close(session.uuid)
        await self.manager.aclose()
        self.manager, self.tokenizer, self.model_name = manager, tokenizer, request.model_name


@contextmanager
def _in_flight(session: SessionState) -> Iterator[None]:
    session.num_in_flight += 1
    try:
        yield
    finally:
        session.num_in_flight -= 1
        session.last_accessed = time.time()


class Guard:
    """Who may do what: the token's owner everything, this machine everything when there is no token."""

    def __init__(self, token: str | None) -> None:
        self.token = token

    def _has_token(self, request: Request) -> bool:
        given = request.headers.get("authorization", "").encode("latin-1")
        return self.token is not None and bears_token(given, self.token.encode())

    def user(self, request: Request) -> None:
        """Creating and listing sessions."""
        if self.token is not None and not self._has_token(request):
            raise HTTPException(401, "this proxy needs its token as bearer (Authorization header)")

    def admin(self, request: Request) -> None:
        """Changing the backends."""
        is_local = request.client is not None and is_loopback(request.client.host)
        if self._has_token(request) or (self.token is None and is_local and "x-forwarded-for" not in request.headers):
            return
        raise HTTPException(403, "backends can only be changed with the proxy's token, or from the same machine")


def create_app(
    server_manager: ServerManager,
    tokenizer: Any,
    model_name: str = "unknown",
    *,
    token: str | None = None,
    session_ttl_s: float = DEFAULT_SESSION_TTL_S,
) -> FastAPI:
    """The proxy over ``server_manager``.

    Example: ``uvicorn.run(create_app(manager, tokenizer, "my-model", token="secret"), port=9100)``
    """
    app = FastAPI(title="Managed sessions", docs_url=None, redoc_url=None, openapi_url=None)
    proxy, guard = Proxy(server_manager, tokenizer, model_name, session_ttl_s), Guard(token)
    app.state.proxy = proxy
    _add_error_handlers(app)
    _add_admin_routes(app, proxy, guard)
    _add_session_routes(app, proxy)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return openai_error(error.status_code, str(error.detail))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return openai_error(400, f"the request is not valid: {error.errors()}")

    @app.exception_handler(AtroposError)
    async def failed(request: Request, error: AtroposError) -> JSONResponse:
        if isinstance(error, InferenceUnavailableError):
            return openai_error(503, str(error), "server_error")
        status = error.status if isinstance(error, InferenceServerError) else None
        if status is not None and 400 <= status < 500:
            return openai_error(status, str(error))
        return openai_error(500, str(error), "server_error")

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        return openai_error(500, f"{type(error).__name__}: {error}", "server_error")


def _add_admin_routes(app: FastAPI, proxy: Proxy, guard: Guard) -> None:
    user, admin = [Depends(guard.user)], [Depends(guard.admin)]

    @app.get("/health")
    async def health() -> dict[str, Any]:
        healthy = [server for server in proxy.manager.servers if getattr(server, "server_healthy", True)]
        return {
            "status": "ok",
            "model": proxy.model_name,
            "sessions": len(proxy.sessions),
            "servers": len(proxy.manager.servers),
            "healthy_servers": len(healthy),
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return _model_list(proxy.model_name)

    @app.post("/setup", dependencies=admin)
    async def setup(request: SetupRequest) -> dict[str, Any]:
        await proxy.setup(request)
        return {"status": "ok", "model_name": proxy.model_name, "servers": len(proxy.manager.servers)}

    @app.get("/servers", dependencies=user)
    async def servers() -> dict[str, Any]:
        return {"servers": [_server_entry(index, server) for index, server in enumerate(proxy.manager.servers)]}

    @app.post("/sessions/create", dependencies=user)
    async def create_session(request: SessionCreateRequest) -> SessionCreateResponse:
        session = proxy.open(request)
        return SessionCreateResponse(
            uuid=session.uuid,
            model_name=session.model_name,
            tool_parser=session.tool_parser,
            base_url=session.base_url,
            created_at=session.created_at,
        )

    @app.get("/sessions", dependencies=user)
    async def list_sessions() -> dict[str, Any]:
        names = ("uuid", "model_name", "tool_parser", "created_at", "last_accessed")
        return {
            "sessions": [
                {**{name: getattr(session, name) for name in names}, "num_nodes": session.num_nodes()}
                for session in proxy.sessions.all()
            ]
        }


def _add_session_routes(app: FastAPI, proxy: Proxy) -> None:
    @app.post("/{session_id}/v1/chat/completions", response_model=None)
    async def chat(session_id: str, request: ChatCompletionProxyRequest) -> JSONResponse | StreamingResponse:
        session = proxy.session(session_id)
        if not request.messages:
            raise HTTPException(400, "messages must not be empty")
        with _in_flight(session):
            reply = await _chat_reply(session, request)
        if not request.stream:
            return JSONResponse(reply)
        include_usage = bool((request.stream_options or {}).get("include_usage"))
        return StreamingResponse(event_lines(reply, include_usage), media_type="text/event-stream")

    @app.post("/{session_id}/v1/completions")
    async def completion(session_id: str, request: Request) -> JSONResponse:
        session = proxy.session(session_id)
        fields = await _completion_fields(request)
        with _in_flight(session):
            reply = await session.managed_server.completion(**fields)
        return JSONResponse({**reply.model_dump(), "id": f"cmpl-{uuid.uuid4().hex[:12]}"})

    @app.post("/{session_id}/v1/chat/completions/render")
    async def render(session_id: str, request: ChatCompletionProxyRequest) -> RenderResponse:
        managed = proxy.session(session_id).managed_server
        if isinstance(managed, DummyManagedServer):
            raise HTTPException(400, "this backend gives no token ids, so there is no exact prompt to show")
        text = managed._convert_messages_to_prompt(request.plain_messages(), tools=request.tools)
        ids = list(proxy.tokenizer.encode(text, add_special_tokens=False))
        return RenderResponse(prompt_text=text, token_ids=ids, num_tokens=len(ids))

    @app.get("/{session_id}/v1/models")
    async def session_models(session_id: str) -> dict[str, Any]:
        return _model_list(proxy.session(session_id).model_name)

    @app.get("/{session_id}/nodes")
    async def nodes(session_id: str) -> dict[str, Any]:
        return {"nodes": [node.model_dump() for node in proxy.session(session_id).nodes()]}

    @app.delete("/{session_id}")
    async def delete(session_id: str) -> dict[str, Any]:
        if not proxy.sessions.close(session_id):
            raise HTTPException(404, f"session {session_id!r} does not exist or has expired")
        return {"status": "deleted", "uuid": session_id}


async def _completion_fields(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict) or not isinstance(body.get("prompt"), str):
        raise HTTPException(400, "the body must be an object whose prompt is a text")
    return {key: value for key, value in body.items() if key not in ("model", "stream")}


async def _chat_reply(session: SessionState, request: ChatCompletionProxyRequest) -> dict[str, Any]:
    managed = session.managed_server
    nodes: list[Any] = []
    if isinstance(managed, ManagedServer):
        completion, nodes = await managed.chat_completion_with_nodes(**request.call_fields())
    else:
        completion = await managed.chat_completion(**request.call_fields())
    reply: dict[str, Any] = completion.model_dump()
    reply |= {"id": f"chatcmpl-{uuid.uuid4().hex[:12]}", "model": session.model_name}
    versions: set[int] = set()
    for choice, node in zip(reply["choices"], nodes, strict=False):
        num_prompt = reply["usage"]["prompt_tokens"]
        versions.update((node.metadata or {}).get("policy_versions", []))
        if request.return_token_ids:
            choice["token_ids"] = node.tokens[num_prompt:]
            reply["prompt_token_ids"] = node.tokens[:num_prompt]
        if request.logprobs:
            choice["logprobs"] = {"content": _logprob_entries(managed.tokenizer, node, num_prompt)}
    if versions:
        reply["policy_versions"] = sorted(versions)
    return reply


def _logprob_entries(tokenizer: Any, node: Any, num_prompt: int) -> list[dict[str, Any]]:
    entries = []
    for token, logprob in zip(node.tokens[num_prompt:], node.logprobs[num_prompt:], strict=True):
        text = str(tokenizer.decode([token]))
        entries.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return entries


def _model_list(model_name: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": model_name, "object": "model", "created": 0, "owned_by": "atropos"}]}


def _server_entry(index: int, server: Any) -> dict[str, Any]:
    names = ("base_url", "model_name", "server_type")
    entry = {name: getattr(server.config, name, None) for name in names}
    return {"index": index, "healthy": bool(getattr(server, "server_healthy", True)), **entry}


def main(argv: list[str] | None = None) -> None:
    """``python -m atroposlib.envs.server_handling.managed_server_proxy --config servers.json``."""
    parser = argparse.ArgumentParser(description="OpenAI-compatible proxy that records exact tokens per session")
    parser.add_argument("--config", required=True, help="JSON file: model_name, servers, tokenizer_name")
    parser.add_argument("--port", type=int, default=9100)
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument(
        "--token", default=None, help="bearer token for creating sessions; made up when not on loopback"
    )
    parser.add_argument(
        "--session-ttl", type=float, default=DEFAULT_SESSION_TTL_S, help="seconds a session lives unused"
    )
    arguments = parser.parse_args(argv)

    import uvicorn

    from atroposlib.utils.tokenizers.loading import load_tokenizer

    logging.basicConfig(level=logging.INFO)
    request = SetupRequest(**json.loads(Path(arguments.config).read_text()))
    token = arguments.token
    if token is None and not is_loopback(arguments.host):
        token = secrets.token_urlsafe(24)
        logger.warning("listening on %s, so sessions need a token: ATROPOS_PROXY_TOKEN=%s", arguments.host, token)
    app = create_app(
        ServerManager(request.server_configs()),
        load_tokenizer(request.tokenizer_name or request.model_name),
        request.model_name,
        token=token,
        session_ttl_s=arguments.session_ttl,
    )
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S)


if __name__ == "__main__":
    main()
