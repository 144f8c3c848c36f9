"""Blackjack from gymnasium, played in words over several turns.

Every rollout of a group plays the same cards (same seed), so the scores compare decisions and not luck.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.scored_rollout import scored_item

SYSTEM = "You play Blackjack against a dealer. Each turn answer with <action>hit</action> or <action>stick</action>."
ACTION = re.compile(r"<action>\s*(hit|stick)\s*</action>", re.IGNORECASE)


class BlackjackConfig(BaseEnvConfig):
    """What can be set beside the usual."""

    max_turns: int = 10
    first_seed: int = 0


class BlackjackEnv(BaseEnv):
    """The game's own reward: 1 won, 0 drawn, -1 lost; an answer without an action loses."""

    name = "blackjack"
    env_config_cls = BlackjackConfig

    @classmethod
    def config_init(cls) -> tuple[BlackjackConfig, list[APIServerConfig]]:
        config = BlackjackConfig(group_size=8, max_token_length=2048, use_wandb=False)
        return config, [APIServerConfig(model_name="default", base_url="http://localhost:9004/v1", server_type="vllm")]

    async def setup(self) -> None:
        self.seeds = itertools.count(self.config.first_seed)

    async def get_next_item(self) -> int:
        return next(self.seeds)

    @staticmethod
    def describe(observation: Any) -> str:
        mine, dealer, usable_ace = (int(value) for value in observation)
        ace = ", with a usable ace" if usable_ace else ""
        return f"Your hand is worth {mine}{ace}. The dealer shows {dealer}. Hit or stick?"

    async def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:
        import gymnasium

        game = gymnasium.make("Blackjack-v1", sab=True)
        observation, _ = game.reset(seed=item)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.describe(observation)}]
        score, is_over = -1.0, False
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for _ in range(self.config.max_turns):
                reply = await managed.chat_completion(messages=messages, max_tokens=256, temperature=1.0)
                text = reply.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})
                chosen = ACTION.search(text)
                if chosen is None:
                    break
                observation, reward, terminated, truncated, _ = game.step(int(chosen.group(1).lower() == "hit"))
                is_over = terminated or truncated
                if is_over:
                    score = float(reward)
                    break
                messages.append({"role": "user", "content": self.describe(observation)})
            node = managed.get_state()["nodes"][-1]
        game.close()
        parts = {"game": score, "finished": float(is_over)}
        return scored_item(node, score, messages=messages, reward_components=parts), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        rollouts = await self.gather_eval(self.collect_trajectory(10_000 + seed) for seed in range(32))
        await self.evaluate_log({"eval/mean_reward": sum(rollout["scores"] for rollout, _ in rollouts) / len(rollouts)})


if __name__ == "__main__":
    BlackjackEnv.cli()
