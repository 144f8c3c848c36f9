"""`EnvClient` and `TrainerClient`: the only code that knows the rollout server's URLs.

Both carry on over a server restart: connection errors and 5xx answers are tried again with growing pauses; a server that
came back without its memory (`--in-memory`) is registered with again. A 4xx answer is final and raises `RolloutRejectedError`.
Groups carry an id, so a repeated submission is stored once; batches are asked for by number, so none is missed or seen twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import zstandard

from atroposlib.api import binary
from atroposlib.api.client_http import BackOff, HttpReply, SyncHttp, describe
from atroposlib.api.schemas import BINARY_TYPE
from atroposlib.errors import RolloutRejectedError, RolloutServerUnavailableError

logger = logging.getLogger(__name__)

_OFF_LOOP_TOKENS = 4096  # groups larger than this are encoded on a thread


@dataclass(kw_only=True, slots=True)
class Batch:
    """A batch as the trainer gets it."""

    seq: int
    groups: list[dict[str, Any]]
    """Group dicts with the 14 keys; per-token fields are lists of numpy arrays or of lists."""
    group_ids: list[str] = field(default_factory=list)


def _token(token: str | None) -> str | None:
    return token if token is not None else os.environ.get("ATROPOS_TOKEN") or None


# ---- environments -------------------------------------------------------------------------------------------------------


class EnvClient:
    """An environment's line to the rollout server; one per environment process, used from one event loop.

    Example::

        client = EnvClient("http://localhost:8000")
        reply = await client.register(name="gsm8k", max_token_length=2048, weight=1.0, group_size=8)
        await client.submit({"tokens": [...], "masks": [...], "scores": [...]})
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        request_timeout_s: float = 60.0,
        give_up_after_s: float | None = None,
        use_binary: bool = True,
        compress: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self.env_id: int | None = None
        self._token = _token(token)
        self._timeout = aiohttp.ClientTimeout(total=request_timeout_s)
        self._give_up_after_s = give_up_after_s
        self._use_binary = use_binary
        self._compress = compress
        self._session: aiohttp.ClientSession | None = None
        self._registration: dict[str, Any] | None = None
        self._speaks_binary: bool | None = None
        self._rejoining = asyncio.Lock()

    # ---- calls --------------------------------------------------------------------------------------------------------

    async def register(
        self,
        *,
        name: str | None,
        max_token_length: int,
        weight: float,
        group_size: int,
        min_batch_allocation: float | None = None,
    ) -> dict[str, Any]:
        """One try of `/register-env`; the reply's status may be "wait for trainer to start"."""
        request = {
            "desired_name": name or "env",
            "max_token_length": max_token_length,
            "weight": weight,
            "group_size": group_size,
            "min_batch_allocation": min_batch_allocation,
        }
        reply = self._checked(await self._once("POST", "/register-env", json=request), "/register-env")
        if reply.get("status") == "success":
            self._registration = request
            self.env_id = int(reply["env_id"])
        return reply

    async def status(self) -> dict[str, Any]:
        """`/status-env` of this environment."""

        async def ask() -> HttpReply:
            return await self._once("GET", "/status-env", json={"env_id": self.env_id})

        return self._checked(await self._until_answered("/status-env", ask), "/status-env")

    async def info(self) -> dict[str, Any]:
        """Batch size and longest sequence of the trainer."""
        return await self._get("/info")

    async def wandb_info(self) -> dict[str, Any]:
        """Where the trainer logs."""
        return await self._get("/wandb_info")

    async def submit(self, groups: dict[str, Any] | list[dict[str, Any]]) -> dict[str, Any]:
        """Hand over one group or several, for good: returns when the server has them.

        RolloutRejectedError when it refuses them; RolloutServerUnavailableError after `give_up_after_s` without a server.
        """
        many = isinstance(groups, list)
        items = [dict(group) for group in (groups if isinstance(groups, list) else [groups])]
        for item in items:
            item["group_id"] = item.get("group_id") or uuid.uuid4().hex
        path = "/scored_data_list" if many else "/scored_data"
        named = [item for item in items if item.get("env_id") is None or item["env_id"] == self.env_id]

        async def send() -> HttpReply:
            for item in named:
                item["env_id"] = self.env_id
            body, content_type = await self._encode(items, many=many)
            headers = {"content-type": content_type}
            if self._compress:
                body = await asyncio.to_thread(zstandard.ZstdCompressor(level=1).compress, body)
                headers["content-encoding"] = "zstd"
            return await self._once("POST", path, data=body, headers=headers)

        return self._checked(await self._until_answered(path, send), path)

    async def heartbeat(self) -> None:
        """Tell the server that this environment is alive."""

        async def beat() -> HttpReply:
            return await self._once("POST", "/heartbeat", json={"env_id": self.env_id})

        self._checked(await self._until_answered("/heartbeat", beat), "/heartbeat")

    async def disconnect(self) -> None:
        """Tell the server that this environment leaves; a server that is not there is not waited for."""
        if self.env_id is None:
            return
        try:
            await self._once("POST", "/disconnect-env", json={"env_id": self.env_id})
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.info("could not say goodbye to the rollout server: %s", describe(error))

    async def report(self, source: str, step: int, metrics: dict[str, float]) -> None:
        """Numbers for the live page; one try, as they are not worth waiting for."""
        request = {"source": source, "step": step, "time": time.time(), "metrics": metrics}
        try:
            _note_refusal(await self._once("POST", "/report", json=request))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.info("could not report metrics: %s", describe(error))

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ---- how ----------------------------------------------------------------------------------------------------------

    async def _get(self, path: str) -> dict[str, Any]:
        return self._checked(await self._until_answered(path, lambda: self._once("GET", path)), path)

    async def _once(self, method: str, path: str, **options: Any) -> HttpReply:
        if self._session is None:
            headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
            self._session = aiohttp.ClientSession(headers=headers, timeout=self._timeout)
        async with self._session.request(method, self.url + path, **options) as reply:
            return HttpReply(reply.status, await reply.read())

    async def _until_answered(self, path: str, call: Callable[[], Awaitable[HttpReply]]) -> HttpReply:
        """Repeat until the answer is final. A server that does not know this environment any more is registered with again."""
        back_off = BackOff(self.url + path, self._give_up_after_s)
        while True:
            try:
                reply = await call()
                if reply.status == 404 and b"not known here" in reply.body and self._registration is not None:
                    if await self._rejoin():
                        continue
                    problem = "the server started afresh and waits for its trainer"
                elif reply.status < 500:
                    return reply
                else:
                    problem = f"answer {reply.status}: {reply.text()[:200]}"
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                problem = describe(error)
            await asyncio.sleep(back_off.pause(problem))

    async def _rejoin(self) -> bool:
        """Register again with a server that lost its memory; False while that waits for its trainer."""
        async with self._rejoining:
            registration = self._registration
            assert registration is not None
            probe = await self._once("GET", f"/status-env?env_id={self.env_id}")
            if probe.status == 200:
                return True
            reply = await self._once("POST", "/register-env", json=registration)
            answer = reply.json() if reply.status == 200 else {}
            if answer.get("status") == "success":
                self.env_id = int(answer["env_id"])
                logger.info("the rollout server started afresh; registered again as %s", answer.get("wandb_name"))
                return True
            return False

    async def _encode(self, items: list[dict[str, Any]], *, many: bool) -> tuple[bytes, str]:
        if self._speaks_binary is None:
            self._speaks_binary = self._use_binary and await self._offers_binary()
        speaks = self._speaks_binary
        if sum(len(row) for item in items for row in item.get("tokens") or ()) > _OFF_LOOP_TOKENS:
            return await asyncio.to_thread(encode_groups, items, many=many, prefer_binary=speaks)
        return encode_groups(items, many=many, prefer_binary=speaks)

    async def _offers_binary(self) -> bool:
        reply = await self._once("GET", "/healthz")
        return reply.status == 200 and BINARY_TYPE.encode() in reply.body

    def _checked(self, reply: HttpReply, path: str) -> dict[str, Any]:
        return reply.checked(self.url + path)


def _note_refusal(reply: HttpReply) -> None:
    """Metrics are never worth an error, but somebody may look for them."""
    if reply.status >= 400:
        logger.info("/report refused with %d: %s", reply.status, reply.text()[:500])


def encode_groups(items: list[dict[str, Any]], *, many: bool, prefer_binary: bool) -> tuple[bytes, str]:
    """Body and content type for `/scored_data` or `/scored_data_list`; what does not fit the binary form goes as JSON."""
    if prefer_binary:
        try:
            parts = [binary.encode_group(item) for item in items]
            return (binary.join_groups(parts) if many else parts[0]), BINARY_TYPE
        except (TypeError, ValueError, OverflowError, KeyError) as error:
            logger.debug("sending JSON: the group does not fit the binary form (%s)", error)
    return msgspec.json.encode(items if many else items[0], enc_hook=_plain), "application/json"


def _plain(value: Any) -> Any:
    """numpy values and other sequences as plain lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise TypeError(f"a group holds a {type(value).__name__}, which cannot be sent")


# ---- trainers -----------------------------------------------------------------------------------------------------------


class TrainerClient:
    """A trainer's line to the rollout server. Blocking; threads may share it.

    Example::

        client = TrainerClient("http://localhost:8000")
        client.register(batch_size=64, max_token_len=2048, num_steps=1000, checkpoint_dir="out", save_checkpoint_interval=100)
        while (batch := client.next_batch()) is not None:
            train(batch.groups)
            client.ack(batch.seq)
            ...                                    # after saving a checkpoint:
            client.commit(batch.seq, step)
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        request_timeout_s: float = 300.0,
        give_up_after_s: float | None = None,
        poll_interval_s: float = 0.05,
        max_poll_interval_s: float = 1.0,
        use_binary: bool = True,
    ) -> None:
        self.url = url.rstrip("/")
        self.poll_interval_s, self.max_poll_interval_s = poll_interval_s, max_poll_interval_s
        self._give_up_after_s = give_up_after_s
        self._http = SyncHttp(self.url, token=_token(token), timeout_s=request_timeout_s)
        self._accept = {"accept": f"{BINARY_TYPE}, application/json" if use_binary else "application/json"}
        self._registration: dict[str, Any] | None = None
        self._after: int | None = None
        self._received = 0  # batches since register()
        self._lock = threading.Lock()

    def register(
        self,
        *,
        batch_size: int,
        max_token_len: int,
        num_steps: int,
        checkpoint_dir: str,
        save_checkpoint_interval: int,
        starting_step: int = 0,
        wandb_group: str = "",
        wandb_project: str = "",
        resume_after: int | None = None,
    ) -> int:
        """Announce the trainer; returns the server's id for it. `resume_after`: the batch number its checkpoint contains."""
        request = {
            "batch_size": batch_size,
            "max_token_len": max_token_len,
            "num_steps": num_steps,
            "checkpoint_dir": checkpoint_dir,
            "save_checkpoint_interval": save_checkpoint_interval,
            "starting_step": starting_step,
            "wandb_group": wandb_group,
            "wandb_project": wandb_project,
            "resume_after": resume_after,
        }
        reply = self._call("POST", "/register", request)
        with self._lock:
            self._registration = request
            self._after = resume_after
            self._received = 0
        return int(reply["uuid"])

    def next_batch(self, *, timeout_s: float | None = None) -> Batch | None:
        """The batch after the last one this client got; waits for it. None when `timeout_s` passed without one."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause = self.poll_interval_s
        while True:
            batch = self._ask(deadline)
            if batch is not None:
                return batch
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                pause = min(pause, left)
            time.sleep(pause)
            pause = min(self.max_poll_interval_s, pause * 1.5)

    def _ask(self, deadline: float | None) -> Batch | None:
        with self._lock:
            position = "" if self._after is None else f"&after={self._after}"
            reply = self._until_answered("GET", f"/batch?client=ours{position}", None, deadline)
            if reply is None:
                return None
            if reply.is_binary():
                seq, groups, ids = binary.decode_batch(reply.body)
            else:
                answer = reply.checked(self.url + "/batch")
                if answer.get("status") == "error":
                    self._register_again()
                    return None
                seq, groups, ids = answer.get("batch_seq"), answer["batch"], answer.get("group_ids", [])
            if groups is None:
                return None
            # A server that numbers no batches hands out each once; count for it.
            number = seq if seq is not None else (self._after or 0) + 1
            self._after = number
            self._received += 1
            return Batch(seq=number, groups=groups, group_ids=ids)

    def _register_again(self) -> None:
        """The server came back without its memory: say again who we are and where we were."""
        if self._registration is None:
            raise RolloutRejectedError(
                "the trainer is not registered with the rollout server; call register() first", status=409
            )
        logger.info("the rollout server started afresh; registering again")
        step = self._registration["starting_step"] + self._received
        request = {**self._registration, "starting_step": step, "resume_after": self._after or 0}
        self._call("POST", "/register", request)

    def ack(self, seq: int) -> None:
        """This batch and all before it were used."""
        self._position("/ack", {"batch_seq": seq})

    def commit(self, seq: int, step: int) -> None:
        """The checkpoint of `step` contains this batch and all before it."""
        self._position("/commit", {"batch_seq": seq, "step": step})

    def _position(self, path: str, request: dict[str, Any]) -> None:
        try:
            self._call("POST", path, request)
        except RolloutRejectedError as error:
            if error.status not in (404, 409):
                raise
            # The server started afresh (or is one that knows no positions): there is nothing to acknowledge.
            logger.info("%s: %s", path, error.detail)

    def status(self) -> dict[str, Any]:
        """Step and queue size."""
        return self._call("GET", "/status", None)

    def report(self, source: str, step: int, metrics: dict[str, float]) -> bool:
        """Numbers for the live page; False when they did not arrive: they are not worth waiting for, but may be sent again."""
        request = {"source": source, "step": step, "time": time.time(), "metrics": metrics}
        for last in (False, True):  # a connection that was idle for long may be closed: once more on a new one
            try:
                reply = self._http.request("POST", "/report", request)
                if reply.status < 500:
                    _note_refusal(reply)
                    return True
                problem = f"answer {reply.status}: {reply.text()[:200]}"
            except OSError as error:
                problem = describe(error)
            if last:
                logger.info("could not report metrics: %s", problem)
        return False

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _call(self, method: str, path: str, request: dict[str, Any] | None) -> dict[str, Any]:
        reply = self._until_answered(method, path, request, None)
        assert reply is not None
        return reply.checked(self.url + path)

    def _until_answered(
        self, method: str, path: str, request: dict[str, Any] | None, deadline: float | None
    ) -> HttpReply | None:
        """Repeat until the answer is final; None when the deadline passed first."""
        back_off = BackOff(self.url + path, self._give_up_after_s)
        while True:
            try:
                reply = self._http.request(method, path, request, self._accept)
                if reply.status < 500:
                    return reply
                problem = f"answer {reply.status}: {reply.text()[:200]}"
            except OSError as error:
                problem = describe(error)
            pause = back_off.pause(problem)
            if deadline is not None and time.monotonic() + pause > deadline:
                time.sleep(max(0.0, deadline - time.monotonic()))
                return None
            time.sleep(pause)


__all__ = [
    "Batch",
    "EnvClient",
    "RolloutRejectedError",
    "RolloutServerUnavailableError",
    "TrainerClient",
    "encode_groups",
]
