"""Any gymnasium environment that can be put into words, as one of ours.

The environment lives in its own process and virtual environment (``gym_worker``); the conversation lives here, one
``ManagedServer`` session per episode. Text observations are shown as they are, others as the environment draws them
(``ansi``) or as JSON. Actions are text, a number, a name, or JSON, between ``<action>`` and ``</action>``.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.envs.foreign_env import ForeignEnv
from atroposlib.envs.scored_rollout import scored_item
from atroposlib.envs.worker_process import WorkerProcess

WORKER_FILE = Path(__file__).with_name("gym_worker.py")
NO_ACTION: dict[str, Any] = {"text": "Answer with <action>...</action>.", "reward": 0.0, "done": False, "valid": False}
ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


class GymConfig(BaseEnvConfig):
    """Which environment, where it is installed, how it is played."""

    gym_id: str = Field(default="", description="gymnasium id, e.g. FrozenLake-v1")
    gym_python: str = Field(default=sys.executable, description="Python of the virtual environment it is installed in")
    gym_arguments: dict[str, Any] = Field(default_factory=dict, description="arguments of gymnasium.make")
    gym_module: str | None = Field(default=None, description="a module whose import registers the environment")
    action_names: list[str] = Field(default_factory=list, description="names of discrete actions 0, 1, 2, ...")
    instructions: str = Field(
        default="You play a game. Reach the highest score.", description="what the model is told first"
    )
    max_turns: int = Field(default=20, ge=1)
    max_invalid_actions: int = Field(default=3, ge=1, description="an episode with more of them ends")
    invalid_action_penalty: float = -0.1
    max_tokens_per_turn: int = 256
    temperature: float = 1.0
    first_seed: int = 0
    num_eval_episodes: int = 16


@dataclass(kw_only=True, slots=True)
class Episode:
    """One game in progress."""

    number: int
    messages: list[dict[str, str]]
    game_reward: float = 0.0
    num_invalid: int = 0


class GymEnv(ForeignEnv):
    """The sum of the environment's rewards; every rollout of a group starts from the same seed."""

    name = "gym"
    env_config_cls = GymConfig

    @classmethod
    def config_init(cls) -> tuple[GymConfig, list[APIServerConfig]]:
        config = GymConfig(group_size=8, max_token_length=4096, use_wandb=False)
        return config, [APIServerConfig(model_name="default", base_url="http://localhost:9004/v1", server_type="vllm")]

    async def setup(self) -> None:
        self.worker = self.game = WorkerProcess(self._worker_command())
        self.system_prompt = describe_actions(self.config.instructions, await self.game.call("info"))
        self.seeds: Iterator[int] = itertools.count(self.config.first_seed)

    def _worker_command(self) -> list[str]:
        command = [self.config.gym_python, "-u", str(WORKER_FILE), "--env", self.config.gym_id]
        command += [
            "--arguments",
            json.dumps(self.config.gym_arguments),
            "--actions",
            json.dumps(self.config.action_names),
        ]
        return [*command, *(["--import-module", self.config.gym_module] if self.config.gym_module else [])]

    async def get_next_item(self) -> int:
        return next(self.seeds)

    async def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:
        start = await self.game.call("reset", seed=item)
        opening = [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": start["text"]}]
        episode = Episode(number=start["episode"], messages=opening)
        try:
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                for _ in range(self.config.max_turns):
                    if await self._turn(managed, episode):
                        break
                node = managed.get_state()["nodes"][-1]
        finally:
            await self.game.call("close", episode=episode.number)
        parts = {"game": episode.game_reward, "invalid": self.config.invalid_action_penalty * episode.num_invalid}
        return scored_item(node, sum(parts.values()), messages=episode.messages, reward_components=parts), []

    async def _turn(self, managed: Any, episode: Episode) -> bool:
        """One answer and what came of it; True when the episode is over."""
        reply = await managed.chat_completion(
            messages=episode.messages, max_tokens=self.config.max_tokens_per_turn, temperature=self.config.temperature
        )
        text = reply.choices[0].message.content or ""
        episode.messages.append({"role": "assistant", "content": text})
        found = ACTION.findall(text)
        result = (
            dict(NO_ACTION) if not found else await self.game.call("step", episode=episode.number, action=found[-1])
        )
        episode.game_reward += result["reward"]
        episode.num_invalid += not result["valid"]
        if result["done"] or episode.num_invalid >= self.config.max_invalid_actions:
            return True
        episode.messages.append({"role": "user", "content": result["text"]})
        return False

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        seeds = range(1_000_000, 1_000_000 + self.config.num_eval_episodes)
        rollouts = await self.gather_eval(self.collect_trajectory(seed) for seed in seeds)
        scores = [rollout["reward_components"]["game"] for rollout, _ in rollouts]
        await self.evaluate_log({"eval/return": sum(scores) / max(1, len(scores))})


def describe_actions(instructions: str, info: dict[str, Any]) -> str:
    """The system prompt: the instructions and what an action looks like."""
    if info["action_kind"] == "text":
        how = "Each turn answer with <action>your text</action>."
    elif info["action_names"]:
        how = f"Each turn answer with <action>NAME</action>, NAME being one of: {', '.join(info['action_names'])}."
    elif info["action_kind"] == "discrete":
        how = f"Each turn answer with <action>NUMBER</action>, NUMBER from {info['action_space']}."
    else:
        how = f"Each turn answer with <action>JSON</action>, JSON from {info['action_space']}."
    return f"{instructions}\n{how}"
