"""Any data set with named reward functions: a local JSON lines file, or a data set of the Hugging Face hub.

python examples/environments/dataset_rewards.py serve --env.dataset my.jsonl --env.prompt_field question --env.answer_field answer
python examples/environments/dataset_rewards.py serve --env.dataset openai/gsm8k --env.subset main --env.reward_functions accuracy format
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import Any

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.reward_fns import registry
from atroposlib.envs.scored_rollout import scored_item
from atroposlib.errors import ConfigError

EXAMPLE_DATA = Path(__file__).with_name("questions.jsonl")


class DatasetConfig(BaseEnvConfig):
    """What can be set beside the usual."""

    dataset: str = str(EXAMPLE_DATA)
    subset: str | None = None
    split: str = "train"
    prompt_field: str = "question"
    answer_field: str = "answer"
    system_prompt: str = "Think between <think> and </think>, then answer with \\boxed{...}."
    reward_functions: list[str] = Field(default_factory=lambda: ["accuracy", "format"])
    reward_weights: list[float] = Field(default_factory=lambda: [1.0, 0.2])
    num_eval_rows: int = 16
    seed: int = 0


def load_rows(config: DatasetConfig) -> list[dict[str, Any]]:
    """The rows of a local file or of the hub, checked for the two fields."""
    if Path(config.dataset).suffix in (".jsonl", ".json"):
        rows = [
            json.loads(line) for line in Path(config.dataset).read_text(encoding="utf-8").splitlines() if line.strip()
        ]
    else:
        from datasets import load_dataset

        rows = list(load_dataset(config.dataset, config.subset, split=config.split))
    for field in (config.prompt_field, config.answer_field):
        if not rows or field not in rows[0]:
            known = ", ".join(rows[0]) if rows else "no rows at all"
            raise ConfigError(
                f"{config.dataset} has no field {field!r} (it has: {known}); set prompt_field and answer_field"
            )
    return rows


class DatasetRewardsEnv(BaseEnv):
    """The weighted sum of the named rewards; a rollout whose reward failed takes its group with it."""

    name = "dataset_rewards"
    env_config_cls = DatasetConfig

    @classmethod
    def config_init(cls) -> tuple[DatasetConfig, list[APIServerConfig]]:
        config = DatasetConfig(group_size=8, max_token_length=1024, use_wandb=False)
        return config, [APIServerConfig(model_name="default", base_url="http://localhost:9004/v1", server_type="vllm")]

    async def setup(self) -> None:
        weights = itertools.chain(self.config.reward_weights, itertools.repeat(1.0))
        pairs = zip(self.config.reward_functions, weights, strict=False)
        self.rewards = {name: registry.create(name, weight=weight) for name, weight in pairs}
        rows = await asyncio.to_thread(load_rows, self.config)
        random.Random(self.config.seed).shuffle(rows)
        self.test_rows = rows[: min(self.config.num_eval_rows, len(rows) // 4)]
        self.rows = itertools.cycle(rows[len(self.test_rows) :])

    async def get_next_item(self) -> dict[str, Any]:
        return next(self.rows)

    async def collect_trajectories(self, item: dict[str, Any]) -> tuple[Any, list[Any]]:
        messages = [
            {"role": "system", "content": self.config.system_prompt},
            {"role": "user", "content": item[self.config.prompt_field]},
        ]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=messages, n=self.config.group_size, max_tokens=self.config.max_token_length, temperature=1.0
            )
            nodes = managed.get_state()["nodes"]
        texts = [choice.message.content or "" for choice in reply.choices]
        parts = await asyncio.to_thread(self.score, texts, item[self.config.answer_field])
        totals = [sum(column) if None not in column else None for column in zip(*parts.values(), strict=True)]
        if None in totals:
            return None, []
        group = {
            **self.merge([scored_item(node, total) for node, total in zip(nodes, totals, strict=True)]),
            "messages": [[*messages, {"role": "assistant", "content": text}] for text in texts],
            "reward_components": parts,
        }
        return group, []

    def score(self, texts: list[str], answer: Any) -> dict[str, list[float | None]]:
        return {name: reward(texts, solution=[str(answer)] * len(texts)) for name, reward in self.rewards.items()}

    @staticmethod
    def merge(items: list[dict[str, Any]]) -> dict[str, Any]:
        return {key: [item[key] for item in items] for key in ("tokens", "masks", "scores", "inference_logprobs")}

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        groups = await self.gather_eval(self.collect_trajectories(row) for row in self.test_rows)
        scores = [score for group, _ in groups if group for score in group["scores"]]
        await self.evaluate_log({"eval/reward": sum(scores) / max(1, len(scores))})


if __name__ == "__main__":
    DatasetRewardsEnv.cli()
