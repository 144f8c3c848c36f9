"""What both clients share: a reply, the pauses between tries, a small blocking HTTP client."""

from __future__ import annotations

import http.client
import logging
import random
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from atroposlib.api.schemas import BINARY_TYPE
from atroposlib.errors import ConfigError, RolloutRejectedError, RolloutServerUnavailableError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class HttpReply:
    """A reply, read in full."""

    status: int
    body: bytes
    content_type: str = ""

    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def is_binary(self) -> bool:
        return self.status == 200 and self.content_type.startswith(BINARY_TYPE)

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def checked(self, url: str) -> dict[str, Any]:
        """The JSON of a successful reply; RolloutRejectedError for any other."""
        if self.status >= 400:
            detail = self.text()
            raise RolloutRejectedError(
                f"{url} refused with {self.status}: {detail[:500]}", status=self.status, detail=detail
            )
        try:
            answer = self.json()
        except msgspec.MsgspecError as error:
            raise RolloutRejectedError(
                f"{url} answered {self.status} with something that is no JSON ({error}): {self.text()[:200]!r}; is this a rollout server?",
                status=self.status,
                detail=self.text()[:2000],
            ) from None
        return answer if isinstance(answer, dict) else {"value": answer}


def describe(error: BaseException) -> str:
    """An error in a few words, also when it has none."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class BackOff:
    """Growing, jittered pauses; says once in a while what is being waited for; gives up after a time if told to."""

    def __init__(
        self, what: str, give_up_after_s: float | None, *, first_s: float = 0.05, longest_s: float = 5.0
    ) -> None:
        self.what, self.give_up_after_s, self.longest_s = what, give_up_after_s, longest_s
        self._next_s = first_s
        self._since = time.monotonic()
        self._said = self._since - 8.0  # a blink is not worth a line: the first one comes after two seconds

    def pause(self, problem: str) -> float:
        """Seconds to wait before the next try; RolloutServerUnavailableError when it is time to give up."""
        now = time.monotonic()
        waited = now - self._since
        if self.give_up_after_s is not None and waited >= self.give_up_after_s:
            raise RolloutServerUnavailableError(
                f"{self.what} has not answered for {waited:.0f} s ({problem}); check that the rollout server runs and the URL is right"
            )
        if now - self._said >= 10.0:
            logger.warning(
                "waiting for %s since %.0f s (%s); trying again (run-api starts a server)", self.what, waited, problem
            )
            self._said = now
        pause = self._next_s * random.uniform(0.7, 1.3)
        self._next_s = min(self.longest_s, self._next_s * 1.7)
        return pause


class SyncHttp:
    """Blocking HTTP with one kept-alive connection per thread. Anything that breaks is an OSError."""

    def __init__(self, url: str, *, token: str | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"the rollout server's URL is {url!r}; it must look like http://host:8000")
        self._factory = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._local = threading.local()
        self._all: list[http.client.HTTPConnection] = []
        self._all_lock = threading.Lock()

    def request(self, method: str, path: str, value: Any = None, headers: dict[str, str] | None = None) -> HttpReply:
        """One try."""
        body = None if value is None else msgspec.json.encode(value)
        all_headers = {
            **self._headers,
            **(headers or {}),
            **({"content-type": "application/json"} if body is not None else {}),
        }
        connection = self._connection()
        try:
            connection.request(method, self._prefix + path, body, all_headers)
            reply = connection.getresponse()
            return HttpReply(reply.status, reply.read(), reply.getheader("content-type") or "")
        except http.client.HTTPException as error:
            connection.close()
            raise ConnectionError(describe(error)) from error
        except OSError:
            connection.close()
            raise

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._factory(self._host, self._port, timeout=self._timeout_s)
            with self._all_lock:
                self._all.append(connection)
        return connection

    def close(self) -> None:
        with self._all_lock:
            for connection in self._all:
                connection.close()
