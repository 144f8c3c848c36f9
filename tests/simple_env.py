"""A small environment and an in-memory rollout client, for tests that steer the loop step by step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from atroposlib.envs.base import BaseEnv
from atroposlib.errors import RolloutRejectedError, RolloutServerUnavailableError


class RecordingClient:
    """Stands where ``EnvClient`` stands: keeps what it is given and answers what the test sets."""

    def __init__(
        self, *, batch_size: int = 8, max_token_len: int = 512, checkpoint_dir: str = "", checkpoint_interval: int = -1
    ) -> None:
        self.groups: list[dict[str, Any]] = []
        self.submissions: list[Any] = []
        self.registrations: list[dict[str, Any]] = []
        self.reports: list[tuple[str, int, dict[str, float]]] = []
        self.batch_size, self.max_token_len = batch_size, max_token_len
        self.checkpoint_dir, self.checkpoint_interval = checkpoint_dir, checkpoint_interval
        self.step, self.starting_step, self.num_steps = 0, 0, 100
        self.queue_size = 0
        self.env_weight = 1.0
        self.waits_for_trainer = 0
        self.unreachable = 0
        self.forgets = 0
        self.refuse: int | None = None
        self.disconnected = False
        self.num_statuses = 0

    async def register(self, **settings: Any) -> dict[str, Any]:
        self.registrations.append(settings)
        if self.unreachable > 0:
            self.unreachable -= 1
            raise RolloutServerUnavailableError("connection refused")
        if self.waits_for_trainer > 0:
            self.waits_for_trainer -= 1
            return {"status": "wait for trainer to start"}
        return {
            "status": "success",
            "env_id": len(self.registrations) - 1,
            "wandb_name": f"{settings['name']}_0",
            "checkpoint_dir": self.checkpoint_dir,
            "starting_step": self.starting_step,
            "checkpoint_interval": self.checkpoint_interval,
            "num_steps": self.num_steps,
        }

    async def status(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        self.num_statuses += 1
        if self.unreachable > 0:
            self.unreachable -= 1
            raise RolloutServerUnavailableError("connection refused")
        if self.forgets > 0:
            self.forgets -= 1
            raise RolloutRejectedError("unknown env_id", status=404, detail="unknown env_id")
        return {
            "current_step": self.step,
            "queue_size": self.queue_size,
            "self_queue_size": self.queue_size,
            "unallocated_fraction": 1.0,
            "max_group_size": 1,
            "env_weight": self.env_weight,
        }

    async def info(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "max_token_len": self.max_token_len}

    async def wandb_info(self) -> dict[str, Any]:
        return {"group": "g", "project": "p"}

    async def submit(self, groups: Any) -> dict[str, Any]:
        batch = groups if isinstance(groups, list) else [groups]
        if self.refuse is not None and any(group.get("bad") for group in batch):
            raise RolloutRejectedError("refused", status=self.refuse, detail="masks have another length than tokens")
        self.submissions.append(groups)
        self.groups.extend(batch)
        return {"status": "received"}

    async def report(self, source: str, step: int, metrics: dict[str, float]) -> None:
        self.reports.append((source, step, metrics))

    async def heartbeat(self) -> None:
        return None

    async def disconnect(self) -> None:
        self.disconnected = True

    async def aclose(self) -> None:
        return None


class NumbersEnv(BaseEnv):
    """Items are 0, 1, 2, ...; a rollout is the number's text, its score alternates."""

    name = "numbers"

    def __init__(self, config: Any, server_configs: Any, slurm: bool = True, testing: bool = False) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.position = 0
        self.rollouts = 0
        self.running = 0
        self.most_running = 0
        self.rollout_s = 0.0
        self.evaluations: list[int] = []
        self.calls: list[str] = []

    async def setup(self) -> None:
        self.calls.append("setup")

    async def get_next_item(self) -> Any:
        self.position += 1
        return self.position - 1

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        self.rollouts += 1
        score = float(self.rollouts % 2)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.rollout_s)
        finally:
            self.running -= 1
        tokens = self.tokenizer.encode(f"item {item}")
        return {"tokens": tokens, "masks": [-100, *tokens[1:]], "scores": score}, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.evaluations.append(self.curr_step)


def make_env(
    tokenizer_dir: Path, client: RecordingClient | None = None, env_class: type[BaseEnv] = NumbersEnv, **settings: Any
) -> Any:
    """An environment on the tiny tokenizer with the in-process harness as its inference server."""
    values: dict[str, Any] = {
        "group_size": 2,
        "tokenizer_name": str(tokenizer_dir),
        "use_wandb": False,
        "max_num_workers": 4,
        **settings,
    }
    env: Any = env_class(config=env_class.env_config_cls(**values), server_configs=[], slurm=False, testing=True)
    if client is not None:
        env._rollout_client = client
    return env


async def some_rounds(client: RecordingClient, count: int = 5) -> None:
    """Let the loop look at the rollout server ``count`` more times."""
    target = client.num_statuses + count
    await wait_until(lambda: client.num_statuses >= target)


async def some_groups(client: RecordingClient, count: int) -> None:
    """Let ``count`` more groups arrive."""
    target = len(client.groups) + count
    await wait_until(lambda: len(client.groups) >= target)


async def wait_until(condition: Any, timeout_s: float = 10.0) -> None:
    """Poll until ``condition()`` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
