"""Diverse first tokens: the list comes back, the openings differ, likely ones first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.utils.force_diverse_samples import generate_with_diverse_first_tokens


class FakeServer:
    """Completes with fixed text; reports the first-token distribution when it has one."""

    def __init__(self, top: dict[str, float] | None) -> None:
        self.top = top
        self.prompts: list[str] = []

    async def completion(
        self, *, prompt: str, n: int, max_tokens: int, temperature: float, logprobs: int | None = None
    ) -> Any:
        if logprobs is not None:
            details = SimpleNamespace(top_logprobs=[self.top]) if self.top else None
            return SimpleNamespace(choices=[SimpleNamespace(text="S", logprobs=details)] * n)
        self.prompts.append(prompt)
        return SimpleNamespace(choices=[SimpleNamespace(text=f" rest{max_tokens}")])


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ({"B": -1.0, "A": -0.1, "C": -3.0, "D": -9.0}, ["pA rest9", "pB rest9", "pC rest9"]),
        (None, ["pS rest9", "p rest10", "p rest10"]),
    ],
)
async def test_openings(tiny_tokenizer: Any, top: dict[str, float] | None, expected: list[str]) -> None:
    env = SimpleNamespace(tokenizer=tiny_tokenizer, server=FakeServer(top))
    chat = [{"role": "user", "content": "hi"}]
    answers = await generate_with_diverse_first_tokens(env, chat, prefill="p", n=3, max_tokens=10)
    assert answers == expected
    assert env.server.prompts[0].startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\np")
