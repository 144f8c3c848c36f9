"""The policy server: OpenAI routes and a token-exact ``/generate`` over an :class:`EngineThread`.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models
    POST /generate              token ids in, token ids and log-probs out
    POST /v1/score              log-probs of given tokens
    GET  /health                GET  /metrics (Prometheus)

Every reply carries the policy version(s) that made it. ``logprobs_mode`` says which log-prob a reply reports: at the sampling
temperature (default: what a trainer's ratio needs), of the very distribution sampled from, or at temperature 1. The served
model answers to any model name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from atlaslib.engine import openai_protocol as wire
from atlaslib.engine.engine_thread import EngineThread
from atlaslib.engine.openai_protocol import LogprobsMode, ParsedRequest, RequestError
from atlaslib.engine.openai_replies import ReplyWriter
from atlaslib.engine.sequence import Completion
from atlaslib.errors import AtroposError, ConfigError
from atroposlib.access import TokenGate, check_bind

logger = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16  # what the official API takes for plain completions


@dataclass(kw_only=True, slots=True)
class ServerMetrics:
    """Counters behind ``/metrics``."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # (route, status)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    aborted: int = 0
    num_open: int = 0  # samples asked for and not yet answered


class PolicyService:
    """What the routes do, apart from HTTP: check, admit, sample, answer."""

    def __init__(
        self,
        engine_thread: EngineThread,
        tokenizer: Any,
        *,
        model_name: str,
        max_open: int,
        logprobs_mode: LogprobsMode,
        tool_format: str,
    ) -> None:
        self.thread, self.tokenizer, self.model_name = engine_thread, tokenizer, model_name
        self.max_open, self.logprobs_mode = max_open, logprobs_mode
        self.metrics = ServerMetrics()
        self.replies = ReplyWriter(tokenizer, model_name, tool_format)

    @property
    def engine(self) -> Any:
        return self.thread.engine

    # -- requests ------------------------------------------------------------------------------------------------

    def parse_chat(self, body: dict[str, Any]) -> ParsedRequest:
        wire.check_fields(body, extra=wire.CHAT_FIELDS)
        messages = wire.check_messages(body.get("messages"))
        form = body.get("response_format")
        if form not in (None, {"type": "text"}):
            raise RequestError(
                f"response_format is {form!r:.80}; this server gives plain text only", param="response_format"
            )
        prompt = self._render(messages, body)
        top = wire.chat_top_logprobs(body)
        room = max(1, self.engine.max_model_len - len(prompt))
        return ParsedRequest(
            params=wire.sampling_params(body, default_max_tokens=room, top_logprobs=top),
            prompt_ids=[prompt],
            logprobs=bool(body.get("logprobs")),
            tools=body.get("tools") if body.get("tool_choice") != "none" else None,
            tool_choice=body.get("tool_choice"),
            **wire.shared_settings(body, self.logprobs_mode),
        )

    def parse_completion(self, body: dict[str, Any]) -> ParsedRequest:
        wire.check_fields(body, extra=wire.COMPLETION_FIELDS)
        if body.get("suffix") or body.get("best_of") not in (None, 1, body.get("n")):
            raise RequestError(
                "suffix and best_of are not supported; leave them out",
                param="suffix" if body.get("suffix") else "best_of",
            )
        asked = body.get("logprobs")
        if asked is not None and (
            isinstance(asked, bool) or not isinstance(asked, int) or not 0 <= asked <= wire.MAX_TOP_LOGPROBS
        ):
            raise RequestError(
                f"logprobs is {asked!r}; give a whole number from 0 to {wire.MAX_TOP_LOGPROBS}", param="logprobs"
            )
        params = wire.sampling_params(body, default_max_tokens=DEFAULT_COMPLETION_TOKENS, top_logprobs=asked)
        if body.get("echo") and asked is not None and params.prompt_logprobs is None:
            params.prompt_logprobs = asked
        return ParsedRequest(
            params=params,
            prompt_ids=self._prompts(body.get("prompt")),
            logprobs=asked is not None,
            echo=bool(body.get("echo")),
            **wire.shared_settings(body, self.logprobs_mode),
        )

    def parse_generate(self, body: dict[str, Any]) -> ParsedRequest:
        wire.check_fields(body, extra=wire.GENERATE_FIELDS)
        prompt = body.get("prompt")
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt_token_ids")
        asked = body.get("logprobs")
        params = wire.sampling_params(body, default_max_tokens=DEFAULT_COMPLETION_TOKENS, top_logprobs=asked)
        settings = wire.shared_settings(body, self.logprobs_mode)
        return ParsedRequest(params=params, prompt_ids=self._prompts(prompt), logprobs=asked is not None, **settings)

    def _render(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> list[int]:
        extra = body.get("chat_template_kwargs") or {}
        if body.get("tools") and body.get("tool_choice") != "none":
            extra = {**extra, "tools": body["tools"]}
        open_turn = body.get("add_generation_prompt")
        if not self.tokenizer.chat_template:
            raise RequestError("this model's tokenizer has no chat template; use /v1/completions", param="messages")
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True if open_turn is None else bool(open_turn), **extra
            )
        except (
            Exception
        ) as error:  # boundary: chat templates are programs of the model's author and raise what they like
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _prompts(self, prompt: Any) -> list[list[int]]:
        ids = wire.token_ids_of(prompt)
        if ids is not None:
            return [ids]
        if isinstance(prompt, str) and prompt:
            return [list(self.tokenizer(prompt)["input_ids"])]
        if isinstance(prompt, list) and prompt:
            return [self._prompts(one)[0] for one in prompt]
        raise RequestError(f"prompt is {prompt!r:.80}; give text, token ids, or a list of either", param="prompt")

    # -- sampling ------------------------------------------------------------------------------------------------

    def submit(
        self, parsed: ParsedRequest, on_tokens: Callable[[int, Completion], None] | None = None
    ) -> list[Future[list[Completion]]]:
        """Hand every prompt to the engine; refuses with 429 when more is open than the server should hold."""
        wanted = parsed.params.n * len(parsed.prompt_ids)
        if self.metrics.num_open + wanted > self.max_open:
            raise RequestError(
                f"{self.metrics.num_open} samples are open and {wanted} more would pass the limit of {self.max_open}; try again shortly",
                status=429,
            )
        futures: list[Future[list[Completion]]] = []
        try:
            for number, ids in enumerate(parsed.prompt_ids):
                futures.append(
                    self.thread.submit(ids, parsed.params, on_tokens=_shifted(on_tokens, number * parsed.params.n))
                )
        except AtroposError as error:
            self.abort(futures)
            raise RequestError(str(error), param="prompt") from error
        self.metrics.num_open += wanted
        self.metrics.prompt_tokens += sum(map(len, parsed.prompt_ids))
        return futures

    def done(self, parsed: ParsedRequest, completions: list[Completion]) -> None:
        self.metrics.num_open -= parsed.params.n * len(parsed.prompt_ids)
        self.metrics.generated_tokens += sum(len(completion.token_ids) for completion in completions)

    def abort(self, futures: list[Future[list[Completion]]]) -> None:
        for future in futures:
            if future.cancel():
                self.metrics.aborted += 1

    async def sample(self, request: Request, parsed: ParsedRequest) -> list[Completion]:
        """All completions of a request; a client that goes away takes its samples with it."""
        futures = self.submit(parsed)
        completions: list[Completion] = []
        gone = asyncio.create_task(_disconnected(request))
        work = asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
        work.add_done_callback(_look_at_result)
        try:
            waited: set[asyncio.Future[Any]] = {gone, work}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise RequestError("the client went away", status=499)
            completions = [completion for group in work.result() for completion in group]
            return completions
        finally:
            gone.cancel()
            self.abort(futures)
            work.cancel()
            self.done(parsed, completions)

    async def stream(self, parsed: ParsedRequest, *, chat: bool) -> AsyncIterator[str]:
        """Server-sent events of one streamed reply."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[int, Completion] | None] = asyncio.Queue()

        def put(item: tuple[int, Completion] | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        futures = self.submit(parsed, on_tokens=lambda index, part: put((index, part)))
        return self._events(parsed, futures, queue, put, chat)

    async def _events(
        self,
        parsed: ParsedRequest,
        futures: list[Future[list[Completion]]],
        queue: asyncio.Queue[tuple[int, Completion] | None],
        put: Callable[[tuple[int, Completion] | None], None],
        chat: bool,
    ) -> AsyncIterator[str]:
        completions: list[Completion] = []
        work = asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
        work.add_done_callback(_look_at_result)
        work.add_done_callback(lambda _: put(None))
        writer = self.replies.stream(parsed, chat=chat)
        try:
            for event in writer.start():
                yield _sse(event)
            while (item := await queue.get()) is not None:
                for event in writer.part(*item):
                    yield _sse(event)
            completions = [completion for group in await work for completion in group]
            for event in writer.end(completions):
                yield _sse(event)
            yield "data: [DONE]\n\n"
        except AtroposError as error:
            yield _sse(wire.error_body(str(error), kind="server_error"))
        finally:
            self.abort(futures)
            work.cancel()
            self.done(parsed, completions)


def create_app(
    engine_thread: EngineThread,
    tokenizer: Any,
    model_name: str = "default",
    *,
    token: str | None = None,
    max_open: int = 4096,
    logprobs_mode: LogprobsMode = "temperature",
    tool_format: str = "hermes",
) -> FastAPI:
    """The HTTP face of a running engine. ``max_open`` bounds the samples waiting or running; beyond it a request gets 429."""
    service = PolicyService(
        engine_thread,
        tokenizer,
        model_name=model_name,
        max_open=max_open,
        logprobs_mode=logprobs_mode,
        tool_format=tool_format,
    )
    app = FastAPI(title="Policy server", version="1")
    app.state.service = service
    app.add_middleware(TokenGate, token=token, open_paths=("/health",))
    app.add_exception_handler(RequestError, _refuse)
    app.add_exception_handler(AtroposError, _failed)

    @app.middleware("http")
    async def count(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        service.metrics.requests[request.url.path, response.status_code] += 1
        return response

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """OpenAI chat completions: streaming, n, log-probs, tools, seeds."""
        parsed = service.parse_chat(await _body(request))
        if parsed.stream:
            return _event_stream(await service.stream(parsed, chat=True))
        completions = await service.sample(request, parsed)
        return _reply(service.replies.chat(parsed, completions), completions)

    @app.post("/v1/completions")
    async def completions_route(request: Request) -> Response:
        """OpenAI completions: text or token ids, echo, log-probs, streaming."""
        parsed = service.parse_completion(await _body(request))
        if parsed.stream:
            return _event_stream(await service.stream(parsed, chat=False))
        completions = await service.sample(request, parsed)
        return _reply(service.replies.completion(parsed, completions), completions)

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        """Token ids in, token ids, log-probs and policy versions out."""
        parsed = service.parse_generate(await _body(request))
        completions = await service.sample(request, parsed)
        return _reply(service.replies.generate(parsed, completions), completions)

    @app.post("/v1/score")
    async def score(request: Request) -> Response:
        """Log-probs of given tokens."""
        sequences, temperature = _score_request(await _body(request))
        try:
            futures = [engine_thread.submit_score(ids, temperature=temperature) for ids in sequences]
        except AtroposError as error:
            raise RequestError(str(error), param="token_ids") from error
        scored = await asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
        logprobs = [completions[0].prompt_logprobs for completions in scored]
        return JSONResponse(
            {"object": "score", "model": model_name, "logprobs": logprobs, "policy_version": service.engine.version}
        )

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The served model and its longest sequence."""
        card = {
            "id": model_name,
            "object": "model",
            "created": 0,
            "owned_by": "atropos",
            "max_model_len": service.engine.max_model_len,
        }
        return {"object": "list", "data": [card]}

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

    return app


def prometheus(service: PolicyService) -> str:
    """The counters in Prometheus' text form."""
    metrics = service.metrics
    gauges = {
        "policy_version": service.engine.version,
        "open_samples": metrics.num_open,
        "prompt_tokens_total": metrics.prompt_tokens,
        "generated_tokens_total": metrics.generated_tokens,
        "aborted_total": metrics.aborted,
        "running_samples": len(service.engine.scheduler.running),
        "waiting_samples": len(service.engine.scheduler.waiting),
        "sampled_tokens_total": service.engine.num_tokens,
    }
    lines = [f"atropos_engine_{name} {value}" for name, value in gauges.items()]
    lines += [
        f'atropos_engine_requests_total{{route="{route}",status="{status}"}} {count}'
        for (route, status), count in sorted(metrics.requests.items())
    ]
    return "\n".join(lines) + "\n"


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
    app = create_app(engine_thread, tokenizer, model_name, token=token, **options)
    server = uvicorn.Server(
        uvicorn.Config(app, host=host, port=port, log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
    )
    thread = threading.Thread(target=server.run, name="policy-server", daemon=True)
    thread.start()
    deadline = time.monotonic() + start_timeout_s
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise ConfigError(f"the policy server did not start on {host}:{port}; is the port taken?")
        time.sleep(0.01)
    bound = server.servers[0].sockets[0].getsockname()[1]
    return ServerHandle(f"http://{host}:{bound}", server, thread)


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
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
    temperature = body.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature <= 100:
        raise RequestError(f"temperature is {temperature!r}; give a number above 0", param="temperature")
    return sequences, float(temperature)


def _look_at_result(work: asyncio.Future[Any]) -> None:
    """A client that left asks nobody about its failure; asyncio wants it asked."""
    if not work.cancelled():
        work.exception()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _shifted(
    on_tokens: Callable[[int, Completion], None] | None, offset: int
) -> Callable[[int, Completion], None] | None:
    if on_tokens is None or offset == 0:
        return on_tokens
    return lambda index, part: on_tokens(index + offset, part)


def _reply(body: dict[str, Any], completions: list[Completion]) -> JSONResponse:
    versions = wire.distinct_versions(completions)
    headers = {"x-policy-version": str(versions[-1])} if versions else {}
    return JSONResponse(body, headers=headers)


def _event_stream(events: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})


def _sse(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
    headers = {"retry-after": "1"} if error.status == 429 else {}
    return JSONResponse(
        wire.error_body(str(error), kind=kind, param=error.param), status_code=error.status, headers=headers
    )


async def _failed(_: Request, error: Exception) -> Response:
    logger.error("a request failed in the engine: %s", error)
    return JSONResponse(wire.error_body(str(error), kind="server_error"), status_code=503)
