"""An environment for the end-to-end test: two-turn chats through a managed session, scored by the answer's text."""

from __future__ import annotations

from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class QuestionEnv(BaseEnv):
    name = "question"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return BaseEnvConfig(use_wandb=False, steps_per_eval=5, max_token_length=256), [
            APIServerConfig(server_type="vllm", api_key="x")
        ]

    async def setup(self) -> None:
        self.asked = 0
        self.evaluated_at: list[int] = []

    async def get_next_item(self) -> Any:
        self.asked += 1
        return f"What is {self.asked} plus 1?"

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        group = ScoredDataGroup()
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            messages = [{"role": "user", "content": item}]
            await managed.chat_completion(messages=messages, n=self.config.group_size, max_tokens=12)
            nodes = managed.get_state()["nodes"]
        group["tokens"] = [node.tokens for node in nodes]
        group["masks"] = [node.masked_tokens for node in nodes]
        group["inference_logprobs"] = [node.logprobs for node in nodes]
        group["scores"] = [float(index % 2) for index in range(len(nodes))]
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.evaluated_at.append(self.curr_step)

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {"asked": self.asked, "evaluated_at": self.evaluated_at})


if __name__ == "__main__":
    QuestionEnv.cli()
