"""The policy server: OpenAI routes and a token-exact ``/generate`` over an :class:`EngineThread`.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models
    POST /generate              token ids in, token ids and log-probs out
    POST /v1/score              log-probs of given tokens
    GET  /health                GET  /metrics (Prometheus)

Every reply carries the policy version(s) that made it. ``logprobs_mode`` says which log-prob a reply reports: at the sampling
temperature (default: what a trainer's ratio needs), of the very distribution sampled from, or at temperature 1. Alternatives
(``top_logprobs``) are always those of the distribution sampled from. The served model answers to any model name. Every error,
also of an unknown path, is OpenAI's ``{"error": {...}}``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from atlaslib.engine import openai_protocol as wire
from atlaslib.engine.config import MIN_TEMPERATURE
from atlaslib.engine.engine_thread import EngineThread
from atlaslib.engine.openai_protocol import LogprobsMode, ParsedRequest, RequestError
from atlaslib.engine.policy_service import PolicyService, ServerMetrics, prometheus
from atlaslib.engine.sequence import Completion
from atlaslib.errors import AtroposError, ConfigError, EngineStoppedError, nearest_name
from atroposlib.access import KEEP_ALIVE_S, Receive, Scope, Send, TokenGate, check_bind

logger = logging.getLogger(__name__)

LARGE_BODY = 32 * 2**10
"""Bytes: about 10 ms of tokenizing."""
MAX_BODY = 128 * 2**20
"""Bytes: 4096 prompts of 4096 token ids, many times the longest single prompt."""
Parsed = TypeVar("Parsed")


def create_app(
    engine_thread: EngineThread,
    tokenizer: Any,
    model_name: str = "default",
    *,
    token: str | None = None,
    max_open: int = 4096,
    logprobs_mode: LogprobsMode = "temperature",
    tool_format: str = "hermes",
    max_body_bytes: int = MAX_BODY,
) -> FastAPI:
    """The HTTP face of a running engine.

    ``max_open`` bounds the samples waiting or running; beyond it a request gets 429, and one of more bytes than
    ``max_body_bytes`` gets 413. The bodies of all open requests together may have twice as many; beyond that, 429.
    """
    service = PolicyService(
        engine_thread,
        tokenizer,
        model_name=model_name,
        max_open=max_open,
        logprobs_mode=logprobs_mode,
        tool_format=tool_format,
    )
    app = FastAPI(title="Policy server", version="1")
    app.state.service, app.state.max_body_bytes = service, max_body_bytes
    app.add_middleware(TokenGate, token=token, open_paths=("/health",))
    app.add_middleware(Bookkeeper, metrics=service.metrics)
    app.add_exception_handler(RequestError, _refuse)
    app.add_exception_handler(AtroposError, _failed)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_exception_handler(Exception, _crashed)

    async def answer(
        request: Request,
        parsed: ParsedRequest,
        write: Callable[[ParsedRequest, list[Completion], list[int]], dict[str, Any]],
    ) -> Response:
        before = service.engine.version
        completions = await service.sample(request, parsed)
        versions = service.versions_of(completions, before)
        return _versioned(write(parsed, completions, versions), versions)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """OpenAI chat completions: streaming, n, log-probs, tools, seeds."""
        parsed = await _parsed(request, service.parse_chat)
        if parsed.stream:
            return _event_stream(await service.stream(parsed, chat=True))
        return await answer(request, parsed, service.replies.chat)

    @app.post("/v1/completions")
    async def completions_route(request: Request) -> Response:
        """OpenAI completions: text or token ids, echo, log-probs, streaming."""
        parsed = await _parsed(request, service.parse_completion)
        if parsed.stream:
            return _event_stream(await service.stream(parsed, chat=False))
        return await answer(request, parsed, service.replies.completion)

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        """Token ids in, token ids, log-probs and policy versions out."""
        parsed = await _parsed(request, service.parse_generate)
        return await answer(request, parsed, service.replies.generate)

    @app.post("/v1/score")
    async def score(request: Request) -> Response:
        """Log-probs of given tokens."""
        sequences, temperature = await _parsed(request, _score_request)
        before = service.engine.version
        scored = await service.score(request, sequences, temperature)
        versions = service.versions_of(scored, before)
        body = {"object": "score", "model": model_name, "logprobs": [done.prompt_logprobs for done in scored]}
        return _versioned(body | {"policy_version": versions[-1], "policy_versions": versions}, versions)

    _add_information(app, service, engine_thread, model_name)
    app.state.methods = {route.path: sorted(route.methods or ()) for route in app.routes if isinstance(route, APIRoute)}
    return app


def _add_information(app: FastAPI, service: PolicyService, engine_thread: EngineThread, model_name: str) -> None:
    """The routes that only tell."""

    def card() -> dict[str, Any]:
        length = service.engine.max_model_len
        return {"id": model_name, "object": "model", "created": 0, "owned_by": "atropos", "max_model_len": length}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The served model and its longest sequence, as a list of one."""
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The served model by its name."""
        if name == model_name:
            return JSONResponse(card())
        message = f"there is no model {name[:200]!r} here; this server has {model_name!r}"
        error = wire.error_body(message, kind="invalid_request_error", param="model", code="model_not_found")
        return JSONResponse(error, status_code=404)

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine runs, with the policy version."""
        alive = engine_thread.alive
        state = {
            "status": "ok" if alive else "the engine's loop has stopped",
            "model": model_name,
            "policy_version": service.engine.version,
        }
        return JSONResponse(state, status_code=200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counters in Prometheus' text form."""
        return PlainTextResponse(prometheus(service), media_type="text/plain; version=0.0.4")


@dataclass(slots=True)
class ServerHandle:
    """A policy server running in a thread of this process."""

    url: str
    server: uvicorn.Server
    thread: threading.Thread

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop answering; the engine's thread is its owner's to stop."""
        self.server.should_exit = True
        self.thread.join(timeout_s)


def serve_in_thread(
    engine_thread: EngineThread,
    tokenizer: Any,
    model_name: str = "default",
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    insecure: bool = False,
    start_timeout_s: float = 30.0,
    **options: Any,
) -> ServerHandle:
    """Serve beside the trainer; ``port`` 0 takes a free one. Returns when the server answers."""
    check_bind(host, token=token, insecure=insecure)
    if not 0 <= port <= 65535:
        raise ConfigError(f"the policy server's port is {port}; it must be from 0 (any free one) to 65535")
    app = create_app(engine_thread, tokenizer, model_name, token=token, **options)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=3,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="policy-server", daemon=True)
    thread.start()
    deadline = time.monotonic() + start_timeout_s
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise ConfigError(f"the policy server did not start on {host}:{port}; is the port taken?")
        time.sleep(0.01)
    bound = server.servers[0].sockets[0].getsockname()[1]
    return ServerHandle(f"http://{host}:{bound}", server, thread)


class Bookkeeper:
    """ASGI middleware: counts requests by route and status, and gives back what an ended request's body took.

    Paths that are no route of ours count as one, and a request that raises counts as 500.
    """

    def __init__(self, app: Any, *, metrics: ServerMetrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in scope["app"].state.methods else "other"
        statuses: list[int] = []
        scope["body_bytes"] = 0

        async def noted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                self.metrics.requests[route, message["status"]] += 1
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            self.metrics.body_bytes -= scope["body_bytes"]
            if not statuses:
                self.metrics.requests[route, 500] += 1


async def _parsed(request: Request, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
    """The body, read by `parse`: a large one in a thread, since tokenizing it would hold up every other reply."""
    try:
        raw = await _body(request, request.app.state.max_body_bytes, request.app.state.service.metrics)
    except ClientDisconnect as error:
        raise RequestError("the client went away", status=499) from error
    if len(raw) < LARGE_BODY:
        return parse(_json_object(raw))
    return await asyncio.to_thread(lambda: parse(_json_object(raw)))


async def _body(request: Request, limit: int, metrics: ServerMetrics) -> bytearray:
    """No more of it is held than `limit`, and of all bodies no more than twice that; what follows a refusal is dropped."""
    declared = request.headers.get("content-length", "")
    raw, size = bytearray(), int(declared) if declared.isdecimal() else 0
    _check_size(size, size, limit, metrics)
    async for part in request.stream():
        _check_size(len(raw) + len(part), len(part), limit, metrics)
        raw += part
        request.scope["body_bytes"] += len(part)
        metrics.body_bytes += len(part)
    return raw


def _check_size(size: int, new: int, limit: int, metrics: ServerMetrics) -> None:
    """Refuse a body of `size` bytes that is too large, and one whose `new` bytes have no room beside the other bodies."""
    if size > limit:
        raise RequestError(
            f"the body has {size} bytes or more and the limit is {limit}; ask in smaller parts", status=413
        )
    if metrics.body_bytes + new > 2 * limit:
        raise RequestError(
            f"the bodies of open requests have {metrics.body_bytes} bytes and {new} more would pass the limit of {2 * limit}; "
            "try again shortly",
            status=429,
        )


def _json_object(raw: bytearray) -> dict[str, Any]:
    try:
        body = json.loads(raw)
        if b"\\u" in raw:  # an escape may be half a character, which is no text
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = "half a character (a lone surrogate)" if isinstance(error, UnicodeEncodeError) else error
        raise RequestError(f"the body is not JSON: {reason}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _score_request(body: dict[str, Any]) -> tuple[list[list[int]], float]:
    for name in body:
        if name not in {"token_ids", "temperature", "model"}:
            raise RequestError(f"unknown field {name!r}; known: token_ids, temperature, model", param=name)
    given = body.get("token_ids")
    sequences = [given] if wire.token_ids_of(given) else given
    if not isinstance(sequences, list) or not sequences or any(wire.token_ids_of(ids) is None for ids in sequences):
        raise RequestError("token_ids must be a list of token ids, or a list of such lists", param="token_ids")
    temperature = 1.0 if body.get("temperature") is None else body["temperature"]
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not number or not MIN_TEMPERATURE <= temperature <= 100:
        raise RequestError(
            f"temperature is {temperature!r:.80}; give a number from {MIN_TEMPERATURE:g} to 100", param="temperature"
        )
    return sequences, float(temperature)


def _versioned(body: dict[str, Any], versions: list[int]) -> JSONResponse:
    return JSONResponse(body, headers={"x-policy-version": str(versions[-1])})


def _event_stream(events: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
    headers = {"retry-after": str(error.retry_after_s)} if error.status == 429 else {}
    return JSONResponse(
        wire.error_body(str(error), kind=kind, param=error.param), status_code=error.status, headers=headers
    )


async def _no_such_route(request: Request, error: Exception) -> Response:
    """What the framework refuses by itself: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    path, methods = request.url.path, request.app.state.methods
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message, code = f"{request.method} does not go with {path}; use {allowed}", "method_not_supported"
    else:
        short = {name.removeprefix("/v1"): name for name in methods}
        guess = short.get(nearest_name(path.removeprefix("/v1"), short) or "")
        known = ", ".join(f"{' or '.join(names)} {route}" for route, names in methods.items())
        hint = f"did you mean {guess}? There is" if guess else "there is"
        message, code = f"unknown path {path:.200}; {hint} {known}", "unknown_url"
    body = wire.error_body(message, kind="invalid_request_error", code=code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _failed(_: Request, error: Exception) -> Response:
    told = logging.INFO if isinstance(error, EngineStoppedError) else logging.ERROR  # why it stopped was told there
    logger.log(told, "a request failed in the engine: %s", error)
    return JSONResponse(wire.error_body(str(error), kind="server_error"), status_code=503)


async def _crashed(_: Request, error: Exception) -> Response:
    """A mistake of ours; the server's log has its traceback."""
    message = f"the server failed on this request ({type(error).__name__}); its log says where"
    return JSONResponse(wire.error_body(message, kind="server_error"), status_code=500)
