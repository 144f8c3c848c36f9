"""The quickstart's task: write the asked letter the asked number of times, then stop. ``D3`` -> ``DDD``.

Small enough to be learned from scratch in minutes, and checkable: the training prompts and the held-out prompts are
different combinations of letter and number, so a rising held-out score is generalisation, not memory.
"""

from __future__ import annotations

import random
from typing import Any

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.type_definitions import Item

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class RepeatLettersConfig(BaseEnvConfig):
    """Settings of the task."""

    num_letters: int = Field(default=12, ge=2, le=26, description="Letters in use, from A.")
    max_count: int = Field(default=5, ge=2, le=9, description="Largest number asked for.")
    max_new_tokens: int = Field(default=8, gt=1, description="Longest answer.")
    held_out_share: float = Field(default=0.2, gt=0, lt=1, description="Share of the prompts kept for evaluation only.")
    task_seed: int = Field(default=0, description="Which prompts are held out, and the order of the others.")


def answer_to(prompt: str) -> str:
    """The right answer: ``answer_to("D3") == "DDD"``."""
    return prompt[0] * int(prompt[1:])


def score_answer(prompt: str, answer: str, *, stopped: bool) -> dict[str, float]:
    """What an answer is worth, in parts: right letters (up to 0.75), and stopping exactly there (0.25)."""
    wanted = answer_to(prompt)
    right = sum(given == expected for given, expected in zip(answer, wanted, strict=False))
    return {
        "letters": 0.75 * right / max(len(wanted), len(answer), 1),
        "stop": 0.25 if stopped and len(answer) == len(wanted) else 0.0,
    }


def split_prompts(num_letters: int, max_count: int, held_out_share: float, seed: int) -> tuple[list[str], list[str]]:
    """Training and held-out prompts; every letter and every number occurs in training."""
    prompts = [f"{letter}{count}" for letter in LETTERS[:num_letters] for count in range(1, max_count + 1)]
    random.Random(seed).shuffle(prompts)
    wanted = max(1, round(len(prompts) * held_out_share))
    held_out: list[str] = []
    train = list(prompts)
    for prompt in prompts:
        rest = [other for other in train if other != prompt]
        if len(held_out) < wanted and any(o[0] == prompt[0] for o in rest) and any(o[1:] == prompt[1:] for o in rest):
            held_out.append(prompt)
            train = rest
    return train, held_out


class RepeatLetters(BaseEnv):
    """Environment of the quickstart."""

    name = "repeat_letters"
    env_config_cls = RepeatLettersConfig

    @classmethod
    def config_init(cls) -> tuple[RepeatLettersConfig, list[APIServerConfig]]:
        """Defaults; the supervisor adds where the servers are."""
        config = RepeatLettersConfig(
            group_size=16,
            max_token_length=32,
            use_wandb=False,
            steps_per_eval=20,
            include_messages=True,
            ensure_scores_are_not_same=False,
            eval_handling="NONE",  # type: ignore[arg-type]
        )
        return config, [APIServerConfig(model_name="policy", base_url="http://127.0.0.1:9001/v1", server_type="vllm")]

    async def setup(self) -> None:
        """Split the prompts."""
        config = self.config
        self.train, self.held_out = split_prompts(
            config.num_letters, config.max_count, config.held_out_share, config.task_seed
        )
        self.random = random.Random(config.task_seed)

    async def get_next_item(self) -> Item:
        """A training prompt."""
        return self.random.choice(self.train)

    async def collect_trajectories(self, item: Any) -> tuple[dict[str, Any], list[Item]]:
        """A group of answers to one prompt, scored."""
        messages = [{"role": "user", "content": item}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=messages, n=self.config.group_size, max_tokens=self.config.max_new_tokens, temperature=1.0
            )
            nodes = managed.get_state()["nodes"]
        group: dict[str, Any] = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": [], "messages": []}
        components: dict[str, list[float]] = {"letters": [], "stop": []}
        for choice, node in zip(reply.choices, nodes, strict=True):
            answer = choice.message.content or ""
            parts = score_answer(item, answer, stopped=choice.finish_reason == "stop")
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(sum(parts.values()))
            group["messages"].append([*messages, {"role": "assistant", "content": answer}])
            for name, value in parts.items():
                components[name].append(value)
        return {**group, "reward_components": components}, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Most likely answers to the held-out prompts: mean score and share that is exactly right."""
        results = await self.gather_eval(self._evaluate_one(prompt) for prompt in self.held_out)
        metrics = {
            "eval/held_out_score": sum(score for score, _ in results) / len(results),
            "eval/held_out_exact": sum(exact for _, exact in results) / len(results),
        }
        if self.env_id is not None:
            await self.rollout_client.report(f"env:{self.wandb_prepend or self.display_name}", self.curr_step, metrics)
        await self.evaluate_log(metrics, verbose=self.env_id is None)
        return metrics

    async def _evaluate_one(self, prompt: str) -> tuple[float, float]:
        reply = await self.server.chat_completion(
            messages=[{"role": "user", "content": prompt}],
            n=1,
            max_tokens=self.config.max_new_tokens,
            temperature=0.0,
            split="eval",
        )
        choice = reply.choices[0]
        answer = choice.message.content or ""
        score = sum(score_answer(prompt, answer, stopped=choice.finish_reason == "stop").values())
        return score, float(score == 1.0)


if __name__ == "__main__":
    RepeatLetters.cli()
