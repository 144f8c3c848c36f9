"""What stands in front of the routes: request bodies (limits, gzip and zstd), the token, refusals in one shape.

Everything here is plain ASGI. Decompression runs off the event loop and stops at the limit, so a small body cannot unfold
into a large one.
"""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec
import zstandard

from atroposlib import access

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

OFF_LOOP_BYTES = 128 * 1024
"""Work on bodies larger than this happens on a thread."""
PAGE_FILES = ("app.js", "charts.js", "reader.js", "style.css")
"""Of the live page; they hold no data."""
OPEN_PATHS = frozenset({"/healthz", "/live", *(f"/live/{name}" for name in PAGE_FILES)})
"""Answered without a token."""

_JSON_HEADER = (b"content-type", b"application/json")


class HttpError(Exception):
    """An answer other than success."""

    def __init__(self, status: int, detail: Any) -> None:
        super().__init__(str(detail))
        self.status, self.detail = status, detail


@dataclass(kw_only=True, slots=True, frozen=True)
class BodyLimits:
    """Largest request body, as sent and after decompression."""

    max_bytes: int = 512 * 2**20
    max_decoded_bytes: int = 2 * 2**30


def header(scope: Scope, name: bytes) -> bytes:
    """A request header (name in lower case), or b""."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""


def is_loopback(scope: Scope) -> bool:
    """Whether the request comes from this machine."""
    client = scope.get("client")
    # None: a unix socket or an in-process test client
    return not client or client[0] == "testclient" or access.is_loopback(client[0])


async def read_body(scope: Scope, receive: Receive, limits: BodyLimits) -> bytes:
    """The whole request body, decompressed; HttpError 400, 413 or 415."""
    declared = header(scope, b"content-length")
    if declared.isdigit() and int(declared) > limits.max_bytes:
        raise too_large(int(declared), limits.max_bytes)
    message = await receive()
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        chunks, size = [body], len(body)
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise HttpError(400, "the client closed the connection before the whole body was sent")
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limits.max_bytes:
                raise too_large(size, limits.max_bytes)
        body = b"".join(chunks)
    encoding = header(scope, b"content-encoding").lower().strip()
    if len(body) > OFF_LOOP_BYTES and encoding:
        return await asyncio.to_thread(decode_body, body, encoding, limits.max_decoded_bytes)
    return decode_body(body, encoding, limits.max_decoded_bytes)


def too_large(size: int, limit: int) -> HttpError:
    return HttpError(
        413, f"the body has {size} bytes or more and the limit is {limit}; send smaller groups or raise --max-body-mb"
    )


def decode_body(body: bytes, encoding: bytes, limit: int) -> bytes:
    """Undo the content encoding; stops at `limit` bytes."""
    if not body or encoding in (b"", b"identity"):
        return body
    if b"gzip" in encoding:
        return _gunzip(body, limit)
    if b"zstd" in encoding:
        return _unzstd(body, limit)
    raise HttpError(415, f"content-encoding {encoding.decode('latin-1')!r} is not known; use gzip, zstd or none")


def _gunzip(body: bytes, limit: int) -> bytes:
    parts: list[bytes] = []
    room = limit
    while body:
        inflate = zlib.decompressobj(wbits=31)
        try:
            data = inflate.decompress(body, room + 1)
        except zlib.error as error:
            raise HttpError(400, f"the body says it is gzip but cannot be decompressed: {error}") from None
        room -= len(data)
        if room < 0:
            raise too_large(limit + 1, limit)
        if not inflate.eof:
            raise HttpError(400, "the gzip body is cut off; send the whole of it")
        parts.append(data)
        body = inflate.unused_data.lstrip(b"\0")
    return b"".join(parts)


def _unzstd(body: bytes, limit: int) -> bytes:
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=True)
        data = reader.read(limit + 1)
        frame = zstandard.get_frame_parameters(body)
    except zstandard.ZstdError as error:
        raise HttpError(400, f"the body says it is zstd but cannot be decompressed: {error}") from None
    if len(data) > limit:
        raise too_large(limit + 1, limit)
    if (
        frame.content_size not in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR)
        and len(data) < frame.content_size
    ):
        raise HttpError(400, "the zstd body is cut off; send the whole of it")
    return bytes(data)


def encode_reply(body: bytes, encoding: bytes) -> bytes:
    """Compress a reply at the fastest level."""
    return zstandard.ZstdCompressor(level=1).compress(body) if encoding == b"zstd" else gzip.compress(body, 1)


async def send_json(
    send: Send, value: Any, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Answer with JSON."""
    await send_bytes(send, msgspec.json.encode(value), status, [_JSON_HEADER, *(headers or [])])


async def send_bytes(send: Send, body: bytes, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    """Answer with these bytes."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


class TokenMiddleware:
    """Lets only requests with the right bearer token through."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["path"] in OPEN_PATHS
            or access.bears_token(header(scope, b"authorization"), self._token)
        ):
            await self.app(scope, receive, send)
            return
        detail = (
            "a token is required: send the header 'Authorization: Bearer TOKEN' (clients of ours read ATROPOS_TOKEN)"
        )
        await send_json(send, {"detail": detail}, 401, [(b"www-authenticate", b"Bearer")])


class GZipRequestMiddleware:
    """Reads and decompresses request bodies (gzip, zstd; with limits) for the routes behind it."""

    def __init__(self, app: ASGIApp, limits: BodyLimits | None = None) -> None:
        self.app = app
        self.limits = limits or BodyLimits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        try:
            body = await read_body(scope, receive, self.limits)
        except HttpError as error:
            await send_json(send, {"detail": error.detail}, error.status)
            return
        kept = [(key, value) for key, value in scope["headers"] if key not in (b"content-encoding", b"content-length")]
        decoded = {**scope, "headers": [*kept, (b"content-length", str(len(body)).encode())]}
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(decoded, replay, send)
