"""Any task of reasoning-gym by name: puzzles made on the fly, scored by the task itself.

python examples/environments/reasoning_gym_tasks.py serve --env.task_name leg_counting
"""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.scored_rollout import scored_item
from atroposlib.errors import ConfigError, unknown_name_message

SYSTEM = "Think first. Then give nothing but the final answer between <answer> and </answer>."
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymConfig(BaseEnvConfig):
    """What can be set beside the usual."""

    task_name: str = "basic_arithmetic"
    task_settings: dict[str, Any] = Field(default_factory=dict)
    num_problems: int = 1000
    num_eval_problems: int = 32
    seed: int = 0


class ReasoningGymEnv(BaseEnv):
    """The task's own score between 0 and 1."""

    name = "reasoning_gym"
    env_config_cls = ReasoningGymConfig

    @classmethod
    def config_init(cls) -> tuple[ReasoningGymConfig, list[APIServerConfig]]:
        config = ReasoningGymConfig(group_size=8, max_token_length=1024, use_wandb=False)
        return config, [APIServerConfig(model_name="default", base_url="http://localhost:9004/v1", server_type="vllm")]

    async def setup(self) -> None:
        self.problems = await asyncio.to_thread(self.load, self.config.seed, self.config.num_problems)
        self.test_problems = await asyncio.to_thread(self.load, self.config.seed + 1, self.config.num_eval_problems)
        self.random = random.Random(self.config.seed)

    def load(self, seed: int, size: int) -> Any:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        name = self.config.task_name
        if name not in DATASETS:
            raise ConfigError(unknown_name_message("reasoning-gym task", name, DATASETS))
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **self.config.task_settings)

    async def get_next_item(self) -> int:
        return self.random.randrange(len(self.problems))

    def prompt(self, entry: dict[str, Any]) -> list[dict[str, str]]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": entry["question"]}]

    @staticmethod
    def score(problems: Any, text: str, entry: dict[str, Any]) -> float:
        found = ANSWER.findall(text)
        return float(problems.score_answer(answer=found[-1].strip() if found else None, entry=entry))

    async def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:
        entry = self.problems[item]
        messages = self.prompt(entry)
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=messages, max_tokens=self.config.max_token_length, temperature=1.0
            )
            node = managed.get_state()["nodes"][0]
        text = reply.choices[0].message.content or ""
        score = self.score(self.problems, text, entry)
        return scored_item(node, score, messages=[*messages, {"role": "assistant", "content": text}]), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        async def one(entry: dict[str, Any]) -> float:
            reply = await self.server.chat_completion(
                messages=self.prompt(entry), max_tokens=1024, temperature=0.0, split="eval"
            )
            return self.score(self.test_problems, reply.choices[0].message.content or "", entry)

        scores = await self.gather_eval(one(entry) for entry in self.test_problems)
        await self.evaluate_log({f"eval/{self.config.task_name}": sum(scores) / len(scores)})


if __name__ == "__main__":
    ReasoningGymEnv.cli()
