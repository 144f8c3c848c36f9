"""One pooled HTTP client per server, with failures turned into errors that name the server and the cause."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from atroposlib.errors import InferenceServerError, InferenceTimeoutError, InferenceUnavailableError

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

BODY_HEAD_CHARS = 500
RETRYABLE_STATUSES = frozenset({408, 425, 429})
CONNECT_TIMEOUT_S = 30.0


def encode_json(payload: Any) -> bytes:
    """JSON bytes of a request; pydantic models and numpy numbers inside it are converted."""
    return msgspec.json.encode(payload, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_none=True)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotImplementedError(f"a request field of type {type(value).__name__} cannot be sent as JSON")


def decode_json(body: bytes) -> Any:
    """The value of a JSON body; tolerates the NaN and Infinity that Python servers write."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return json.loads(body)


def is_retryable_status(status: int) -> bool:
    """Whether a request that got this status may succeed when sent again."""
    return status >= 500 or status in RETRYABLE_STATUSES


async def _lifetime(session: aiohttp.ClientSession) -> AsyncGenerator[None]:
    # The event loop closes open asynchronous generators before it ends, so the connections go with it.
    try:
        yield
    finally:
        await session.close()


class HttpPool:
    """Keeps one session per event loop and speaks JSON over it.

    Example: ``reply = await HttpPool().post_json("http://localhost:9001/generate", {"prompt": "hi"}, timeout_s=60)``
    """

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeper: AsyncGenerator[None] | None = None

    async def session(self) -> aiohttp.ClientSession:
        """The session of the running loop."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            import aiohttp

            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30))
            self._loop = loop
            self._keeper = _lifetime(self._session)
            await anext(self._keeper)
        return self._session

    async def post_json(
        self, url: str, payload: Any, *, headers: Mapping[str, str] | None = None, timeout_s: float
    ) -> Any:
        """POST ``payload`` and return the decoded reply; every failure is an ``InferenceServerError``."""
        return await self.request_json("POST", url, payload, headers=headers, timeout_s=timeout_s)

    async def request_json(
        self, method: str, url: str, payload: Any = None, *, headers: Mapping[str, str] | None = None, timeout_s: float
    ) -> Any:
        """Any request with a JSON reply; every failure is an ``InferenceServerError``."""
        import aiohttp

        session = await self.session()
        if os.environ.get("ATROPOS_DEBUG_REQUESTS") == "1":
            logger.info("%s %s %s", method, url, payload)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, timeout_s))
        all_headers = {"Content-Type": "application/json", **(headers or {})}
        try:
            data = None if payload is None else encode_json(payload)
            async with session.request(method, url, data=data, headers=all_headers, timeout=timeout) as response:
                body = await response.read()
                status, retry_after = response.status, response.headers.get("Retry-After")
        except TimeoutError as error:
            raise InferenceTimeoutError(
                f"inference server {url} did not answer within {timeout_s:g} s; "
                "raise `timeout` of its server config or shorten the request",
                url=url,
                retryable=True,
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise InferenceUnavailableError(
                f"inference server {url} cannot be reached: {type(error).__name__}: {error}", url=url, retryable=True
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise InferenceServerError(
                f"the connection to inference server {url} was lost: {type(error).__name__}: {error}",
                url=url,
                retryable=True,
            ) from error
        if status >= 400:
            refusal = status_error(url, status, body)
            refusal.retry_after_s = float(retry_after) if retry_after and retry_after.isdigit() else None
            raise refusal
        try:
            return decode_json(body)
        except ValueError as error:
            head = _head(body)
            raise InferenceServerError(
                f"inference server {url} answered {status} with something that is not JSON: {head!r}",
                url=url,
                status=status,
                body=head,
            ) from error

    async def get_status(self, url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 5.0) -> int:
        """The HTTP status of a GET, 0 when the server cannot be reached."""
        import aiohttp

        session = await self.session()
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with session.get(url, headers=headers, timeout=timeout) as response:
                return response.status
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return 0

    async def aclose(self) -> None:
        """Close the connections."""
        if self._keeper is not None and self._loop is asyncio.get_running_loop():
            await self._keeper.aclose()
        self._session = self._keeper = self._loop = None


def status_error(url: str, status: int, body: bytes) -> InferenceServerError:
    """The error for a reply with an error status."""
    head = _head(body)
    return InferenceServerError(
        f"inference server {url} answered HTTP {status}: {head or '(empty body)'}",
        url=url,
        status=status,
        body=head,
        retryable=is_retryable_status(status),
    )


def _head(body: bytes) -> str:
    return body[:BODY_HEAD_CHARS].decode("utf-8", errors="replace").strip()
