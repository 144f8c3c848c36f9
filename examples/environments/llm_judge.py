"""LLM as judge: one model writes, another one (or the same) gives points from 1 to 10.

python examples/environments/llm_judge.py serve --env.judge_base_url http://localhost:9002/v1 --env.judge_model big-model
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ServerManager
from atroposlib.envs.scored_rollout import scored_item

TOPICS = [
    "rain on a tin roof",
    "a lost umbrella",
    "the first day of school",
    "an old lighthouse",
    "bread",
    "a night train",
]
JUDGE = "You judge poems. Weigh imagery, rhythm and fit to the topic. End with a line 'Points: N', N from 1 to 10."
POINTS = re.compile(r"Points:\s*(10|[1-9])\b")
MAX_TRIES = 3


class JudgeConfig(BaseEnvConfig):
    """What can be set beside the usual."""

    judge_base_url: str = ""
    judge_model: str = "default"
    judge_api_key: str = ""


class LlmJudgeEnv(BaseEnv):
    """The judge's points, scaled to 0..1."""

    name = "llm_judge"
    env_config_cls = JudgeConfig

    @classmethod
    def config_init(cls) -> tuple[JudgeConfig, list[APIServerConfig]]:
        config = JudgeConfig(group_size=8, max_token_length=512, use_wandb=False)
        return config, [APIServerConfig(model_name="default", base_url="http://localhost:9004/v1", server_type="vllm")]

    async def setup(self) -> None:
        self.topics = itertools.cycle(TOPICS)
        self.judge = self.server
        if self.config.judge_base_url:
            judge = APIServerConfig(
                model_name=self.config.judge_model,
                base_url=self.config.judge_base_url,
                api_key=self.config.judge_api_key,
            )
            self.judge = ServerManager([judge])

    async def get_next_item(self) -> str:
        return next(self.topics)

    async def points(self, topic: str, poem: str) -> float:
        """The verdict on one poem; a judge that gives none is an error, not a bad mark."""
        quoted = poem.replace("</poem>", "")  # the poem cannot close its own quotation and speak as the judge
        question = f"Topic: {topic}\n<poem>\n{quoted}\n</poem>"
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": question}]
        for _ in range(MAX_TRIES):
            reply = await self.judge.chat_completion(messages=messages, max_tokens=512, temperature=0.3)
            found = POINTS.findall(reply.choices[0].message.content or "")
            if found:
                return (int(found[-1]) - 1) / 9
        raise ValueError(f"the judge gave no points in {MAX_TRIES} tries")

    async def collect_trajectory(self, item: str) -> tuple[Any, list[Any]]:
        messages = [{"role": "user", "content": f"Write a poem of four lines about {item}."}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=messages, max_tokens=self.config.max_token_length, temperature=1.0
            )
            node = managed.get_state()["nodes"][0]
        poem = reply.choices[0].message.content or ""
        score = await self.points(item, poem)
        return scored_item(node, score, messages=[*messages, {"role": "assistant", "content": poem}]), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        rollouts = await self.gather_eval(self.collect_trajectory(topic) for topic in TOPICS)
        await self.evaluate_log({"eval/points": sum(rollout["scores"] for rollout, _ in rollouts) / len(rollouts)})


if __name__ == "__main__":
    LlmJudgeEnv.cli()
