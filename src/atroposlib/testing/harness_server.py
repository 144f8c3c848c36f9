"""A real inference endpoint on loopback for tests and demos: deterministic replies, latency and failures on demand.

It speaks the OpenAI routes (with streaming), vLLM's ``/generate``, SGLang's ``/generate`` and TRL's ``/generate/``,
runs in a thread of its own, and remembers every request.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from atroposlib.envs.server_handling.server_harness import deterministic_logprob, deterministic_text

ReplyText = Callable[[str, int], str]
"""From the prompt (text, or ids as text) and the number of the choice to the reply."""


@dataclass(kw_only=True, slots=True)
class RecordedRequest:
    """One request as it arrived."""

    route: str
    body: dict[str, Any]
    headers: dict[str, str]


@dataclass(kw_only=True, slots=True)
class Failure:
    """What to answer instead of a reply; status 0 drops the connection."""

    status: int
    body: str = "injected failure"


@dataclass(kw_only=True)
class HarnessServer:
    """An OpenAI-compatible endpoint that costs nothing.

    Example::

        with HarnessServer(tokenizer=tokenizer) as server:
            config = APIServerConfig(base_url=server.base_url, server_type="vllm")
    """

    tokenizer: Any = None
    reply: ReplyText | str | Sequence[str] | None = None  # None: a deterministic text per prompt and choice
    latency_s: float = 0.0
    policy_versions: list[int] | None = None
    ignore_n: bool = False
    api_key: str | None = None  # required as bearer when set
    model_name: str = "harness"
    port: int = 0
    requests: list[RecordedRequest] = field(default_factory=list)
    num_in_flight: int = 0
    max_in_flight: int = 0
    num_health_checks: int = 0

    def __post_init__(self) -> None:
        self._failures: list[Failure] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._runner: web.AppRunner | None = None

    # -- control ----------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Root of the server, without /v1."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        """What goes into ``base_url`` of a server config."""
        return f"{self.url}/v1"

    def fail_next(self, count: int = 1, *, status: int = 500, body: str = "injected failure") -> None:
        """Answer the next ``count`` generation requests with an error status (0: drop the connection)."""
        self._failures.extend(Failure(status=status, body=body) for _ in range(count))

    def bodies(self, route: str) -> list[dict[str, Any]]:
        """The bodies sent to one route, in order."""
        return [request.body for request in self.requests if request.route == route]

    def start(self) -> HarnessServer:
        """Listen; a server that was stopped listens again on the same port."""
        ready = threading.Event()
        problem: list[BaseException] = []

        def serve() -> None:
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
            self._loop = loop
            try:
                loop.run_until_complete(self._listen())
            except BaseException as error:  # boundary: handed to the thread that called start()
                problem.append(error)
                ready.set()
                loop.close()
                return
            ready.set()
            loop.run_forever()
            loop.close()

        self._thread = threading.Thread(target=serve, daemon=True, name="harness-server")
        self._thread.start()
        if not ready.wait(60):
            raise TimeoutError("the loopback inference server did not start within 60 s")
        if problem:
            raise problem[0]
        return self

    def stop(self) -> None:
        """Close every connection and stop listening."""
        loop, runner = self._loop, self._runner
        if loop is None or runner is None:
            return
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        if self._thread is not None:
            self._thread.join(10)
        self._loop = self._runner = None

    def __enter__(self) -> HarnessServer:
        """Start."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._handle(self._chat))
        app.router.add_post("/v1/completions", self._handle(self._completion))
        app.router.add_post("/generate", self._handle(self._generate))
        app.router.add_post("/generate/", self._handle(self._generate_trl))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    # -- requests ---------------------------------------------------------------------------------------------------

    def _handle(self, answer: Callable[[dict[str, Any]], Any]) -> Callable[[web.Request], Any]:
        async def handler(request: web.Request) -> web.StreamResponse:
            self.num_in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
            try:
                body = json.loads(await request.read())
                self.requests.append(RecordedRequest(route=request.path, body=body, headers=dict(request.headers)))
                if self.latency_s:
                    await asyncio.sleep(self.latency_s)
                if self._failures:
                    return self._failed(request, self._failures.pop(0))
                if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
                    return web.json_response({"error": {"message": "wrong key"}}, status=401)
                reply = answer(body)
                if body.get("stream"):
                    return await self._streamed(request, reply)
                return web.json_response(reply)
            finally:
                self.num_in_flight -= 1

        return handler

    @staticmethod
    def _failed(request: web.Request, failure: Failure) -> web.Response:
        if failure.status == 0:
            if request.transport is not None:
                request.transport.close()
            return web.Response(status=500)
        return web.Response(status=failure.status, text=failure.body)

    async def _health(self, request: web.Request) -> web.Response:
        self.num_health_checks += 1
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        self.num_health_checks += 1
        return web.json_response({"object": "list", "data": [{"id": self.model_name, "object": "model"}]})

    # -- replies ----------------------------------------------------------------------------------------------------

    def _texts(self, prompt: str, n: int) -> list[str]:
        count = 1 if self.ignore_n else n
        if self.reply is None:
            return [deterministic_text(prompt, choice) for choice in range(count)]
        if isinstance(self.reply, str):
            return [self.reply] * count
        if callable(self.reply):
            return [self.reply(prompt, choice) for choice in range(count)]
        return [self.reply[choice % len(self.reply)] for choice in range(count)]

    def _head(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        head: dict[str, Any] = {
            "id": f"harness-{len(self.requests)}",
            "object": kind,
            "created": int(time.time()),
            "model": body.get("model", self.model_name),
        }
        if self.policy_versions is not None:
            head["policy_versions"] = self.policy_versions
        return head

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = "\n".join(f"{message['role']}:{message.get('content')}" for message in body["messages"])
        choices = [
            {"index": i, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            for i, text in enumerate(self._texts(prompt, int(body.get("n") or 1)))
        ]
        return {**self._head("chat.completion", body), "choices": choices, "usage": _usage(len(choices))}

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = [
            {"index": i, "finish_reason": "stop", "text": text}
            for i, text in enumerate(self._texts(str(body["prompt"]), int(body.get("n") or 1)))
        ]
        return {**self._head("text_completion", body), "choices": choices, "usage": _usage(len(choices))}

    def _generate(self, body: dict[str, Any]) -> Any:
        if "sampling_params" in body:
            return self._generate_sglang(body)
        prompt_ids = body["prompt"]["prompt_token_ids"]
        if body.get("prompt_logprobs") is not None:
            return self._scored(prompt_ids, int(body["prompt_logprobs"]))
        sampled = [
            self._sample(text, body.get("max_tokens"))
            for text in self._texts(self._prompt_text(prompt_ids), int(body.get("n") or 1))
        ]
        reply: dict[str, Any] = {
            "text": [self._decode(ids) for ids, _ in sampled],
            "prompt_token_ids": prompt_ids,
            "token_ids": [ids for ids, _ in sampled],
            "finish_reasons": [reason for _, reason in sampled],
            "logprobs": [
                [[{str(token): deterministic_logprob(token, i)}] for i, token in enumerate(ids)] for ids, _ in sampled
            ],
        }
        if self.policy_versions is not None:
            reply["policy_versions"] = [self.policy_versions for _ in sampled]
        return reply

    def _scored(self, prompt_ids: list[int], top: int) -> dict[str, Any]:
        scored: list[Any] = [None]
        for i, token in enumerate(prompt_ids[1:], start=1):
            scored.append({str(token + k): deterministic_logprob(token, i) - k for k in range(top)})
        return {"text": [""], "prompt_logprobs": scored, "logprobs": [[]], "finish_reasons": ["length"]}

    def _generate_sglang(self, body: dict[str, Any]) -> Any:
        sampling, prompt_ids = body["sampling_params"], body["input_ids"]
        if body.get("logprob_start_len") == 0:
            top = int(body["top_logprobs_num"])
            positions = [None] + [
                [[deterministic_logprob(token, i) - k, token + k, None] for k in range(top)]
                for i, token in enumerate(prompt_ids[1:], start=1)
            ]
            return {"text": "", "meta_info": {"input_top_logprobs": positions, "finish_reason": {"type": "length"}}}
        replies = []
        for text in self._texts(self._prompt_text(prompt_ids), int(sampling.get("n") or 1)):
            ids, reason = self._sample(text, sampling.get("max_new_tokens"))
            logprobs = [[deterministic_logprob(token, i), token, None] for i, token in enumerate(ids)]
            meta = {"output_token_logprobs": logprobs, "finish_reason": {"type": reason}}
            replies.append({"text": self._decode(ids), "meta_info": meta})
        return replies[0] if len(replies) == 1 else replies

    def _generate_trl(self, body: dict[str, Any]) -> dict[str, Any]:
        texts = [text for prompt in body["prompts"] for text in self._texts(prompt, int(body.get("n") or 1))]
        return {"completion_ids": [self._sample(text, body.get("max_tokens"))[0] for text in texts]}

    def _sample(self, text: str, limit: int | None) -> tuple[list[int], str]:
        ids = self._encode(text)
        end = getattr(self.tokenizer, "eos_token_id", None)
        if end is not None and (not ids or ids[-1] != end):
            ids = [*ids, end]
        return (ids[:limit], "length") if limit is not None and 0 < limit < len(ids) else (ids, "stop")

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if self.tokenizer else list(text.encode())

    def _decode(self, ids: list[int]) -> str:
        if self.tokenizer is not None:
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return bytes(ids).decode(errors="replace")

    def _prompt_text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids)) if self.tokenizer is not None else str(ids)

    @staticmethod
    async def _streamed(request: web.Request, reply: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        head = {key: value for key, value in reply.items() if key not in ("choices", "usage")}
        head["object"] = "chat.completion.chunk"
        for choice in reply["choices"]:
            words = choice["message"]["content"].split(" ")
            for i, word in enumerate(words):
                delta = {"content": word if i == 0 else f" {word}"}
                chunk = {**head, "choices": [{"index": choice["index"], "delta": delta, "finish_reason": None}]}
                await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            last = {**head, "choices": [{"index": choice["index"], "delta": {}, "finish_reason": "stop"}]}
            await response.write(f"data: {json.dumps(last)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def _usage(num_choices: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": num_choices, "total_tokens": 1 + num_choices}
