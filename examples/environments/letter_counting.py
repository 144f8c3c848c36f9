"""Letter counting: how often does a letter occur in a word? Partial credit for being close.

python examples/environments/letter_counting.py serve
"""

from __future__ import annotations

import random
import re
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.scored_rollout import scored_item

WORDS = [
    *("strawberry", "raspberry", "banana", "mississippi", "bookkeeper", "parallel", "committee"),
    *("accommodation", "assassination", "possession", "millennium", "necessary", "occurrence"),
    *("referee", "successful", "tattoo", "vacuum", "whirlpool", "zoology", "embarrassment"),
]
ANSWER = re.compile(r"<answer>\s*(\d+)\s*</answer>")


class LetterCountingConfig(BaseEnvConfig):
    """What can be set beside the usual."""

    seed: int = 0


class LetterCountingEnv(BaseEnv):
    """The reward falls with the distance to the right count; an answer without tags scores -1."""

    name = "letter_counting"
    env_config_cls = LetterCountingConfig

    @classmethod
    def config_init(cls) -> tuple[LetterCountingConfig, list[APIServerConfig]]:
        config = LetterCountingConfig(group_size=8, max_token_length=256, use_wandb=False)
        return config, [APIServerConfig(model_name="default", base_url="http://localhost:9004/v1", server_type="vllm")]

    async def setup(self) -> None:
        self.random = random.Random(self.config.seed)

    async def get_next_item(self) -> dict[str, Any]:
        word = self.random.choice(WORDS)
        letter = self.random.choice(sorted(set(word)) if self.random.random() < 0.8 else "abcdefghijklmnopqrstuvwxyz")
        return {"word": word, "letter": letter, "count": word.count(letter)}

    @staticmethod
    def prompt(item: dict[str, Any]) -> list[dict[str, str]]:
        question = f"How many times does the letter {item['letter']!r} occur in {item['word']!r}?"
        return [{"role": "user", "content": f"{question} Answer as <answer>number</answer>."}]

    @staticmethod
    def score(text: str, item: dict[str, Any]) -> float:
        found = ANSWER.findall(text)
        return -1.0 if len(found) != 1 else max(0.0, 1.0 - 0.5 * abs(int(found[0]) - item["count"]))

    async def collect_trajectory(self, item: dict[str, Any]) -> tuple[Any, list[Any]]:
        messages = self.prompt(item)
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=messages, max_tokens=self.config.max_token_length, temperature=1.0
            )
            node = managed.get_state()["nodes"][0]
        text = reply.choices[0].message.content or ""
        return scored_item(
            node, self.score(text, item), messages=[*messages, {"role": "assistant", "content": text}]
        ), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        items = [{"word": word, "letter": word[1], "count": word.count(word[1])} for word in WORDS]

        async def is_right(item: dict[str, Any]) -> float:
            reply = await self.server.chat_completion(
                messages=self.prompt(item), max_tokens=256, temperature=0.0, split="eval"
            )
            return float(self.score(reply.choices[0].message.content or "", item) == 1.0)

        scores = await self.gather_eval(is_right(item) for item in items)
        await self.evaluate_log({"eval/accuracy": sum(scores) / len(scores)})


if __name__ == "__main__":
    LetterCountingEnv.cli()
