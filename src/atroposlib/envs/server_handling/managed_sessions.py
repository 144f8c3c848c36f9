"""Opening a managed session: which server, and whether it can give exact tokens at all."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from atroposlib.envs.server_handling.managed_server import DummyManagedServer, ManagedServer
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.envs.server_handling.vllm_server import TokenizerOwner
from atroposlib.errors import ConfigError

if TYPE_CHECKING:
    from atroposlib.envs.server_handling.server_manager import ServerManager

logger = logging.getLogger(__name__)


def allows_dummy_sessions() -> bool:
    """Whether ATROPOS_ALLOW_DUMMY_MANAGED_SERVER is on."""
    return os.environ.get("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "").lower() in ("1", "true", "yes")


@asynccontextmanager
async def open_managed_session(
    manager: ServerManager, *, tokenizer: Any, base_url: str | None, preserve_think_blocks: bool
) -> AsyncIterator[Any]:
    """A session at the proxy when one is configured, else on the least loaded server of ``manager``."""
    proxy_url = manager.proxy_url or os.environ.get("ATROPOS_PROXY_URL")
    if manager.use_proxy and not proxy_url:
        raise ConfigError("use_proxy is on but no proxy is known; set proxy_url or the variable ATROPOS_PROXY_URL")
    if proxy_url:
        from atroposlib.envs.server_handling.proxy_client import create_proxy_session

        model_name = getattr(getattr(manager.servers[0], "config", None), "model_name", "unknown")
        async with await create_proxy_session(
            proxy_url,
            base_url=base_url,
            tool_parser=manager.tool_parser or "hermes",
            model_name=model_name,
            preserve_think_blocks=preserve_think_blocks,
        ) as proxied:
            yield proxied
        return
    server = manager.pick_session_server()
    session = _local_session(manager, server, tokenizer, preserve_think_blocks)
    _count(server, 1)
    try:
        yield session
    finally:
        _count(session.server, -1)
        session.reset()


def _count(server: Any, change: int) -> None:
    if hasattr(server, "num_open_sessions"):
        server.num_open_sessions += change


def _local_session(manager: ServerManager, server: Any, tokenizer: Any, preserve_think_blocks: bool) -> Any:
    if isinstance(server, OpenAIServer):
        if not allows_dummy_sessions():
            raise NotImplementedError(
                f"managed_server needs exact token ids and log-probs, which the OpenAI API at {server.label} does not "
                "give; set server_type to 'vllm' or 'sglang' if the server is one of those. For evaluation or data "
                "generation with placeholder tokens set ATROPOS_ALLOW_DUMMY_MANAGED_SERVER=1"
            )
        logger.warning(
            "%s gives no exact tokens: this session records placeholders, do not train on them", server.label
        )
        return DummyManagedServer(server=server, tokenizer=tokenizer)

    async def reroute(left: Any, avoid: Sequence[Any]) -> Any:
        replacement = await manager.healthy_server(avoid)
        _count(left, -1)
        _count(replacement, 1)
        return replacement

    session = ManagedServer(
        server=server,
        tokenizer=tokenizer,
        tool_parser=manager.tool_parser,
        preserve_think_blocks=preserve_think_blocks,
        reroute=reroute,
        other_servers=manager.servers,
    )
    if isinstance(server, ServerHarness) and server.tokenizer is None:
        server.tokenizer = session.tokenizer  # the in-process server encodes its replies with the session's tokenizer
    for (
        one
    ) in manager.servers:  # and one that names no tokenizer looks at ids with it, instead of loading its model's name
        if isinstance(one, TokenizerOwner) and one._tokenizer is None and one.config.tokenizer_name in ("", "none"):
            one.tokenizer = session.tokenizer
    return session
