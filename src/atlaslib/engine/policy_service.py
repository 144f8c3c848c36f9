"""What the policy server does, apart from HTTP: check, admit, sample, stream, count."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from fastapi import Request

from atlaslib.engine import openai_protocol as wire
from atlaslib.engine.engine_thread import EngineThread
from atlaslib.engine.openai_protocol import LogprobsMode, ParsedRequest, RequestError
from atlaslib.engine.openai_replies import ReplyWriter
from atlaslib.engine.sequence import Completion
from atlaslib.errors import AtroposError, ConfigError, EngineInputError
from atroposlib.envs.server_handling.chat_prompts import render_chat

DEFAULT_COMPLETION_TOKENS = 16  # what the official API takes for plain completions
MAX_RETRY_AFTER_S = 60


@dataclass(kw_only=True, slots=True)
class ServerMetrics:
    """Counters behind ``/metrics``."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # (route, status)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    aborted: int = 0
    num_open: int = 0  # samples asked for and not yet answered
    body_bytes: int = 0  # of the bodies of requests that are being read or answered


class PolicyService:
    """One engine thread, one tokenizer, and the counters."""

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
        if max_open < 1:
            raise ConfigError(f"max_open is {max_open}; the server must be allowed to hold at least 1 sample")
        self.thread, self.tokenizer, self.model_name = engine_thread, tokenizer, model_name
        self.max_open, self.logprobs_mode = max_open, logprobs_mode
        self.metrics = ServerMetrics()
        self._ended: deque[tuple[float, int]] = deque(maxlen=64)  # (when, samples); the first only says since when
        self.replies = ReplyWriter(tokenizer, model_name, tool_format)

    @property
    def engine(self) -> Any:
        return self.thread.engine

    @cached_property
    def _longest_text(self) -> int:
        """Characters no text can exceed that fits into the model: every token as long as the longest there is."""
        return int(self.engine.max_model_len * max(map(len, self.tokenizer.get_vocab())))

    # -- requests ------------------------------------------------------------------------------------------------

    def parse_chat(self, body: dict[str, Any]) -> ParsedRequest:
        wire.check_fields(body, extra=wire.CHAT_FIELDS)
        messages, tools = wire.check_messages(body.get("messages")), wire.check_tools(body)
        form = body.get("response_format")
        if form not in (None, {"type": "text"}):
            raise RequestError(
                f"response_format is {form!r:.80}; this server gives plain text only", param="response_format"
            )
        prompt = self._render(messages, tools, body)
        top = wire.chat_top_logprobs(body)
        room = max(1, self.engine.max_model_len - len(prompt))
        return ParsedRequest(
            params=wire.sampling_params(body, default_max_tokens=room, top_logprobs=top),
            prompt_ids=[prompt],
            logprobs=wire.switch(body, "logprobs"),
            tools=tools,
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
        echo = wire.switch(body, "echo")
        if echo and asked is not None:
            params.prompt_logprobs = max(asked, params.prompt_logprobs or 0)
        return ParsedRequest(
            params=params,
            prompt_ids=self._prompts(body.get("prompt")),
            logprobs=asked is not None,
            echo=echo,
            **wire.shared_settings(body, self.logprobs_mode),
        )

    def parse_generate(self, body: dict[str, Any]) -> ParsedRequest:
        wire.check_fields(body, extra=wire.GENERATE_FIELDS)
        prompt, asked = body.get("prompt"), body.get("logprobs")
        if isinstance(prompt, dict):
            ids = wire.token_ids_of(prompt.get("prompt_token_ids"))
            if ids is None or len(prompt) > 1:
                raise RequestError(f"prompt is {prompt!r:.80}; give prompt_token_ids, a list of ids", param="prompt")
            prompt = ids
        params = wire.sampling_params(body, default_max_tokens=DEFAULT_COMPLETION_TOKENS, top_logprobs=asked)
        settings = wire.shared_settings(body, self.logprobs_mode)
        if settings["stream"]:
            raise RequestError("/generate does not stream; use /v1/completions with return_token_ids", param="stream")
        return ParsedRequest(params=params, prompt_ids=self._prompts(prompt), logprobs=asked is not None, **settings)

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, body: dict[str, Any]
    ) -> list[int]:
        extra = body.get("chat_template_kwargs") or {}
        if not isinstance(extra, dict):
            raise RequestError(f"chat_template_kwargs is {extra!r:.80}; give an object", param="chat_template_kwargs")
        open_turn = wire.switch(body, "add_generation_prompt", default=True)
        if not self.tokenizer.chat_template:
            raise RequestError("this model's tokenizer has no chat template; use /v1/completions", param="messages")
        try:
            text = render_chat(
                self.tokenizer,
                messages,
                add_generation_prompt=open_turn,
                tools=tools,
                keep_thinking=False,
                template_kwargs=extra,
            )
        except Exception as error:  # a chat template is a program of the model's author and raises what it likes
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        return self._tokens(text, "messages", add_special_tokens=False)

    def _tokens(self, text: str, field: str, **options: Any) -> list[int]:
        """Token ids of a text; one that cannot fit is refused before time and memory go into it."""
        if len(text) > self._longest_text:
            raise RequestError(
                f"the prompt has {len(text)} characters, which never fit into max_model_len={self.engine.max_model_len} tokens",
                param=field,
            )
        return list(self.tokenizer(text, **options)["input_ids"])

    def _prompts(self, prompt: Any) -> list[list[int]]:
        several = isinstance(prompt, list) and bool(prompt) and wire.token_ids_of(prompt) is None
        return [self._prompt(one) for one in (prompt if several else [prompt])]

    def _prompt(self, prompt: Any) -> list[int]:
        ids = wire.token_ids_of(prompt)
        if ids is None and isinstance(prompt, str) and prompt:
            ids = self._tokens(prompt, "prompt")
        if ids is None:
            raise RequestError(f"prompt is {prompt!r:.80}; give text, token ids, or a list of either", param="prompt")
        return ids

    def versions_of(self, completions: list[Completion], before: int) -> list[int]:
        """The versions that made the tokens; without tokens those that may have read the prompt since `before`."""
        return wire.distinct_versions(completions) or sorted({before, self.engine.version})

    # -- sampling ------------------------------------------------------------------------------------------------

    def submit(
        self, parsed: ParsedRequest, on_tokens: Callable[[int, Completion], None] | None = None
    ) -> list[Future[list[Completion]]]:
        """Hand every prompt to the engine; refuses with 429 when more is open than the server should hold."""
        wanted = parsed.params.n * len(parsed.prompt_ids)
        calls = (
            partial(self.thread.submit, ids, parsed.params, on_tokens=_shifted(on_tokens, number * parsed.params.n))
            for number, ids in enumerate(parsed.prompt_ids)
        )
        futures = self._hand_over(calls, wanted, "n" if parsed.params.n > self.max_open else "prompt")
        self.metrics.prompt_tokens += sum(map(len, parsed.prompt_ids))
        return futures

    def _hand_over(
        self, calls: Iterable[Callable[[], Future[list[Completion]]]], wanted: int, field: str
    ) -> list[Future[list[Completion]]]:
        """All of them or none; `wanted` samples are open until `done`."""
        if wanted > self.max_open:
            raise RequestError(
                f"{wanted} samples are more than the {self.max_open} this server holds; ask in smaller parts",
                param=field,
            )
        if self.metrics.num_open + wanted > self.max_open:
            raise RequestError(
                f"{self.metrics.num_open} samples are open and {wanted} more would pass the limit of {self.max_open}; try again shortly",
                status=429,
                retry_after_s=self._seconds_until(self.metrics.num_open + wanted - self.max_open),
            )
        futures: list[Future[list[Completion]]] = []
        try:
            for call in calls:
                futures.append(call())
        except EngineInputError as error:
            self.abort(futures)
            raise RequestError(str(error), param=wire.blamed_field(str(error), default=field)) from error
        if not self.metrics.num_open:  # idle time says nothing about how fast samples end
            self._ended.clear()
            self._ended.append((time.monotonic(), 0))
        self.metrics.num_open += wanted
        return futures

    def _seconds_until(self, missing: int) -> int:
        """When `missing` samples more will have ended, at the rate of the last requests; 1 while none has."""
        (since, _), *later = self._ended
        ended = sum(count for _, count in later)
        seconds = missing * (time.monotonic() - since) / ended if ended else 1
        return min(max(1, math.ceil(seconds)), MAX_RETRY_AFTER_S)

    def done(self, wanted: int, completions: list[Completion]) -> None:
        self.metrics.num_open -= wanted
        self._ended.append((time.monotonic(), wanted))
        self.metrics.generated_tokens += sum(len(completion.token_ids) for completion in completions)

    def abort(self, futures: list[Future[list[Completion]]]) -> None:
        for future in futures:
            if future.cancel():
                self.metrics.aborted += 1

    async def sample(self, request: Request, parsed: ParsedRequest) -> list[Completion]:
        """All completions of a request."""
        return await self._gather(request, self.submit(parsed), parsed.params.n * len(parsed.prompt_ids))

    async def score(self, request: Request, sequences: list[list[int]], temperature: float) -> list[Completion]:
        """Completions without tokens whose `prompt_logprobs` are the answer."""
        calls = (partial(self.thread.submit_score, ids, temperature=temperature) for ids in sequences)
        futures = self._hand_over(calls, len(sequences), "token_ids")
        return await self._gather(request, futures, len(sequences))

    async def _gather(self, request: Request, futures: list[Future[list[Completion]]], wanted: int) -> list[Completion]:
        """Wait for all; a client that goes away takes its samples with it."""
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
            self.done(wanted, completions)

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
        before = self.engine.version
        try:
            for event in writer.start():
                yield _sse(event)
            while (item := await queue.get()) is not None:
                for event in writer.part(*item):
                    yield _sse(event)
            completions = [completion for group in await work for completion in group]
            for event in writer.end(completions, self.versions_of(completions, before)):
                yield _sse(event)
            yield "data: [DONE]\n\n"
        except AtroposError as error:
            yield _sse(wire.error_body(str(error), kind="server_error"))
        finally:
            self.abort(futures)
            work.cancel()
            self.done(parsed.params.n * len(parsed.prompt_ids), completions)


def prometheus(service: PolicyService) -> str:
    """The counters in Prometheus' text form."""
    metrics = service.metrics
    values = {
        "policy_version": service.engine.version,
        "open_samples": metrics.num_open,
        "open_body_bytes": metrics.body_bytes,
        "prompt_tokens_total": metrics.prompt_tokens,
        "generated_tokens_total": metrics.generated_tokens,
        "aborted_total": metrics.aborted,
        "running_samples": len(service.engine.scheduler.running),
        "waiting_samples": len(service.engine.scheduler.waiting),
        "sampled_tokens_total": service.engine.num_tokens,
    }
    lines = []
    for name, value in values.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE atropos_engine_{name} {kind}", f"atropos_engine_{name} {value}"]
    lines.append("# TYPE atropos_engine_requests_total counter")
    lines += [
        f'atropos_engine_requests_total{{route="{route}",status="{status}"}} {count}'
        for (route, status), count in sorted(metrics.requests.items())
    ]
    return "\n".join(lines) + "\n"


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


def _sse(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
