"""The connection: uvicorn's HTTP protocol with a short cut for posted groups, and with word of connections that break.

A well-formed `POST /scored_data` or `/scored_data_list` with a plain content length is read straight into one buffer and answered with one
write. Everything else, and anything unusual about such a request, is uvicorn's own business.

`on_lost` callbacks tell a route that the connection broke after it had answered: a reply that was still on its way is lost.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import re
import struct
import termios
import time
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from atroposlib.api.hot_routes import HotRoutes, answer_one, refusal_reply

_HEAD = re.compile(rb"POST (/scored_data|/scored_data_list) HTTP/1\.1\r\n")
_END = b"\r\n\r\n"
_MAX_HEAD = 8192
_UNUSUAL = (b"transfer-encoding", b"expect", b"upgrade", b"origin", b"connection")


class _Post:
    """A posted group that is being received."""

    __slots__ = ("body", "content_type", "encoding", "filled", "path", "started")

    def __init__(self, path: str, length: int, content_type: bytes, encoding: bytes) -> None:
        self.path, self.content_type, self.encoding = path, content_type, encoding
        self.body = bytearray(length)
        self.filled = 0
        self.started = time.perf_counter()


class RolloutProtocol(HttpToolsProtocol):
    """One connection of a rollout server. Use `protocol_for` to bind it to the routes."""

    hot: HotRoutes
    token: bytes | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._post: _Post | None = None
        self._answering = False
        self._in_message = False
        self._backlog = b""
        self._closing = False
        self._last_used = 0.0
        self._lost = self._was_reset = False
        self._unsent_at_end = 0
        self.on_lost: Callable[[Exception | None], None] | None = None

    # ---- receiving ----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._answering:  # a further request before the answer to the last one
            self._backlog += data
            self.flow.pause_reading()
            return
        if self._post is not None:
            self._fill(self._post, data, 0)
            return
        if (
            data.startswith(b"POST /scored_data")
            and not self._in_message
            and (self.cycle is None or self.cycle.response_complete)
        ):
            post, offset = self._read_head(data)
            if post is not None:
                self.on_lost = None
                self._post = post
                self._fill(post, data, offset)
                return
        self.on_lost = None
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()  # type: ignore[no-untyped-call]
        self._in_message = True  # what comes is this request's, even if it was answered before its end
        self.scope["atropos.connection"] = self  # type: ignore[typeddict-unknown-key]

    def on_message_complete(self) -> None:
        super().on_message_complete()  # type: ignore[no-untyped-call]
        self._in_message = False

    def _read_head(self, data: bytes) -> tuple[_Post | None, int]:
        """The request in these bytes and where its body begins; None when it is not for the short cut."""
        match = _HEAD.match(data)
        end = data.find(_END, 0, _MAX_HEAD)
        if match is None or end < 0:
            return None, 0
        headers: dict[bytes, bytes] = {}
        for line in data[match.end() : end].split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() in headers or name[:1] in (b" ", b"\t"):  # said twice, or folded: not for the short cut
                return None, 0
            headers[name.lower()] = value.strip()
        length = headers.get(b"content-length", b"")
        if (
            any(name in headers for name in _UNUSUAL)
            and headers.get(b"connection", b"keep-alive").lower() != b"keep-alive"
        ):
            return None, 0
        if any(name in headers for name in _UNUSUAL[:-1]) or not length.isdigit() or not self._may(headers):
            return None, 0
        if not 0 < int(length) <= self.hot.limits.max_bytes:
            return None, 0
        post = _Post(
            match[1].decode(),
            int(length),
            headers.get(b"content-type", b""),
            headers.get(b"content-encoding", b"").lower(),
        )
        return post, end + len(_END)

    def _may(self, headers: dict[bytes, bytes]) -> bool:
        if self.token is None:
            return True
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return hmac.compare_digest(given.strip(), self.token) and scheme.lower() == b"bearer"

    def _fill(self, post: _Post, data: bytes, offset: int) -> None:
        room = len(post.body) - post.filled
        given = len(data) - offset
        if given <= room:
            post.body[post.filled : post.filled + given] = memoryview(data)[offset:] if offset else data
            post.filled += given
        else:
            post.body[post.filled :] = memoryview(data)[offset : offset + room]
            post.filled += room
            self._backlog = data[offset + room :]
        if post.filled == len(post.body):
            self._post = None
            self._answering = True
            self._take(post)

    # ---- answering ----------------------------------------------------------------------------------------------------

    def _take(self, post: _Post) -> None:
        """A whole body is here: store it at once where that is quick, else in a task."""
        whole = cast(bytes, post.body)  # nobody writes to it any more
        if post.path == "/scored_data" and not post.encoding and self.hot.is_quick(whole, post.content_type):
            try:
                answer = self.hot.take_one(whole, post.content_type)
            except Exception as error:  # the boundary of a request: whatever went wrong, the client hears of it
                self._reply(post, *refusal_reply(error))
                return
            if isinstance(answer, int):
                self._reply(post, 200, answer_one(answer))
            else:
                answer.add_done_callback(lambda done: self._stored(post, done))
            return
        task = self.loop.create_task(self._answer(post, whole))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _stored(self, post: _Post, done: asyncio.Future[int]) -> None:
        error = done.exception()
        if error is None:
            self._reply(post, 200, answer_one(done.result()))
        else:
            self._reply(post, *refusal_reply(error))

    async def _answer(self, post: _Post, whole: bytes) -> None:
        try:
            status, body = await self.hot.take_groups(post.path, whole, post.content_type, post.encoding)
        except asyncio.CancelledError:
            self.transport.close()
            raise
        self._reply(post, status, body)

    def _reply(self, post: _Post, status: int, body: bytes) -> None:
        self.hot.record("POST", post.path, status, time.perf_counter() - post.started)
        self._answering = False
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        head = b"%scontent-type: application/json\r\ncontent-length: %d\r\n" % (STATUS_LINE[status], len(body))
        more = b"".join([b"%s: %s\r\n" % pair for pair in self.server_state.default_headers])
        self.transport.write(head + more + (b"connection: close\r\n\r\n" if self._closing else b"\r\n") + body)
        if self._closing:
            self.transport.close()
            return
        self._keep_alive()
        backlog, self._backlog = self._backlog, b""
        self.flow.resume_reading()
        if backlog:
            self.data_received(backlog)

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


def protocol_for(hot: HotRoutes, token: str | None) -> type[RolloutProtocol]:
    """The protocol class for uvicorn's `http` option."""
    return type("BoundRolloutProtocol", (RolloutProtocol,), {"hot": hot, "token": token.encode() if token else None})
