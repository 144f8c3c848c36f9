"""``APIServer``: the one request path every backend shares.

A call waits until the server is healthy, takes a slot (training and evaluation have their own), asks the backend's
wrapper, retries what may succeed when sent again, and records how long it took. Backends fill in four wrappers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from atroposlib.envs.server_handling.adaptive_semaphore import AsyncSemWithAdaptiveWeight
from atroposlib.envs.server_handling.http_pool import HttpPool, is_retryable_status
from atroposlib.envs.server_handling.server_config import OFFICIAL_API_HOST, APIServerConfig, ReasoningConfig
from atroposlib.envs.server_handling.signals import Signal
from atroposlib.errors import InferenceServerError, InferenceUnavailableError

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply")

TokensAndLogprobs = tuple[list[int], list[list[int]], list[list[float]], list[Any]]
"""Prompt ids, then per sequence: output ids, their log-probs, the finish reason."""

# Set by the manager, which hands over or waits for all its servers together: a dead server then fails at once.
can_fail_over: ContextVar[bool] = ContextVar("atropos_can_fail_over", default=False)


def is_busy(error: BaseException) -> bool:
    """Whether the server only asks to come back later (429): that is no failure, so it is not counted as one."""
    return getattr(error, "status", None) == 429 or getattr(error, "status_code", None) == 429


def failure_kind(error: BaseException) -> str:
    """What a failed attempt means for the next one: final, busy, lost (the connection) or failed."""
    if not is_retryable(error):
        return "final"
    if is_busy(error):
        return "busy"
    if isinstance(error, InferenceServerError) and error.status is None and not isinstance(error, TimeoutError):
        return "lost"
    return "lost" if isinstance(error, ConnectionError) else "failed"


@dataclass(kw_only=True, slots=True)
class HeldSlot:
    """A training slot kept for the code inside ``ServerManager.dedicated_server``."""

    server: APIServer
    lock: asyncio.Lock


held_slot: ContextVar[HeldSlot | None] = ContextVar("atropos_held_slot", default=None)


def is_retryable(error: BaseException) -> bool:
    """Whether sending the same request again may help: lost connections, time-outs, 5xx, 408, 425 and 429."""
    if isinstance(error, InferenceServerError):
        return error.retryable
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    status = getattr(error, "status_code", None) or getattr(error, "status", None)
    return isinstance(status, int) and is_retryable_status(status)


def is_watched(server: Any) -> bool:
    """Whether ``server`` notices by itself that it is up again."""
    return isinstance(server, APIServer) and server.is_watched()


class RollingList(list[Any]):
    """A list that keeps its newest ``maxlen`` entries."""

    def __init__(self, maxlen: int) -> None:
        super().__init__()
        self.maxlen = maxlen

    def append(self, value: Any) -> None:
        """Add at the end, dropping the oldest when full."""
        super().append(value)
        if len(self) > self.maxlen:
            del self[0]


class APIServer(ABC):
    """One inference server. Subclasses say how to ask it; this class says when, how often and how many at once.

    Example: ``await VLLMServer(config).chat_completion(messages=[...], n=4, split="eval")``
    """

    MAX_ATTEMPTS = 3
    MAX_LOST_CONNECTIONS = 8  # a restarted server leaves several dead connections behind
    FIRST_BACKOFF_S = 0.2
    MAX_BACKOFF_S = 10.0
    MAX_RETRY_AFTER_S = 60.0
    HEALTHY_CHECK_INTERVAL_S = 10.0
    FIRST_RECOVERY_CHECK_S = 0.1
    MAX_RECOVERY_CHECK_S = 5.0

    _server_healthy: bool = True
    health_changed: Signal

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        self.config = config
        self.reasoning_config = reasoning_config
        self.sem = AsyncSemWithAdaptiveWeight(config.num_max_requests_at_once)
        self.eval_sem = AsyncSemWithAdaptiveWeight(config.num_requests_for_eval)
        self.health_changed = Signal()
        self._last_contact = 0.0
        self.last_failure: str | None = None
        keep = config.rolling_buffer_length
        self.attempts_list: list[int] = RollingList(keep)
        self.request_timings: list[float] = RollingList(keep)
        self.eval_attempts_list: list[int] = RollingList(keep)
        self.eval_request_timings: list[float] = RollingList(keep)
        self.check_task: asyncio.Task[None] | None = None
        self.initialized = False
        self.num_open_sessions = 0
        self.http = HttpPool()

    # -- what a backend provides ------------------------------------------------------------------------------------

    @abstractmethod
    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Watch the server for as long as it is used and keep ``server_healthy`` up to date."""

    @abstractmethod
    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion: ...

    @abstractmethod
    async def _completion_wrapper(self, **kwargs: Any) -> Completion: ...

    @abstractmethod
    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs: ...

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} does not implement get_logprobs")

    # -- what callers use -------------------------------------------------------------------------------------------

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Answer ``messages``; ``split="train"`` (default) or ``"eval"`` chooses the limit and the statistics."""
        kwargs = self._inject_reasoning_kwargs(kwargs)
        return await self._request(self._chat_completion_wrapper, kwargs, chat=True)

    async def completion(self, **kwargs: Any) -> Completion:
        """Continue ``prompt``."""
        return await self._request(self._completion_wrapper, kwargs)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        """Continue ``prompt`` or ``input_ids`` and return exact ids and log-probs."""
        return await self._request(self._tokens_and_logprobs_completion_wrapper, kwargs)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Log-probs of a given text or id list."""
        return await self._request(self._get_logprobs_wrapper, kwargs)

    async def update_weight(self, weight: float) -> None:
        """Use only this share of both limits."""
        self.sem.update_weight(weight)
        self.eval_sem.update_weight(weight)

    async def aclose(self) -> None:
        """Stop watching the server and close its connections."""
        if self.check_task is not None:
            self.check_task.cancel()
            self.check_task = None
        self.initialized = False
        await self.http.aclose()

    async def wandb_metrics(self, metrics_dict: dict[str, Any] | None, server_name: str | None) -> dict[str, Any]:
        """Add this server's timings and attempts under ``server/{server_name}_...``."""
        import numpy as np  # late: importing it costs more than all of this module

        metrics = metrics_dict if metrics_dict is not None else {}
        prefix = f"server/{server_name or self.label}"
        for split, timings in (("", self.request_timings), ("eval_", self.eval_request_timings)):
            if timings:
                values = np.asarray(timings)
                metrics[f"{prefix}_{split}request_time_avg"] = float(values.mean())
                metrics[f"{prefix}_{split}request_time_std"] = float(values.std())
                metrics[f"{prefix}_{split}request_time_99p"] = float(np.percentile(values, 99))
        if self.attempts_list:
            metrics[f"{prefix}_average_num_attempts"] = float(np.mean(self.attempts_list))
        if self.eval_attempts_list:
            metrics[f"{prefix}_eval_retry_rate"] = float(np.mean(self.eval_attempts_list))
        return metrics

    # -- health -----------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The server's name in messages."""
        return self.config.base_url or OFFICIAL_API_HOST

    @property
    def server_healthy(self) -> bool:
        """Whether requests may be sent now."""
        return self._server_healthy

    @server_healthy.setter
    def server_healthy(self, healthy: bool) -> None:
        changed = healthy != self._server_healthy
        self._server_healthy = healthy
        if changed and hasattr(self, "health_changed"):  # absent while a subclass has not called this constructor
            self.health_changed.notify_all()

    def is_watched(self) -> bool:
        """Whether health is checked: a server without a check is always taken to be up."""
        return self.config.health_check and bool(self.config.base_url)

    def effective_base_url(self) -> str | None:
        """Where requests go."""
        return self.config.base_url

    async def watch_health(self, probe: Callable[[], Awaitable[bool]]) -> None:
        """Ask ``probe`` now and then while the server is up, and with growing pauses while it is down."""
        pause = self.FIRST_RECOVERY_CHECK_S
        while True:
            if self.server_healthy:
                pause = self.FIRST_RECOVERY_CHECK_S
                await self.health_changed.wait(self.HEALTHY_CHECK_INTERVAL_S)
                if self.server_healthy and time.monotonic() - self._last_contact < self.HEALTHY_CHECK_INTERVAL_S:
                    continue
            else:
                await asyncio.sleep(pause)
                pause = min(pause * 2, self.MAX_RECOVERY_CHECK_S)
            if await probe():
                self._mark_up()
            else:
                self._mark_down("its health check failed")

    def _mark_up(self) -> None:
        self._last_contact = time.monotonic()
        if not self.server_healthy:
            logger.info("inference server %s is up again", self.label)
            self.server_healthy = True

    def _mark_down(self, reason: str) -> None:
        if not self.server_healthy:
            return
        self.last_failure = reason
        if self.is_watched():
            logger.warning("inference server %s is down (%s); waiting for it to come back", self.label, reason)
            self.server_healthy = False

    async def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self.config.server_wait_s
        while not self.server_healthy:
            left = deadline - time.monotonic()
            if left <= 0 or can_fail_over.get():
                waited = "" if can_fail_over.get() else f" for {self.config.server_wait_s:g} s"
                raise InferenceUnavailableError(
                    f"inference server {self.label} (model {self.config.model_name!r}) has been down{waited}; "
                    f"last failure: {self.last_failure or 'marked unhealthy'}; "
                    "start it, correct base_url, or raise server_wait_s",
                    url=self.label,
                    retryable=True,
                )
            await self.health_changed.wait(left)

    # -- one request ------------------------------------------------------------------------------------------------

    async def _request(
        self, wrapper: Callable[..., Awaitable[Reply]], kwargs: dict[str, Any], chat: bool = False
    ) -> Reply:
        kwargs["model"] = self.config.model_name
        is_train = kwargs.pop("split", "train") == "train"
        self.start_watching(chat)
        started, attempts, failures = time.monotonic(), 0, Counter[str]()
        try:
            while True:
                await self._wait_until_healthy()
                async with self._slot(is_train):
                    attempts += 1
                    try:
                        reply = await wrapper(**kwargs)
                        self._last_contact = time.monotonic()
                        return reply
                    except Exception as error:  # boundary: whatever the backend raised is retried or passed on
                        self._note_failure(error)
                        failures[failure_kind(error)] += 1
                        if not self._may_retry(failures, started):
                            raise
                        failure = error
                logger.debug("attempt %d at %s failed: %s", attempts, self.label, failure)
                if self.server_healthy:
                    await asyncio.sleep(self._backoff_s(attempts, getattr(failure, "retry_after_s", None)))
        finally:
            if attempts:
                self._record(time.monotonic() - started, attempts, is_train)

    def _may_retry(self, failures: Counter[str], started: float) -> bool:
        if (
            failures["final"]
            or failures["failed"] >= self.MAX_ATTEMPTS
            or failures["lost"] >= self.MAX_LOST_CONNECTIONS
        ):
            return False
        return not failures["busy"] or time.monotonic() - started < self.config.server_wait_s

    def _slot(self, is_train: bool) -> AbstractAsyncContextManager[Any]:
        if not is_train:
            return self.eval_sem
        held = held_slot.get()
        # Inside `dedicated_server` one slot is already ours; waiting for a second one could wait for ever.
        if held is not None and held.server is self and (not held.lock.locked() or self.sem.locked()):
            return held.lock
        return self.sem

    def start_watching(self, chat: bool = True) -> None:
        """Start the health check, once per event loop."""
        loop = asyncio.get_running_loop()
        if self.initialized and (self.check_task is None or self.check_task.get_loop() is loop):
            return
        self.initialized = True
        if self.is_watched():
            self.check_task = loop.create_task(self.check_server_status_task(chat_completion=chat))

    def _note_failure(self, error: Exception) -> None:
        reason = str(error)
        refused = isinstance(error, InferenceUnavailableError | ConnectionRefusedError)
        if refused:
            self._mark_down(reason)
        elif is_retryable(error) and not is_busy(error):
            self.last_failure, self._last_contact = reason, 0.0
            self.health_changed.notify_all()  # look now: the server may be dying

    def _backoff_s(self, attempts: int, asked_s: float | None) -> float:
        longest: float = min(self.MAX_BACKOFF_S, self.FIRST_BACKOFF_S * 2**attempts)
        return max(random.uniform(self.FIRST_BACKOFF_S / 2, longest), min(asked_s or 0.0, self.MAX_RETRY_AFTER_S))

    def _record(self, seconds: float, attempts: int, is_train: bool) -> None:
        (self.request_timings if is_train else self.eval_request_timings).append(seconds)
        (self.attempts_list if is_train else self.eval_attempts_list).append(attempts)

    def _inject_reasoning_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        skip = kwargs.pop("skip_reasoning", False)
        if skip or self.reasoning_config is None or not self.reasoning_config.is_reasoning_kwargs_active():
            return kwargs
        base_url = self.effective_base_url()
        extra = self.reasoning_config.build_extra_body(base_url)
        kwargs["extra_body"] = {**(kwargs.get("extra_body") or {}), **(extra or {})}
        if base_url and OFFICIAL_API_HOST in base_url:
            kwargs["temperature"] = 1.0
            if kwargs.get("max_tokens"):
                kwargs["max_completion_tokens"] = kwargs.pop("max_tokens")
        return kwargs
