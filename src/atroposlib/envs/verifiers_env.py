"""Environments of the ``verifiers`` package as ours.

    this process                                     the environment's own process and virtual environment
    VerifiersEnv ──── group 7, 8 rollouts ─────────▶ verifiers_worker: taskset, harness, rubric
    RecordedEndpoint ◀── model calls, one session ── (streamed or not, any number of turns)
        per rollout: exact tokens
    VerifiersEnv ◀─── reward per rollout ───────────

A reward is joined with tokens by the rollout's id, which travels with every model call; nothing is paired by position.
One recorded sequence is one root-to-leaf branch of the rollout; a rollout with several branches gives several sequences
with the same reward. A rollout that failed is tried again and is never scored 0.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.envs.foreign_env import ForeignEnv
from atroposlib.envs.groups import group_from_items
from atroposlib.envs.scored_rollout import scored_item
from atroposlib.envs.server_handling.managed_sessions import allows_dummy_sessions
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.recorded_endpoint import RecordedEndpoint
from atroposlib.envs.worker_process import WorkerProcess
from atroposlib.errors import ConfigError

logger = logging.getLogger(__name__)

WORKER_FILE = Path(__file__).with_name("verifiers_worker.py")


class VerifiersConfig(BaseEnvConfig):
    """Which environment, where it is installed, how it samples."""

    verifiers_env: str = Field(default="", description="name of the environment, as verifiers knows it")
    verifiers_python: str = Field(
        default=sys.executable, description="Python of the virtual environment it is installed in"
    )
    verifiers_arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="its configuration (current API) or the arguments of load_environment (older API)",
    )
    verifiers_api: str = Field(
        default="auto", description="auto, v1 (tasksets, harnesses, traces) or legacy (load_environment)"
    )
    verifiers_runtime: str | None = Field(
        default="subprocess", description="where harnesses run unless the environment says so"
    )
    verifiers_harness: str | None = Field(default=None, description="harness to use instead of the environment's own")
    tool_parser: str = Field(default="hermes", description="how the model writes tool calls")
    temperature: float = 1.0
    max_rollout_tries: int = Field(default=3, ge=1, description="a rollout that failed is run again, this often in all")
    num_eval_tasks: int = Field(default=16, ge=0, description="tasks kept for evaluation")
    seed: int = 0


class VerifiersEnv(ForeignEnv):
    """Runs groups of one ``verifiers`` environment. Usually started with ``atropos serve-verifiers NAME``."""

    name = "verifiers"
    env_config_cls = VerifiersConfig
    endpoint: Any = None

    @classmethod
    def config_init(cls) -> tuple[VerifiersConfig, list[APIServerConfig]]:
        config = VerifiersConfig(group_size=8, max_token_length=4096, use_wandb=False)
        return config, [APIServerConfig(model_name="default", base_url="http://localhost:9004/v1", server_type="vllm")]

    async def setup(self) -> None:
        require_exact_tokens(self.server.servers)
        model = getattr(getattr(self.server.servers[0], "config", None), "model_name", "default")
        self.endpoint = RecordedEndpoint(
            self.server, self.tokenizer, model_name=model, tool_parser=self.config.tool_parser
        )
        await self.endpoint.start()
        self.worker = self.foreign = WorkerProcess(self._worker_command(model))
        info = await self.foreign.call("info")
        logger.info(
            "%s: %s API, verifiers %s, tasks: %s",
            self.config.verifiers_env,
            info["api"],
            info["version"],
            info["num_tasks"],
        )
        self.train_indices, self.eval_indices = split_tasks(info, self.config.num_eval_tasks, self.config.seed)
        self.rollout_metrics: list[dict[str, float]] = []
        self.num_failed_rollouts = 0

    def _worker_command(self, model: str) -> list[str]:
        endpoint = {
            "base_url": self.endpoint.base_url,
            "model": model,
            "runtime": self.config.verifiers_runtime,
            "harness": self.config.verifiers_harness,
        }
        command = [self.config.verifiers_python, "-u", str(WORKER_FILE), "--env", self.config.verifiers_env]
        return [
            *command,
            "--api",
            self.config.verifiers_api,
            "--arguments",
            json.dumps(self.config.verifiers_arguments),
            "--endpoint",
            json.dumps(endpoint),
        ]

    async def stop(self) -> None:
        """End the worker and the endpoint."""
        await super().stop()
        if self.endpoint is not None:
            await self.endpoint.stop()

    async def get_next_item(self) -> int:
        return next(self.train_indices)

    async def _rollouts(
        self, index: int, n: int, *, split: str = "train", temperature: float | None = None
    ) -> list[tuple[dict[str, Any], list[Any]]]:
        """``n`` rollouts of a task with what each sampled; failed ones are run again, then left out."""
        sampling = {
            "temperature": self.config.temperature if temperature is None else temperature,
            "max_tokens": self.config.max_token_length,
        }
        good: list[tuple[dict[str, Any], list[Any]]] = []
        missing = n
        for _ in range(self.config.max_rollout_tries):
            rollouts = await self.foreign.call("group", index=index, n=missing, split=split, sampling=sampling)
            recorded = [(rollout, self.endpoint.take(rollout["session"])) for rollout in rollouts]
            for rollout, nodes in recorded:
                if rollout["error"] is None and not nodes:
                    rollout["error"] = "no model call was recorded under its id; its client must send X-Session-ID"
            good += [(rollout, nodes) for rollout, nodes in recorded if rollout["error"] is None]
            failures = [rollout for rollout, _ in recorded if rollout["error"] is not None]
            self._note_failures(failures)
            missing = len(failures)
            if not missing:
                break
        return good

    def _note_failures(self, failures: list[dict[str, Any]]) -> None:
        self.num_failed_rollouts += len(failures)
        for reason in sorted({str(rollout["error"])[:500] for rollout in failures}):
            logger.warning(
                "a rollout of %s failed (%d so far): %s", self.config.verifiers_env, self.num_failed_rollouts, reason
            )

    async def collect_trajectories(self, item: int) -> tuple[Any, list[Any]]:
        rollouts = await self._rollouts(item, self.config.group_size)
        items = [scored_item(node, rollout["reward"]) for rollout, nodes in rollouts for node in nodes]
        if len(rollouts) < self.config.group_size or not items:
            return None, []
        self.rollout_metrics += [rollout["metrics"] for rollout, _ in rollouts]
        group: Any = group_from_items(items)  # type: ignore[arg-type]  # plain dicts with the keys of ScoredDataItem
        group["messages"] = None
        if len(items) != self.config.group_size:
            group["group_overrides"] = {**(group.get("group_overrides") or {}), "group_size": len(items)}
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        results = await self.gather_eval(
            self._rollouts(index, 1, split="eval", temperature=0.0) for index in self.eval_indices
        )
        rewards = [rollout["reward"] for rollouts in results for rollout, _ in rollouts]
        if rewards:
            await self.evaluate_log({"eval/reward": sum(rewards) / len(rewards), "eval/num_rollouts": len(rewards)})

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = dict(wandb_metrics or {})
        for name in sorted({key for values in self.rollout_metrics for key in values}):
            known = [values[name] for values in self.rollout_metrics if name in values]
            metrics[f"train/{name}"] = sum(known) / len(known)
        metrics["train/num_failed_rollouts"] = self.num_failed_rollouts
        self.rollout_metrics = []
        await super().wandb_log(metrics)


def require_exact_tokens(servers: list[Any]) -> None:
    """Refuse servers that give no token ids: what is recorded there could not be trained on."""
    without = [server for server in servers if isinstance(server, OpenAIServer)]
    if without and not allows_dummy_sessions():
        raise ConfigError(
            f"{without[0].label} gives no exact tokens (server_type 'openai'); set --openai.server_type to vllm or sglang if it is "
            "one of those, or ATROPOS_ALLOW_DUMMY_MANAGED_SERVER=1 to evaluate with placeholder tokens"
        )


def split_tasks(info: dict[str, Any], num_eval_tasks: int, seed: int) -> tuple[Iterator[int], list[int]]:
    """Endless training indices in random order, and indices for evaluation.

    An environment with evaluation data of its own is evaluated on that; otherwise up to a quarter of its tasks is set
    aside. An endless task set is counted through from the start.
    """
    total, of_eval = info["num_tasks"], info["num_eval_tasks"]
    if total is None:
        return itertools.count(num_eval_tasks), list(range(num_eval_tasks))
    if total == 0:
        raise ValueError("the environment has no tasks")
    if info["api"] == "legacy" and of_eval != total:
        return _shuffled_forever(list(range(total)), seed), list(range(min(num_eval_tasks, of_eval or 0)))
    kept = min(num_eval_tasks, total // 4)
    return _shuffled_forever(list(range(kept, total)), seed), list(range(kept))


def _shuffled_forever(indices: list[int], seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        rng.shuffle(indices)
        yield from indices
