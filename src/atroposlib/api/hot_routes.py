"""The routes every environment and trainer calls all the time, as plain ASGI in front of the framework.

`/scored_data`, `/scored_data_list`, `/batch`, `/status`, `/status-env`. Bodies are validated once into compact bytes and spliced into
batches as they are; nothing is parsed into Python lists or serialised again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec

from atroposlib.api import binary
from atroposlib.api.journal import Done
from atroposlib.api.middleware import (
    OFF_LOOP_BYTES,
    ASGIApp,
    BodyLimits,
    HttpError,
    Receive,
    Scope,
    Send,
    decode_body,
    encode_reply,
    header,
    is_loopback,
    read_body,
    send_bytes,
    send_json,
)
from atroposlib.api.schemas import BINARY_TYPE
from atroposlib.api.service import Delivery, RolloutService
from atroposlib.api.wire import WireError, WireGroup, parse_json_groups
from atroposlib.errors import JournalError

logger = logging.getLogger(__name__)

Handler = Callable[[Scope, Receive, Send], Awaitable[int]]

_BINARY = BINARY_TYPE.encode()
_CHUNK = 16 * 1024
_JSON_ON_LOOP, _BINARY_ON_LOOP = 3 * 2**19, 32 * 2**20
"""Bodies up to this size are read in at most a few milliseconds, on the loop: on a thread the interpreter lock would cost more."""
HOT_PATHS = frozenset({"/scored_data", "/scored_data_list", "/batch", "/status", "/status-env"})
_QUIET_PATHS = HOT_PATHS | {
    "/healthz",
    "/metrics",
    "/heartbeat",
    "/ack",
    "/commit",
    "/report",
}  # called so often that a line per request is noise
REFUSALS = (WireError, HttpError, JournalError)
NOT_REGISTERED = "Trainer not registered: POST /register first"


class _EnvIdentifier(msgspec.Struct):
    env_id: int


_decode_env = msgspec.json.Decoder(_EnvIdentifier, strict=False).decode


class HotRoutes:
    """Serves the hot routes and passes everything else on. Counts and logs every request."""

    def __init__(
        self,
        app: ASGIApp,
        service: RolloutService,
        limits: BodyLimits,
        *,
        compress: bool | None = None,
        requests: dict[tuple[str, int], list[float]] | None = None,
    ) -> None:
        self.app = app
        self.service = service
        self.limits = limits
        self.compress = compress
        """Compress replies for clients that accept it: True always, False never, None when they are on another machine."""
        self.requests = requests if requests is not None else {}
        """(path, status) -> [count, seconds]; shared with `/metrics`."""
        self.routes: dict[tuple[str, str], Handler] = {
            ("POST", "/scored_data"): self.scored_data,
            ("POST", "/scored_data_list"): self.scored_data,
            ("GET", "/batch"): self.batch,
            ("GET", "/status"): self.status,
            ("GET", "/status-env"): self.status_env,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        handler = self.routes.get((scope["method"], scope["path"]), self.pass_on)
        try:
            status = await handler(scope, receive, send)
        except REFUSALS as error:
            status, detail = _refusal(error)
            await send_json(send, {"detail": detail}, status)
        # A route of the framework is named by its pattern: there are as many paths as there are groups to look at.
        route = scope.get("route")
        path = scope["path"] if route is None else route.path
        self.record(scope["method"], path, status, time.perf_counter() - started)

    def record(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count and log a request that was answered."""
        key = (path if status != 404 else "other", status)
        total = self.requests.get(key)
        if total is None:
            total = self.requests[key] = [0, 0.0]
        total[0] += 1
        total[1] += seconds
        level = logging.WARNING if status >= 400 else logging.DEBUG if path in _QUIET_PATHS else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(level, "%s %s -> %d (%.1f ms)", method, path, status, seconds * 1e3)

    async def pass_on(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Any other route: the framework answers; we only see the status go by."""
        status = 500

        async def watch(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        await self.app(scope, receive, watch)
        return status

    # ---- data in ------------------------------------------------------------------------------------------------------

    async def scored_data(self, scope: Scope, receive: Receive, send: Send) -> int:
        body = await read_body(scope, receive, self.limits)
        status, reply = await self.take_groups(scope["path"], body, header(scope, b"content-type"), b"")
        await send_bytes(send, reply, status, [(b"content-type", b"application/json")])
        return status

    async def take_groups(self, path: str, body: bytes, content_type: bytes, encoding: bytes) -> tuple[int, bytes]:
        """Validate and store what was posted; status and body of the answer."""
        try:
            if encoding:
                body = await self._decode(bytes(body), encoding)
            if path == "/scored_data":
                return 200, answer_one((await self._submit(await self._parse(body, content_type, many=False)))[0])
            return 200, _answer_many(await self._submit(await self._parse(body, content_type, many=True)))
        except REFUSALS as error:
            return refusal_reply(error)

    def is_quick(self, body: bytes, content_type: bytes) -> bool:
        """Whether reading this body takes at most a few milliseconds, so that it may happen on the loop."""
        return len(body) <= (_BINARY_ON_LOOP if content_type.startswith(_BINARY) else _JSON_ON_LOOP)

    def stays_in_place(self, path: str, content_type: bytes, encoding: bytes) -> bool:
        """Whether such a body is kept byte for byte, so that any buffer will do and none has to be copied."""
        return path == "/scored_data" and not encoding and content_type.startswith(_BINARY)

    def take_one(self, body: bytes, content_type: bytes, answered: Done) -> int | None:
        """Validate and store one group here and now: the answer, or None: `answered` will be called with it; one of REFUSALS."""
        parse = binary.parse_binary_groups if content_type.startswith(_BINARY) else parse_json_groups
        env_id: int | None = None
        try:
            group = parse(body, many=False)[0]
            env_id = group.env_id
            return self.service.submit_one(group, answered)
        except WireError as error:
            self.service.rejected(env_id, str(error))
            raise

    async def _decode(self, body: bytes, encoding: bytes) -> bytes:
        if len(body) <= OFF_LOOP_BYTES:
            return decode_body(body, encoding, self.limits.max_decoded_bytes)
        return await asyncio.to_thread(decode_body, body, encoding, self.limits.max_decoded_bytes)

    async def _parse(self, body: bytes, content_type: bytes, *, many: bool) -> list[WireGroup]:
        parse = binary.parse_binary_groups if content_type.startswith(_BINARY) else parse_json_groups
        try:
            if not self.is_quick(body, content_type):
                return await asyncio.to_thread(parse, body, many=many)
            return parse(body, many=many)
        except WireError as error:
            self.service.rejected(None, str(error))
            raise

    async def _submit(self, groups: list[WireGroup]) -> list[int]:
        try:
            return await self.service.submit(groups)
        except WireError as error:
            self.service.rejected(groups[0].env_id, str(error))
            raise

    # ---- batches out --------------------------------------------------------------------------------------------------

    async def batch(self, scope: Scope, receive: Receive, send: Send) -> int:
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        ours = query.get("client", [""])[0] == "ours"
        after = _number(query, "after") if ours else None
        as_binary = _BINARY in header(scope, b"accept")
        await receive()  # the (empty) request body; the next message is the client going away
        if self.service.store.registration is None:
            reply = {"status": "error", "message": NOT_REGISTERED, "batch": []}
            await send_json(send, reply)
            return 200
        delivery = await self.service.next_batch(plain=not ours, after=after)
        if delivery is None:
            if as_binary:
                await send_bytes(send, msgspec.msgpack.encode({"batch": None}), 200, [(b"content-type", _BINARY)])
            else:
                await send_bytes(send, b'{"batch":null}', 200, [(b"content-type", b"application/json")])
            return 200
        arrived = False
        try:
            parts = await self._batch_parts(delivery, ours=ours, as_binary=as_binary)
            arrived = await self._send_parts(scope, receive, send, parts, _BINARY if as_binary else b"application/json")
        finally:
            if not arrived:
                self.service.undelivered(delivery.batch, delivery.lease)
        if not arrived:
            return 499
        self._watch(scope, delivery)  # before anything else can happen on the connection
        await self.service.delivered(delivery)
        return 200

    def _watch(self, scope: Scope, delivery: Delivery) -> None:
        """The client's machine has the reply; a reset before anything else happens here says that the client did not read it."""
        connection = scope.get("atropos.connection")
        if connection is None:
            return

        # Not the delivery with its groups: a connection may live long, and be garbage longer.
        batch, lease = delivery.batch, delivery.lease

        def lost(error: Exception | None) -> None:
            if isinstance(error, ConnectionResetError | BrokenPipeError):
                self.service.undelivered(batch, lease)

        connection.on_lost = lost

    async def _batch_parts(self, delivery: Delivery, *, ours: bool, as_binary: bool) -> list[bytes]:
        ids = [group.group_id for group in delivery.groups]
        parts: list[bytes] = []
        if as_binary:
            parts.append(binary.batch_header(delivery.batch.seq, ids, len(delivery.groups)))
            for group, payload in zip(delivery.groups, delivery.payloads, strict=True):
                if not group.binary:
                    parts.append(binary.bin_head(len(payload)))
                parts.append(payload)
            return parts
        payloads = delivery.payloads
        if any(group.binary for group in delivery.groups):
            payloads = await asyncio.to_thread(_all_json, delivery)
        parts.append(b'{"batch":[')
        for index, payload in enumerate(payloads):
            if index:
                parts.append(b",")
            parts.append(payload)
        tail = msgspec.json.encode({"batch_seq": delivery.batch.seq, "group_ids": ids})[1:] if ours else b"}"
        parts.append(b"]," + tail if ours else b"]" + tail)
        return parts

    async def _send_parts(
        self, scope: Scope, receive: Receive, send: Send, parts: list[bytes], content_type: bytes
    ) -> bool:
        """Send a large reply; False when the client went away before all of it was out."""
        headers = [(b"content-type", content_type)]
        encoding = self._reply_encoding(scope)
        if encoding:
            parts = [await asyncio.to_thread(lambda: encode_reply(b"".join(parts), encoding))]
            headers.append((b"content-encoding", encoding))
        headers.append((b"content-length", str(sum(map(len, parts))).encode()))
        gone = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for chunk in _chunks(parts):
                if gone.done():
                    return False
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
        connection = scope.get("atropos.connection")
        return connection is None or bool(await connection.arrived())

    def _reply_encoding(self, scope: Scope) -> bytes:
        if self.compress is False or (self.compress is None and is_loopback(scope)):
            return b""
        accepted = header(scope, b"accept-encoding").lower()
        return b"zstd" if b"zstd" in accepted else b"gzip" if b"gzip" in accepted else b""

    # ---- status -------------------------------------------------------------------------------------------------------

    async def status(self, scope: Scope, receive: Receive, send: Send) -> int:
        await send_json(send, self.service.store.status())
        return 200

    async def status_env(self, scope: Scope, receive: Receive, send: Send) -> int:
        query = scope.get("query_string", b"")
        if query:
            env_id = _number(parse_qs(query.decode("latin-1")), "env_id")
        else:
            env_id = _env_id(await read_body(scope, receive, self.limits))
        if env_id is None:
            raise WireError(
                "env_id is missing; send it as a query parameter or in a JSON body", "env_id", kind="missing"
            )
        store = self.service.store
        env = store.envs.touch(env_id)
        if env is None:
            raise HttpError(404, f"environment {env_id} is not known here; register it with POST /register-env")
        await send_json(send, store.env_status(env))
        return 200


def _refusal(error: Exception) -> tuple[int, Any]:
    if isinstance(error, WireError | HttpError):
        return error.status, error.detail
    return 507, str(error)


def refusal_reply(error: BaseException) -> tuple[int, bytes]:
    """Status and body of the answer to a request that is refused."""
    if not isinstance(error, REFUSALS):
        logger.error("storing a group failed", exc_info=error)
        return 500, b'{"detail":"Internal Server Error"}'
    status, detail = _refusal(error)
    return status, msgspec.json.encode({"detail": detail})


def answer_one(answer: int) -> bytes:
    return b'{"status":"received"}' if answer < 0 else b'{"status":"buffered","buffer_size":%d}' % answer


def _answer_many(answers: list[int]) -> bytes:
    reply: dict[str, Any] = {"status": "received", "groups_processed": len(answers)}
    buffered = [answer for answer in answers if answer >= 0]
    if buffered:
        reply |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]}
    return msgspec.json.encode(reply)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _chunks(parts: list[bytes]) -> list[bytes]:
    """Join small pieces so that each send is worth it."""
    chunks: list[bytes] = []
    small: list[bytes] = []
    size = 0
    for part in parts:
        if len(part) >= _CHUNK:
            if small:
                chunks.append(b"".join(small))
                small, size = [], 0
            chunks.append(part)
            continue
        small.append(part)
        size += len(part)
        if size >= _CHUNK:
            chunks.append(b"".join(small))
            small, size = [], 0
    if small:
        chunks.append(b"".join(small))
    return chunks


def _all_json(delivery: Delivery) -> list[bytes]:
    return [
        binary.to_json(payload) if group.binary else payload
        for group, payload in zip(delivery.groups, delivery.payloads, strict=True)
    ]


def _number(query: dict[str, list[str]], name: str) -> int | None:
    text = query.get(name, [""])[0]
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise WireError(f"{name} is {text!r}; it must be a whole number", name, kind="int_parsing") from None


def _env_id(body: bytes) -> int | None:
    if not body:
        return None
    try:
        return _decode_env(body).env_id
    except msgspec.MsgspecError as error:
        raise WireError(f'the body must be {{"env_id": number}}: {error}', "env_id") from None
