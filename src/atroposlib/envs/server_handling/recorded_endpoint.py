"""One OpenAI-compatible base URL for foreign code, with a recorded session per rollout behind it.

Foreign environments take one base URL and mark each rollout with a header (``X-Session-ID``). Every new value of that
header opens a session of its own at the proxy, so the tokens of two rollouts never meet, however many run at once. The
endpoint lives in the environment's own event loop, listens on loopback only, and its path holds a secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Iterator
from typing import Any

from atroposlib.access import KEEP_ALIVE_S

SESSION_HEADER = b"x-session-id"
_STARTUP_TIMEOUT_S = 30.0
_SESSION_TTL_S = 3 * 3600.0


class RecordedEndpoint:
    """Start it, hand ``base_url`` out, read what each rollout sampled.

    Example:
        endpoint = RecordedEndpoint(env.server, env.tokenizer, model_name="policy")
        await endpoint.start()
        await run_foreign_agent(endpoint.base_url, headers={"X-Session-ID": "rollout-1"})
        nodes = endpoint.take("rollout-1")
        await endpoint.stop()
    """

    def __init__(self, manager: Any, tokenizer: Any, *, model_name: str, tool_parser: str = "hermes") -> None:
        from atroposlib.envs.server_handling.managed_server_proxy import create_app

        self._token, self._secret = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self._app = create_app(manager, tokenizer, model_name, token=self._token, session_ttl_s=_SESSION_TTL_S)
        self._tool_parser = tool_parser
        self._sessions: dict[str, str] = {}
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    @property
    def base_url(self) -> str:
        """What foreign code uses as its OpenAI base URL."""
        return f"http://127.0.0.1:{self.port}/rollouts/{self._secret}/v1"

    async def start(self) -> None:
        """Listen on a free loopback port."""
        import uvicorn

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:  # signals belong to the environment's own loop
                yield

        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        config = uvicorn.Config(
            self._route, interface="asgi3", log_level="error", lifespan="off", timeout_keep_alive=KEEP_ALIVE_S
        )
        self._server = Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="recorded-endpoint")
        async with asyncio.timeout(_STARTUP_TIMEOUT_S):
            while not self._server.started:
                if self._task.done():
                    await self._task
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Stop listening; open connections are closed."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._task
            self._server = self._task = None

    def take(self, rollout: str) -> list[Any]:
        """The sequences recorded for a rollout, one per branch; the session is closed. Empty when it never called."""
        session_id = self._sessions.pop(rollout, None)
        session = None if session_id is None else self._app.state.proxy.sessions.get(session_id)
        if session is None or session_id is None:
            return []
        nodes: list[Any] = session.nodes()
        self._app.state.proxy.sessions.close(session_id)
        return nodes

    async def _route(self, scope: Any, receive: Any, send: Any) -> None:
        """Send a request below our secret path to the session its header names; everything else to the proxy as it is."""
        prefix = f"/rollouts/{self._secret}/"
        if scope["type"] == "http" and scope["path"].startswith(prefix):
            rollout = dict(scope["headers"]).get(SESSION_HEADER, b"").decode("latin-1") or "unnamed"
            path = f"/{self._session_for(rollout)}/{scope['path'].removeprefix(prefix)}"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)

    def _session_for(self, rollout: str) -> str:
        from atroposlib.envs.server_handling.proxy_models import SessionCreateRequest

        proxy = self._app.state.proxy
        known = self._sessions.get(rollout)
        if known is None or proxy.sessions.get(known) is None:
            known = self._sessions[rollout] = proxy.open(SessionCreateRequest(tool_parser=self._tool_parser)).uuid
        return known
