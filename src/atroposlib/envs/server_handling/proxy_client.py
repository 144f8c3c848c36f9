"""A managed session that lives at a proxy: the calls of ``ManagedServer``, and a base URL to hand to any agent."""

from __future__ import annotations

import logging
import os
import urllib.request
from typing import TYPE_CHECKING, Any

from atroposlib.envs.server_handling.http_pool import HttpPool, decode_json
from atroposlib.envs.server_handling.managed_replies import managed_chat_from
from atroposlib.envs.server_handling.policy_versions import note_reply_versions
from atroposlib.envs.server_handling.sequence_tree import SequenceNode
from atroposlib.errors import InferenceServerError

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 3600.0
ADMIN_TIMEOUT_S = 60.0
STATE_TIMEOUT_S = 10.0
_pools: dict[str, HttpPool] = {}


def _pool(proxy_url: str) -> HttpPool:
    return _pools.setdefault(proxy_url, HttpPool())


def proxy_headers(token: str | None = None) -> dict[str, str]:
    """The bearer header for a proxy: ``token``, or the variable ATROPOS_PROXY_TOKEN."""
    token = token or os.environ.get("ATROPOS_PROXY_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}


class ProxyManagedServer:
    """One session at the proxy.

    Example::

        async with await create_proxy_session("http://localhost:9100") as session:
            await run_agent(base_url=session.get_url())
            nodes = session.get_state()["nodes"]
    """

    def __init__(
        self,
        proxy_url: str,
        session_uuid: str,
        model_name: str = "unknown",
        base_url: str | None = None,
        track_tree: bool = False,
    ) -> None:
        self.proxy_url = proxy_url.rstrip("/")
        self.session_uuid = session_uuid
        self.model_name = model_name
        self.base_url = base_url
        self.track_tree = track_tree
        self.current_nodes: list[SequenceNode] = []
        self._is_stale = False

    async def __aenter__(self) -> ProxyManagedServer:
        """The session itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.cleanup()

    def get_url(self) -> str:
        """The base URL an agent uses; what it samples there is recorded in this session."""
        self._is_stale = True
        return f"{self.proxy_url}/{self.session_uuid}/v1"

    def _session_url(self, route: str) -> str:
        return f"{self.proxy_url}/{self.session_uuid}/{route}"

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Answer ``messages``; every sampling parameter, tools included, reaches the backend."""
        extra = kwargs.pop("extra_body", None) or {}
        timeout_s = kwargs.pop("timeout", None) or CALL_TIMEOUT_S
        body = {"model": self.model_name, **kwargs, **extra}
        url = self._session_url("v1/chat/completions")
        data = await _pool(self.proxy_url).post_json(url, body, timeout_s=timeout_s)
        note_reply_versions(data, len(data["choices"]))
        await self.fetch_state()
        return managed_chat_from(data)

    async def completion(self, **kwargs: Any) -> Completion:
        """Continue ``prompt``."""
        from atroposlib.envs.server_handling.openai_routes import completion_from

        url = self._session_url("v1/completions")
        data = await _pool(self.proxy_url).post_json(url, kwargs, timeout_s=CALL_TIMEOUT_S)
        await self.fetch_state()
        return completion_from(data)

    def get_state(self) -> dict[str, Any]:
        """The record so far. After the URL was handed out this asks the proxy (and waits for its answer).

        Code that shares an event loop with the proxy uses ``await fetch_state()`` instead.
        """
        if self._is_stale:
            request = urllib.request.Request(self._session_url("nodes"), headers=proxy_headers())
            with urllib.request.urlopen(request, timeout=STATE_TIMEOUT_S) as response:
                self._keep(decode_json(response.read()))
        if self.track_tree:
            sequences = {node.full_text: node for node in self.current_nodes}
            return {"sequences": sequences, "tree": sequences}
        return {"nodes": list(self.current_nodes)}

    async def fetch_state(self) -> dict[str, Any]:
        """Ask the proxy for the record and return it."""
        url = self._session_url("nodes")
        self._keep(await _pool(self.proxy_url).request_json("GET", url, timeout_s=ADMIN_TIMEOUT_S))
        was_stale, self._is_stale = self._is_stale, False
        state = self.get_state()
        self._is_stale = was_stale
        return state

    def _keep(self, reply: dict[str, Any]) -> None:
        self.current_nodes = [SequenceNode(**node) for node in reply["nodes"]]

    def reset(self) -> None:
        """Forget the record here; the proxy forgets it with the session."""
        self.current_nodes = []

    async def cleanup(self) -> None:
        """Close the session at the proxy. One that cannot be closed expires there: what was recorded is not worth less for it."""
        try:
            url = f"{self.proxy_url}/{self.session_uuid}"
            await _pool(self.proxy_url).request_json("DELETE", url, timeout_s=ADMIN_TIMEOUT_S)
        except InferenceServerError as error:
            if error.status != 404:  # expired already
                logger.warning("a session could not be closed and is left to expire: %s", error)


async def create_proxy_session(
    proxy_url: str,
    base_url: str | None = None,
    tool_parser: str = "hermes",
    track_tree: bool = False,
    model_name: str = "unknown",
    *,
    preserve_think_blocks: bool = False,
    token: str | None = None,
) -> ProxyManagedServer:
    """Open a session at the proxy."""
    root = proxy_url.rstrip("/")
    body = {
        "tool_parser": tool_parser,
        "track_tree": track_tree,
        "base_url": base_url,
        "preserve_think_blocks": preserve_think_blocks,
    }
    reply = await _pool(root).post_json(
        f"{root}/sessions/create", body, headers=proxy_headers(token), timeout_s=ADMIN_TIMEOUT_S
    )
    return ProxyManagedServer(
        root,
        reply["uuid"],
        model_name=reply.get("model_name") or model_name,
        base_url=reply.get("base_url"),
        track_tree=track_tree,
    )
