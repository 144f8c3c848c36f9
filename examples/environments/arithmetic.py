"""Generated arithmetic: add, subtract or multiply two numbers, answer in \\boxed{}.

    python examples/environments/arithmetic.py serve --openai.base_url http://localhost:9004/v1

The problems are made on the fly, so there is no data set to download and no end to them.
"""

from __future__ import annotations

import operator
import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.reward_fns.accuracy_reward import is_equivalent
from atroposlib.envs.scored_rollout import scored_item

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SYSTEM = "You are a calculator. Think if you must, then give the result as \\boxed{number}."


class ArithmeticConfig(BaseEnvConfig):
    """What can be set beside the usual."""

    max_number: int = 20
    seed: int = 0
    num_eval_problems: int = 32


class ArithmeticEnv(BaseEnv):
    """One question, one answer, a score of 1 or 0."""

    name = "arithmetic"
    env_config_cls = ArithmeticConfig

    @classmethod
    def config_init(cls) -> tuple[ArithmeticConfig, list[APIServerConfig]]:
        config = ArithmeticConfig(group_size=8, max_token_length=256, use_wandb=False)
        return config, [APIServerConfig(model_name="default", base_url="http://localhost:9004/v1", server_type="vllm")]

    async def setup(self) -> None:
        self.random = random.Random(self.config.seed)
        self.right: list[float] = []

    def problem(self, rng: random.Random) -> dict[str, Any]:
        left, right = rng.randint(0, self.config.max_number), rng.randint(0, self.config.max_number)
        sign = rng.choice(list(OPERATIONS))
        return {"question": f"What is {left} {sign} {right}?", "answer": OPERATIONS[sign](left, right)}

    async def get_next_item(self) -> dict[str, Any]:
        return self.problem(self.random)

    async def collect_trajectory(self, item: dict[str, Any]) -> tuple[Any, list[Any]]:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": item["question"]}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=messages, max_tokens=self.config.max_token_length, temperature=1.0
            )
            node = managed.get_state()["nodes"][0]
        text = reply.choices[0].message.content or ""
        score = float(is_equivalent(text, item["answer"]))
        self.right.append(score)
        return scored_item(node, score, messages=[*messages, {"role": "assistant", "content": text}]), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        rng = random.Random(self.config.seed + 1)
        problems = [self.problem(rng) for _ in range(self.config.num_eval_problems)]
        scores = await self.gather_eval(self.is_right(problem) for problem in problems)
        await self.evaluate_log({"eval/accuracy": sum(scores) / len(scores)})

    async def is_right(self, problem: dict[str, Any]) -> float:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem["question"]}]
        reply = await self.server.chat_completion(
            messages=messages, max_tokens=self.config.max_token_length, temperature=0.0, split="eval"
        )
        return float(is_equivalent(reply.choices[0].message.content or "", problem["answer"]))

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = dict(wandb_metrics or {})
        if self.right:
            metrics["train/accuracy"] = sum(self.right) / len(self.right)
        self.right = []
        await super().wandb_log(metrics)


if __name__ == "__main__":
    ArithmeticEnv.cli()
