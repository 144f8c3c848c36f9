"""Python code with tests: the model writes a function, tests run it in a sandboxed process.

Limits on time, memory and network are those of ``atroposlib.utils.python_sandbox``; read there what they are not.
"""

from __future__ import annotations

import random
import re
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.scored_rollout import scored_item
from atroposlib.utils.python_sandbox import run_python

CODE = re.compile(r"```(?:python)?\s*\n(.*?)```", re.DOTALL)
PROBLEMS: list[dict[str, Any]] = [
    {
        "task": "Write a function `double(x)` that returns twice its argument.",
        "tests": [("double(2)", 4), ("double(-1)", -2), ("double('ab')", "abab")],
    },
    {
        "task": "Write a function `is_palindrome(text)` that ignores case and everything but letters.",
        "tests": [("is_palindrome('A man, a plan, a canal: Panama')", True), ("is_palindrome('ab')", False)],
    },
    {
        "task": "Write a function `fib(n)` that returns the n-th Fibonacci number, with fib(0) == 0 and fib(1) == 1.",
        "tests": [("fib(0)", 0), ("fib(10)", 55), ("fib(80)", 23416728348467685)],
    },
    {
        "task": "Write a function `flatten(items)` that turns nested lists into one flat list.",
        "tests": [("flatten([1, [2, [3]], []])", [1, 2, 3]), ("flatten([])", [])],
    },
]


class PythonCodeConfig(BaseEnvConfig):
    """What can be set beside the usual."""

    test_timeout_s: float = 5.0
    test_memory_mb: int = 512
    seed: int = 0


class PythonCodeEnv(BaseEnv):
    """The share of tests that pass; no code block scores -0.5."""

    name = "python_code"
    env_config_cls = PythonCodeConfig

    @classmethod
    def config_init(cls) -> tuple[PythonCodeConfig, list[APIServerConfig]]:
        config = PythonCodeConfig(group_size=8, max_token_length=1024, use_wandb=False)
        return config, [APIServerConfig(model_name="default", base_url="http://localhost:9004/v1", server_type="vllm")]

    async def setup(self) -> None:
        self.random = random.Random(self.config.seed)

    async def get_next_item(self) -> dict[str, Any]:
        return self.random.choice(PROBLEMS)

    async def score(self, text: str, item: dict[str, Any]) -> float:
        blocks = CODE.findall(text)
        if not blocks:
            return -0.5
        passed = [await self.passes(blocks[-1], call, expected) for call, expected in item["tests"]]
        return sum(passed) / len(passed)

    async def passes(self, code: str, call: str, expected: Any) -> bool:
        """Whether ``call`` gives ``expected``; the sandbox is never told what is expected, so only the answer earns."""
        mark = f"result-{self.random.getrandbits(64):016x}:"
        program = f"{code}\nprint({mark!r} + repr({call}))\n"
        result = await run_python(program, timeout_s=self.config.test_timeout_s, memory_mb=self.config.test_memory_mb)
        _, found, shown = result.stdout.rpartition(mark)
        return bool(found) and shown.strip() == repr(expected)

    async def collect_trajectory(self, item: dict[str, Any]) -> tuple[Any, list[Any]]:
        messages = [{"role": "user", "content": f"{item['task']} Answer with one ```python code block."}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=messages, max_tokens=self.config.max_token_length, temperature=1.0
            )
            node = managed.get_state()["nodes"][0]
        text = reply.choices[0].message.content or ""
        score = await self.score(text, item)
        return scored_item(node, score, messages=[*messages, {"role": "assistant", "content": text}]), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        rollouts = await self.gather_eval(self.collect_trajectory(item) for item in PROBLEMS)
        await self.evaluate_log({"eval/tests_passed": sum(max(0.0, r["scores"]) for r, _ in rollouts) / len(rollouts)})


if __name__ == "__main__":
    PythonCodeEnv.cli()
