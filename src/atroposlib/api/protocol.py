"""The connection: uvicorn's HTTP protocol with a short cut for posted groups, and with word of connections that break.

A well-formed `POST /scored_data` or `/scored_data_list` with a plain content length is read straight into one buffer and answered with one
write. Everything else, and anything unusual about such a request, is uvicorn's own business.

`on_lost` callbacks tell a route that the connection broke after it had answered: a reply that was still on its way is lost.
"""

from __future__ import annotations

import asyncio
import fcntl
import re
import struct
import termios
import time
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from atroposlib.access import bears_token
from atroposlib.api.hot_routes import HotRoutes, answer_one, refusal_reply
from atroposlib.api.slabs import Window, slabs

_BEGINNING = b"POST /scored_data"
_HEAD = re.compile(rb"POST (/scored_data|/scored_data_list) HTTP/1\.1\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,18})\r\n", re.IGNORECASE)
_END = b"\r\n\r\n"
_KEPT_HEADS = 256
_SCRATCH = 64 * 1024
_MAX_HEAD = 8192
_UNUSUAL = (b"transfer-encoding", b"expect", b"upgrade", b"origin")


class _Head(NamedTuple):
    """What the head of a request says, but for the length."""

    path: str
    content_type: bytes
    encoding: bytes
    in_place: bool
    """One group in the binary form, as it is: it can stay where it was received."""


class _Post:
    """A posted group that is being received."""

    __slots__ = ("body", "filled", "head", "started")

    def __init__(self, head: _Head, length: int, started: float) -> None:
        self.head, self.started = head, started
        self.body: bytearray | memoryview = slabs.take(length) if head.in_place else bytearray(length)
        self.filled = 0


class RolloutProtocol(HttpToolsProtocol):
    """One connection of a rollout server. Use `protocol_for` to bind it to the routes."""

    hot: HotRoutes
    token: bytes | None = None
    window: Window
    """Where what comes is read into, but for the rest of a long body; one for all connections, as it is used up at once."""
    heads: ClassVar[dict[bytes, _Head]] = {}
    """Heads seen before, without the digits of the content length: clients send the same one again and again."""
    _common: ClassVar[tuple[list[tuple[bytes, bytes]], bytes]] = ([], b"")
    """uvicorn's default headers (a new list every second, for the date) and their bytes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._post: _Post | None = None
        self._answering = False
        self._taken: tuple[_Head, float]
        self._in_message = False
        self._backlog = b""
        self._closing = False
        self._last_used = 0.0
        self._lost = self._was_reset = False
        self._unsent_at_end = 0
        self.on_lost: Callable[[Exception | None], None] | None = None

    # ---- receiving ----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes | memoryview) -> None:
        if self._answering:  # a further request before the answer to the last one
            self._backlog += bytes(data)
            self.flow.pause_reading()
            return
        if self._post is not None:
            self._fill(self._post, data, 0)
            return
        if (
            data[: len(_BEGINNING)] == _BEGINNING
            and not self._in_message
            and (self.cycle is None or self.cycle.response_complete)
        ):
            head, length, offset = self._read_head(bytes(data[:_MAX_HEAD]))
            if head is not None:
                self.on_lost = None
                self._begin(head, length, data, offset)
                return
        self.on_lost = None
        super().data_received(bytes(data))

    def on_message_begin(self) -> None:
        super().on_message_begin()  # type: ignore[no-untyped-call]
        self._in_message = True  # what comes is this request's, even if it was answered before its end
        self.scope["atropos.connection"] = self  # type: ignore[typeddict-unknown-key]

    def on_message_complete(self) -> None:
        super().on_message_complete()  # type: ignore[no-untyped-call]
        self._in_message = False

    def _read_head(self, data: bytes) -> tuple[_Head | None, int, int]:
        """Head, length and beginning of the body of the request in these bytes; no head when it is not for the short cut."""
        end = data.find(_END)
        found = _LENGTH.search(data, 0, end + 2) if end >= 0 else None
        if found is None:
            return None, 0, 0
        length = int(found[1])
        if not 0 < length <= self.hot.limits.max_bytes:
            return None, 0, 0
        key = data[: found.start(1)] + data[found.end(1) : end]
        head = self.heads.get(key)
        if head is None:
            head = self._parse_head(data[:end])
            if head is None:
                return None, 0, 0
            if len(self.heads) >= _KEPT_HEADS:
                self.heads.clear()
            self.heads[key] = head
        return head, length, end + len(_END)

    def _parse_head(self, data: bytes) -> _Head | None:
        match = _HEAD.match(data)
        if match is None:
            return None
        headers: dict[bytes, bytes] = {}
        for line in data[match.end() :].split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() in headers or name[:1] in (b" ", b"\t"):  # said twice, or folded: not for the short cut
                return None
            headers[name.lower()] = value.strip()
        if headers.get(b"connection", b"keep-alive").lower() != b"keep-alive":
            return None
        if any(name in headers for name in _UNUSUAL):
            return None
        if self.token is not None and not bears_token(headers.get(b"authorization", b""), self.token):
            return None
        path, content_type = match[1].decode(), headers.get(b"content-type", b"")
        encoding = headers.get(b"content-encoding", b"").lower()
        return _Head(path, content_type, encoding, self.hot.stays_in_place(path, content_type, encoding))

    def _begin(self, head: _Head, length: int, data: bytes | memoryview, offset: int) -> None:
        """A request begins in these bytes; most often it ends there too."""
        started = time.perf_counter()
        if len(data) - offset == length:
            self._answering = True
            self._take(head, started, self._whole(head, data, offset))
        else:
            self._post = post = _Post(head, length, started)
            self._fill(post, data, offset)

    def _whole(self, head: _Head, data: bytes | memoryview, offset: int) -> bytes:
        """A body that came in one piece, where it may stay."""
        if not head.in_place:
            return bytes(data[offset:])
        read_here = isinstance(data, memoryview)  # into the window; a backlog is bytes
        body = self.window.keep(offset, len(data)) if read_here else slabs.join([memoryview(data)[offset:]])
        return cast(bytes, body)  # nobody writes to it any more

    def _fill(self, post: _Post, data: bytes | memoryview, offset: int) -> None:
        room = len(post.body) - post.filled
        given = len(data) - offset
        if given <= room:
            post.body[post.filled : post.filled + given] = memoryview(data)[offset:] if offset else data
            post.filled += given
        else:
            post.body[post.filled :] = memoryview(data)[offset : offset + room]
            post.filled += room
            self._backlog = bytes(data[offset + room :])
        self._look(post)

    def _look(self, post: _Post) -> None:
        if post.filled == len(post.body):
            self._post = None
            self._answering = True
            self._take(post.head, post.started, cast(bytes, post.body))  # nobody writes to it any more

    def room(self) -> memoryview | None:
        """Where the bytes to come belong, when they are a body's; never empty."""
        post = self._post
        return None if post is None else memoryview(post.body)[post.filled :]

    def filled(self, count: int) -> None:
        """So many bytes were put into `room`."""
        post = self._post
        if post is not None:
            post.filled += count
            self._look(post)

    # ---- answering ----------------------------------------------------------------------------------------------------

    def _take(self, head: _Head, started: float, whole: bytes) -> None:
        """A whole body is here: store it at once where that is quick, else in a task."""
        if head.path == "/scored_data" and not head.encoding and self.hot.is_quick(whole, head.content_type):
            self._taken = head, started
            try:
                answer = self.hot.take_one(whole, head.content_type, self._stored)
            except Exception as error:  # the boundary of a request: whatever went wrong, the client hears of it
                self._stored(None, error)
                return
            if answer is not None:
                self._stored(answer, None)
            return
        task = self.loop.create_task(self._answer(head, started, whole))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _stored(self, answer: Any, error: Exception | None) -> None:
        """The group that was taken is stored, or refused."""
        self._reply(*self._taken, *((200, answer_one(answer)) if error is None else refusal_reply(error)))

    async def _answer(self, head: _Head, started: float, whole: bytes) -> None:
        try:
            status, body = await self.hot.take_groups(head.path, whole, head.content_type, head.encoding)
        except asyncio.CancelledError:
            self.transport.close()
            raise
        self._reply(head, started, status, body)

    def _reply(self, head: _Head, started: float, status: int, body: bytes) -> None:
        self.hot.record("POST", head.path, status, time.perf_counter() - started)
        self._answering = False
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.transport.write(
            b"%scontent-type: application/json\r\ncontent-length: %d\r\n%s%s\r\n%s"
            % (
                STATUS_LINE[status],
                len(body),
                self._common_headers(),
                b"connection: close\r\n" if self._closing else b"",
                body,
            )
        )
        if self._closing:
            self.transport.close()
            return
        self._keep_alive()
        backlog, self._backlog = self._backlog, b""
        self.flow.resume_reading()
        if backlog:
            self.data_received(backlog)

    def _common_headers(self) -> bytes:
        headers = self.server_state.default_headers
        if self._common[0] is not headers:
            type(self)._common = headers, b"".join([b"%s: %s\r\n" % pair for pair in headers])
        return self._common[1]

    def _keep_alive(self) -> None:
        """One timer for many requests: it looks at the time of the last one when it fires."""
        self._last_used = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def timeout_keep_alive_handler(self) -> None:
        left = self._last_used + self.timeout_keep_alive - self.loop.time()
        if self._answering or self._post is not None or left > 0:
            self.timeout_keep_alive_task = self.loop.call_later(max(left, 1.0), self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        if self._answering or self._post is not None:
            self._closing = True
        else:
            super().shutdown()

    # ---- did a reply arrive? --------------------------------------------------------------------------------------------

    def unsent(self) -> int:
        """Bytes written that the client's machine has not acknowledged."""
        waiting = int(self.transport.get_write_buffer_size())
        sock = self.transport.get_extra_info("socket")
        try:
            return waiting + int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0])
        except (OSError, ValueError, AttributeError):
            return waiting

    async def arrived(self) -> bool:
        """Wait until the client's machine has all that was written; False when the client left before.

        A client that has read everything may close at once: that is an end with nothing unsent. One that gave up leaves
        bytes behind, or resets the connection because it had not read them.
        """
        pause = 0.0005
        while not self._lost:
            if not self.unsent():
                return True
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)
        return not self._was_reset and not self._unsent_at_end

    def eof_received(self) -> None:
        self._unsent_at_end = self.unsent()
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost, self._was_reset = True, exc is not None
        self._post = None
        super().connection_lost(exc)
        if self.on_lost is not None:
            callback, self.on_lost = self.on_lost, None
            callback(exc)


class RolloutConnection(asyncio.BufferedProtocol):
    """What the transport talks to: reads the rest of a long body straight into its place, and anything else into the window."""

    protocol_class: type[RolloutProtocol]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.protocol = protocol = self.protocol_class(*args, **kwargs)
        self.eof_received = protocol.eof_received  # type: ignore[method-assign]
        self.pause_writing = protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = protocol.resume_writing  # type: ignore[method-assign]
        self.connection_lost = protocol.connection_lost  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.protocol.connection_made(cast(asyncio.Transport, transport))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.protocol.room() or self.protocol.window.view

    def buffer_updated(self, nbytes: int) -> None:
        if self.protocol.room() is None:
            self.protocol.data_received(self.protocol.window.view[:nbytes])
        else:
            self.protocol.filled(nbytes)


def protocol_for(hot: HotRoutes, token: str | None) -> type[RolloutConnection]:
    """The protocol class for uvicorn's `http` option."""
    bound: dict[str, Any] = {"hot": hot, "token": token.encode() if token else None, "heads": {}}
    bound["window"] = Window(slabs, _SCRATCH)
    protocol: type[RolloutProtocol] = type("BoundRolloutProtocol", (RolloutProtocol,), bound)
    return type("BoundRolloutConnection", (RolloutConnection,), {"protocol_class": protocol})
