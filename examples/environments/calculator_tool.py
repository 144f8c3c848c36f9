"""Multi-turn tool use: the model calls a calculator until it can answer.

Every turn goes through one ``ManagedServer`` session, so the whole conversation is one token-exact sequence: what the
model said is trained, what the tool answered is not.
"""

from __future__ import annotations

import ast
import json
import operator
import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.reward_fns.accuracy_reward import is_equivalent
from atroposlib.envs.scored_rollout import scored_item
from atroposlib.utils.tool_call_parser import extract_tool_call, parse_tool_call

TOOL = {
    "name": "calculator",
    "description": "Evaluates +, -, * and / of numbers.",
    "parameters": {"expression": "string"},
}
SYSTEM = (
    f"You may use a tool: {json.dumps(TOOL)}\nTo call it write "
    '<tool_call>{"name": "calculator", "arguments": {"expression": "2*(3+4)"}}</tool_call> and stop. '
    "When you know the result, answer with \\boxed{number}."
)
OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> float:
    """Numbers, brackets and four operators; anything else is a ValueError."""

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return float(OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError(f"not arithmetic: {ast.unparse(node)}")

    return value(ast.parse(expression[:200], mode="eval").body)


class CalculatorConfig(BaseEnvConfig):
    """What can be set beside the usual."""

    max_turns: int = 4
    tool_bonus: float = 0.1
    seed: int = 0


class CalculatorToolEnv(BaseEnv):
    """1 for the right answer, a small bonus for a tool call that worked."""

    name = "calculator_tool"
    env_config_cls = CalculatorConfig

    @classmethod
    def config_init(cls) -> tuple[CalculatorConfig, list[APIServerConfig]]:
        config = CalculatorConfig(group_size=8, max_token_length=1024, use_wandb=False)
        return config, [APIServerConfig(model_name="default", base_url="http://localhost:9004/v1", server_type="vllm")]

    async def setup(self) -> None:
        self.random = random.Random(self.config.seed)

    async def get_next_item(self) -> str:
        a, b, c = (self.random.randint(10, 99) for _ in range(3))
        return f"{a} * {b} + {c}"

    async def collect_trajectory(self, item: str) -> tuple[Any, list[Any]]:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"What is {item}?"},
        ]
        num_good_calls, text = 0, ""
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for _ in range(self.config.max_turns):
                reply = await managed.chat_completion(messages=messages, max_tokens=256, temperature=1.0)
                text = reply.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})
                if extract_tool_call(text) is None:
                    break
                result, worked = self.call_tool(text)
                num_good_calls += worked
                messages.append({"role": "tool", "content": result})
            node = managed.get_state()["nodes"][-1]
        parts = {
            "answer": float(is_equivalent(text, calculate(item))),
            "tool": self.config.tool_bonus * (num_good_calls > 0),
        }
        return scored_item(node, sum(parts.values()), messages=messages, reward_components=parts), []

    @staticmethod
    def call_tool(text: str) -> tuple[str, bool]:
        name, arguments, is_error = parse_tool_call(text, [TOOL])
        if is_error:
            return f"no such tool: {name}", False
        try:
            return str(calculate(str(arguments.get("expression", "")))), True
        except (ValueError, SyntaxError, ZeroDivisionError, OverflowError) as error:
            return f"error: {error}", False

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        items = [await self.get_next_item() for _ in range(16)]
        rollouts = await self.gather_eval(self.collect_trajectory(item) for item in items)
        await self.evaluate_log({"eval/score": sum(rollout["scores"] for rollout, _ in rollouts) / len(rollouts)})


if __name__ == "__main__":
    CalculatorToolEnv.cli()
