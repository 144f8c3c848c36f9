"""The environments of the quickstart: a task a tiny model learns from scratch, and one for a real language model.

`RepeatLetters`: write the asked letter the asked number of times, then stop (``D3`` -> ``DDD``). Training and held-out prompts
are different combinations of letter and number, so a rising held-out score is generalisation, not memory.
`ConciseSums`: give the sum of two numbers within ten tokens. A 135M model knows most sums; it learns to say them.
"""

from __future__ import annotations

import random
from typing import Any

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.quickstart_task import (
    score_answer,
    score_sum,
    split_prompts,
    split_sums,
    sum_question,
)
from atroposlib.type_definitions import Item


class QuickstartConfig(BaseEnvConfig):
    """Settings both tasks have."""

    max_new_tokens: int = Field(default=8, gt=1, description="Longest answer.")
    task_seed: int = Field(default=0, description="Which prompts are held out, and the order of the others.")
    eval_samples: int = Field(default=2, ge=1, description="Answers to every held-out prompt.")
    eval_temperature: float = Field(default=1.0, ge=0, description="Temperature of these answers; 0 = the likeliest.")


class RepeatLettersConfig(QuickstartConfig):
    """Settings of the letters."""

    num_letters: int = Field(default=12, ge=2, le=26, description="Letters in use, from A.")
    max_count: int = Field(default=5, ge=2, le=9, description="Largest number asked for.")
    held_out_share: float = Field(default=0.2, gt=0, lt=1, description="Share of the prompts kept for evaluation only.")


class OneTurnEnv(BaseEnv):
    """One question, a group of answers, a score in named parts; held-out questions for the evaluation."""

    env_config_cls = QuickstartConfig
    train: list[Any]
    held_out: list[Any]

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        """Defaults; the supervisor adds where the servers are."""
        config = cls.env_config_cls.model_validate(
            {
                "group_size": 16,
                "max_token_length": 128,
                "use_wandb": False,
                "steps_per_eval": 10,
                "include_messages": True,
                "ensure_scores_are_not_same": False,
                "eval_handling": "NONE",
            }
        )
        return config, [APIServerConfig(model_name="policy", base_url="http://127.0.0.1:9004/v1", server_type="vllm")]

    def question(self, item: Any) -> str:
        """The prompt of an item."""
        raise NotImplementedError(f"{type(self).__name__} must define question()")

    def parts(self, item: Any, answer: str, *, stopped: bool) -> dict[str, float]:
        """The parts of an answer's score."""
        raise NotImplementedError(f"{type(self).__name__} must define parts()")

    async def get_next_item(self) -> Item:
        """A training prompt."""
        return random.choice(self.train)

    async def collect_trajectories(self, item: Any) -> tuple[dict[str, Any], list[Item]]:
        """A group of answers to one prompt, scored."""
        messages = [{"role": "user", "content": self.question(item)}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=messages, n=self.config.group_size, max_tokens=self.config.max_new_tokens, temperature=1.0
            )
            nodes = managed.get_state()["nodes"]
        group: dict[str, list[Any]] = {
            "tokens": [],
            "masks": [],
            "scores": [],
            "inference_logprobs": [],
            "messages": [],
            "policy_versions": [],
        }
        components: dict[str, list[float]] = {}
        for choice, node in zip(reply.choices, nodes, strict=True):
            answer = choice.message.content or ""
            parts = self.parts(item, answer, stopped=choice.finish_reason == "stop")
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(sum(parts.values()))
            group["policy_versions"].append(node.metadata.get("policy_versions") or [])
            group["messages"].append([*messages, {"role": "assistant", "content": answer}])
            for name, value in parts.items():
                components.setdefault(name, []).append(value)
        return {**group, "reward_components": components, "generation_params": {"temperature": 1.0}}, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Answers to the held-out prompts: mean score and share that is exactly right."""
        results = await self.gather_eval(self._evaluate_one(item) for item in self.held_out)
        scores = [score for row in results for score in row]
        metrics = {
            "eval/held_out_score": sum(scores) / len(scores),
            "eval/held_out_exact": sum(score >= 1.0 for score in scores) / len(scores),
        }
        if self.env_id is not None:
            await self.rollout_client.report(f"env:{self.wandb_prepend or self.display_name}", self.curr_step, metrics)
        if self.config.data_dir_to_save_evals is not None:
            await self.evaluate_log(metrics, verbose=self.env_id is None)
        return metrics

    async def _evaluate_one(self, item: Any) -> list[float]:
        reply = await self.server.chat_completion(
            messages=[{"role": "user", "content": self.question(item)}],
            n=self.config.eval_samples,
            max_tokens=self.config.max_new_tokens,
            temperature=self.config.eval_temperature,
            split="eval",
        )
        return [
            sum(self.parts(item, choice.message.content or "", stopped=choice.finish_reason == "stop").values())
            for choice in reply.choices
        ]


class RepeatLetters(OneTurnEnv):
    """The tiny model's task."""

    name = "repeat_letters"
    env_config_cls = RepeatLettersConfig

    async def setup(self) -> None:
        """Split the prompts."""
        config = self.config
        self.train, self.held_out = split_prompts(
            config.num_letters, config.max_count, config.held_out_share, config.task_seed
        )

    def question(self, item: Any) -> str:
        """The item is the prompt."""
        return str(item)

    def parts(self, item: Any, answer: str, *, stopped: bool) -> dict[str, float]:
        """Right letters, and stopping in the right place."""
        return score_answer(item, answer, stopped=stopped)


class ConciseSumsConfig(QuickstartConfig):
    """Settings of the sums."""

    max_new_tokens: int = Field(default=10, gt=1, description="Longest answer.")
    eval_samples: int = Field(default=1, ge=1, description="Answers to every held-out prompt.")
    eval_temperature: float = Field(default=0.0, ge=0, description="Temperature of these answers; 0 = the likeliest.")


class ConciseSums(OneTurnEnv):
    """The real language model's task."""

    name = "concise_sums"
    env_config_cls = ConciseSumsConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        """Smaller groups: every answer costs a second here."""
        config, servers = super().config_init()
        config.group_size, config.steps_per_eval = 8, 6
        return config, servers

    async def setup(self) -> None:
        """Split the pairs."""
        self.train, self.held_out = split_sums(self.config.task_seed)

    def question(self, item: Any) -> str:
        """What is 3+7?"""
        return sum_question(item)

    def parts(self, item: Any, answer: str, *, stopped: bool) -> dict[str, float]:
        """The sum is there."""
        return {"right": score_sum(item, answer)}


if __name__ == "__main__":
    RepeatLetters.cli()
