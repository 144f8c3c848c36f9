"""``ServerManager``: builds the servers, sends each call to the least loaded healthy one, opens token-exact sessions."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from atroposlib.envs.server_handling.api_server import APIServer, HeldSlot, can_fail_over, held_slot, is_watched
from atroposlib.envs.server_handling.managed_server import DummyManagedServer, ManagedServer
from atroposlib.envs.server_handling.managed_sessions import open_managed_session
from atroposlib.envs.server_handling.openai_routes import merge_replies
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.routing import pick_for_request, pick_for_session, snapshot
from atroposlib.envs.server_handling.server_building import build_servers
from atroposlib.envs.server_handling.server_config import APIServerConfig, ReasoningConfig, ServerBaseline
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.signals import Signal
from atroposlib.envs.server_handling.trl_vllm_server import TrlVllmServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import InferenceServerError, InferenceTimeoutError, InferenceUnavailableError
from atroposlib.utils.gathering import gather_or_cancel

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

__all__ = [
    "APIServer",
    "APIServerConfig",
    "DummyManagedServer",
    "ManagedServer",
    "OpenAIServer",
    "ReasoningConfig",
    "SGLangServer",
    "ServerBaseline",
    "ServerHarness",
    "ServerManager",
    "ServerManagerConfig",
    "TrlVllmServer",
    "VLLMServer",
]

logger = logging.getLogger(__name__)

STAND_IN_POLL_S = 0.02
WAIT_MESSAGE_INTERVAL_S = 30.0
DEFAULT_SERVER_WAIT_S = 600.0


def _is_healthy(server: Any) -> bool:
    return bool(getattr(server, "server_healthy", True))


class ServerManagerConfig(BaseModel):
    """The settings that concern all servers at once; on the command line without a prefix."""

    slurm: bool = Field(default=True, description="Find the servers from the node list when inside a Slurm job.")
    testing: bool = Field(default=False, description="Answer in process, deterministically, without a network.")
    max_n_completions: int = Field(
        default=8, gt=0, description="Larger n is asked as several calls of at most this many."
    )
    proxy_url: str | None = Field(default=None, description="Open managed sessions at this proxy.")


class ServerManager:
    """All inference servers of an environment behind the four calls of one server.

    Example: ``await ServerManager([APIServerConfig(base_url="http://localhost:9001/v1")]).chat_completion(messages=[...], n=8)``
    """

    servers: list[Any]
    # Defaults on the class, so that an instance made without the constructor routes calls, too.
    max_n_completions: int = 8
    reasoning_config: ReasoningConfig | None = None
    proxy_url: str | None = None
    use_proxy: bool = False
    tool_parser: str | None = None
    _free_slots: tuple[Signal, Signal] | None = None  # one for training, one for evaluation
    _last_wait_message: float = 0.0

    def __init__(
        self,
        configs: ServerBaseline | APIServerConfig | Sequence[APIServerConfig],
        server_class: type[APIServer] = APIServer,
        slurm: bool = False,
        testing: bool = False,
        max_n_completions: int = 8,
        reasoning_config: ReasoningConfig | None = None,
        proxy_url: str | None = None,
        use_proxy: bool = False,
        tool_parser: str | None = None,
    ) -> None:
        self.max_n_completions = max_n_completions
        self.reasoning_config = reasoning_config
        self.proxy_url = proxy_url
        self.use_proxy = use_proxy
        self.tool_parser = tool_parser
        self.servers = build_servers(
            configs,
            server_class=None if inspect.isabstract(server_class) else server_class,
            slurm=slurm,
            testing=testing,
            reasoning_config=reasoning_config,
        )

    # -- calls ------------------------------------------------------------------------------------------------------

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Answer ``messages`` with ``n`` choices on the least loaded healthy server."""
        return merge_replies(await self._calls_for_n("chat_completion", kwargs))  # type: ignore[no-any-return]

    async def completion(self, **kwargs: Any) -> Completion:
        """Continue ``prompt`` with ``n`` choices on the least loaded healthy server."""
        return merge_replies(await self._calls_for_n("completion", kwargs))  # type: ignore[no-any-return]

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> tuple[Any, list[Any], list[Any], list[Any]]:
        """Exact ids of ``n`` continuations: prompt ids, output ids, log-probs, finish reasons."""
        replies = await self._calls_for_n("tokens_and_logprobs_completion", kwargs)
        prompt_tokens = replies[0][0]
        outputs, logprobs, reasons = ([item for reply in replies for item in reply[part]] for part in (1, 2, 3))
        return prompt_tokens, outputs, logprobs, reasons

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Log-probs of a given text or id list."""
        return await self._route("get_logprobs", kwargs)  # type: ignore[no-any-return]

    async def _calls_for_n(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        n = kwargs.get("n") or 1
        if n <= self.max_n_completions:
            return [await self._route(method, kwargs)]
        sizes = [self.max_n_completions] * (n // self.max_n_completions)
        if n % self.max_n_completions:
            sizes.append(n % self.max_n_completions)
        return await gather_or_cancel(*(self._route(method, {**kwargs, "n": size}) for size in sizes))

    async def _route(self, method: str, kwargs: dict[str, Any]) -> Any:
        split = kwargs.get("split", "train")
        tried: list[Any] = []
        deadline = time.monotonic() + self._server_wait_s()
        while True:
            server = await self._acquire_server(is_train=split == "train", avoid=tried)
            previous = can_fail_over.get()
            can_fail_over.set(True)
            try:
                return await getattr(server, method)(**{**kwargs, "split": split})
            except InferenceTimeoutError:
                raise
            except InferenceServerError as error:
                tried.append(server)
                if not error.retryable or not self._can_hand_over(server, tried, error, deadline):
                    raise
                logger.info("%s failed and is asked again: %s", method, error)
            finally:
                can_fail_over.set(previous)

    def _can_hand_over(self, failed: Any, tried: list[Any], error: InferenceServerError, deadline: float) -> bool:
        if isinstance(error, InferenceUnavailableError) and is_watched(failed):
            return time.monotonic() < deadline  # it, or another, is waited for
        return any(_is_healthy(server) for server in self.servers if server not in tried)

    # -- choosing a server ------------------------------------------------------------------------------------------

    async def _acquire_server(self, is_train: bool, avoid: Sequence[Any] = ()) -> Any:
        deadline = time.monotonic() + self._server_wait_s()
        has_waited = False
        while True:
            fresh = [server for server in self.servers if server not in avoid and _is_healthy(server)]
            candidates = fresh or self.servers
            loads = snapshot(candidates, is_train)
            index = pick_for_request(loads)
            if index is not None:
                if has_waited:  # more than one slot may have opened at once
                    self._free_slot(is_train).notify_one()
                return candidates[index]
            has_waited = True
            if any(load.healthy for load in loads):
                # All slots are taken: their holders finish or time out, so this wait ends by itself.
                await self._wait_for_slot(is_train, None)
                deadline = time.monotonic() + self._server_wait_s()
                continue
            self._watch_all()
            left = deadline - time.monotonic()
            if left <= 0:
                raise InferenceUnavailableError(self._all_down_message(), url=self._names(), retryable=True)
            self._say_waiting(left)
            await self._wait_for_slot(is_train, min(left, WAIT_MESSAGE_INTERVAL_S))

    def _free_slot(self, is_train: bool) -> Signal:
        if self._free_slots is None:
            train, evaluation = self._free_slots = Signal(), Signal()
            for server in self.servers:
                sources = [(server.sem, train.notify_one), (server.eval_sem, evaluation.notify_one)]
                health = getattr(server, "health_changed", None)
                sources += [(health, train.notify_all), (health, evaluation.notify_all)]
                for source, notify in sources:
                    if source is not None and hasattr(source, "subscribe"):
                        source.subscribe(notify)
        return self._free_slots[0 if is_train else 1]

    async def _wait_for_slot(self, is_train: bool, timeout_s: float | None) -> None:
        if not all(isinstance(server, APIServer) for server in self.servers):
            timeout_s = STAND_IN_POLL_S if timeout_s is None else min(timeout_s, STAND_IN_POLL_S)
        await self._free_slot(is_train).wait(timeout_s)

    def _server_wait_s(self) -> float:
        waits = [getattr(getattr(server, "config", None), "server_wait_s", None) for server in self.servers]
        return max((wait for wait in waits if isinstance(wait, int | float)), default=DEFAULT_SERVER_WAIT_S)

    def _watch_all(self) -> None:
        for server in self.servers:
            if isinstance(server, APIServer):
                server.start_watching()

    def _names(self) -> str:
        return ", ".join(getattr(server, "label", type(server).__name__) for server in self.servers)

    def _all_down_message(self) -> str:
        failures = [getattr(server, "last_failure", None) for server in self.servers]
        last = next((failure for failure in failures if failure), "marked unhealthy")
        return (
            f"all {len(self.servers)} inference servers are down after {self._server_wait_s():g} s: {self._names()}; "
            f"last failure: {last}; start one of them, correct base_url, or raise server_wait_s"
        )

    def _say_waiting(self, left_s: float) -> None:
        now = time.monotonic()
        if now - self._last_wait_message >= WAIT_MESSAGE_INTERVAL_S:
            self._last_wait_message = now
            logger.warning("all inference servers are down (%s); giving up in %.0f s", self._names(), left_s)

    async def healthy_server(self, avoid: Sequence[Any] = ()) -> Any:
        """A server that is up and, if there is one, not to avoid; waits when all are down (see ``server_wait_s``)."""
        return await self._acquire_server(is_train=True, avoid=avoid)

    def pick_session_server(self) -> Any:
        """The server for a new session; sessions already open count as load."""
        return self.servers[pick_for_session(snapshot(self.servers, is_train=True))]

    # -- sessions ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def dedicated_server(self) -> AsyncIterator[Any]:
        """The least loaded server, with one training slot kept for the block."""
        server = self.pick_session_server()
        async with server.sem:
            previous = held_slot.get()
            held_slot.set(HeldSlot(server=server, lock=asyncio.Lock()))
            try:
                yield server
            finally:
                held_slot.set(previous)

    @asynccontextmanager
    async def managed_server(
        self, tokenizer: Any = None, base_url: str | None = None, preserve_think_blocks: bool = False
    ) -> AsyncIterator[Any]:
        """A session that records exactly the tokens that are sent and sampled; forgotten when the block ends.

        Example: ``async with self.server.managed_server(tokenizer=self.tokenizer) as managed: ...``
        """
        async with open_managed_session(
            self, tokenizer=tokenizer, base_url=base_url, preserve_think_blocks=preserve_think_blocks
        ) as session:
            yield session

    # -- upkeep -----------------------------------------------------------------------------------------------------

    async def update_weight(self, weight: float) -> None:
        """Use only this share of every server's limits."""
        for server in self.servers:
            await server.update_weight(weight)

    async def wandb_metrics(
        self, metrics_dict: dict[str, Any] | None, server_name: str | None = None
    ) -> dict[str, Any]:
        """The metrics of all servers, named server_0, server_1, ..."""
        metrics = metrics_dict if metrics_dict is not None else {}
        for index, server in enumerate(self.servers):
            metrics = await server.wandb_metrics(metrics, f"{server_name or 'server'}_{index}")
        return metrics

    async def aclose(self) -> None:
        """Stop health checks and close the connections of all servers."""
        for server in self.servers:
            if hasattr(server, "aclose"):
                await server.aclose()
