"""Who may talk to a server of ours, and how long: loopback needs nothing, any other address needs a bearer token."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from atroposlib.errors import ConfigError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
KEEP_ALIVE_S = 75
"""An idle connection is the client's to close: one closed here just as a client reuses it fails that request."""


def is_loopback(host: str) -> bool:
    """Whether a host name or address stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(host: str, *, token: str | None, insecure: bool) -> None:
    """Refuse to listen beyond this machine without a token, unless told to."""
    if not is_loopback(host) and not token and not insecure:
        raise ConfigError(
            f"listening on {host} lets other machines in; set a token (--token or ATROPOS_TOKEN), bind 127.0.0.1, or pass --insecure"
        )


def bears_token(authorization: bytes, token: bytes) -> bool:
    """Whether an Authorization header carries this bearer token; the comparison takes the same time for every guess."""
    scheme, _, given = authorization.partition(b" ")
    return hmac.compare_digest(given.strip(), token) and scheme.lower() == b"bearer"


class TokenGate:
    """ASGI middleware: with a token set, a request without it gets 401."""

    def __init__(self, app: Any, *, token: str | None, open_paths: tuple[str, ...] = ()) -> None:
        self.app, self.open_paths = app, open_paths
        self.token = token.encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self.open_paths or self._may(scope):
            await self.app(scope, receive, send)
            return
        body = b'{"error": {"message": "missing or wrong bearer token", "type": "authentication_error", "param": null, "code": null}}'
        headers = [
            (b"content-type", b"application/json"),
            (b"www-authenticate", b"Bearer"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _may(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return self.token is None or bears_token(given, self.token)
