"""Thinking is stripped and shortened; trajectories fit their limit without losing their last turn."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.utils.message_history_utils import ensure_trajectory_token_limit, strip_thinking, truncate_thinking
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer


def test_strip_thinking_removes_the_first_block() -> None:
    assert strip_thinking("a<think>x</think>b<think>y</think>") == "ab<think>y</think>"
    assert strip_thinking("<think>open") == "<think>open"


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("<think> ab </think>done", 5, "<think>\nab\n</think>done"),
        ("<think>first thought\n\nlast</think>done", 8, "<think>\n... last\n</think>done"),
        ("<think>abcdefgh</think>done", 3, "<think>\n... fgh\n</think>done"),
        ("<think>  </think>done", 3, "<think></think>done"),
        ("<think>abc</think>done", 0, "<think></think>done"),
        ("no block", 3, "no block"),
        ("hi <think>abc</think>", 3, "hi <think>\nabc\n</think>"),
    ],
)
def test_truncate_thinking(tiny_tokenizer: Any, text: str, limit: int, expected: str) -> None:
    assert truncate_thinking(text, tiny_tokenizer, limit) == expected


def test_truncate_thinking_returns_its_input_when_the_tokenizer_fails() -> None:
    assert truncate_thinking("<think>abc</think>d", None, 2) == "<think>abc</think>d"


def step(tokenizer: Any, *alternatives: list[dict[str, str]]) -> dict[str, Any]:
    made = [tokenize_for_trainer(tokenizer, messages) for messages in alternatives]
    return {
        "messages": list(alternatives),
        "tokens": [one["tokens"] for one in made],
        "masks": [one["masks"] for one in made],
        "seed": 0,
        "parsed_actions": [1] * len(alternatives),
        "scores": [0.5] * len(alternatives),
    }


def turn(number: int, size: int = 20) -> list[dict[str, str]]:
    return [{"role": "environment", "content": f"o{number}" * size}, {"role": "agent", "content": f"a{number}" * size}]


def test_old_pairs_go_first_and_short_alternatives_stay_whole(tiny_tokenizer: Any) -> None:
    system = {"role": "system", "content": "s"}
    long, short = [system, *turn(1), *turn(2), *turn(3)], [system, *turn(1, size=2)]
    (fitted,) = ensure_trajectory_token_limit([step(tiny_tokenizer, long, short)], tiny_tokenizer, 280)
    assert fitted["messages"] == [[system, *turn(2), *turn(3)], short]
    assert fitted["tokens"][0] == tokenize_for_trainer(tiny_tokenizer, fitted["messages"][0])["tokens"]
    assert max(map(len, fitted["tokens"])) <= 280
    assert fitted["scores"] == [0.5, 0.5]
    assert len(long) == 7  # the caller's list is untouched


def test_steps_that_fit_are_returned_as_they_are_and_hopeless_ones_dropped(tiny_tokenizer: Any) -> None:
    fits = step(tiny_tokenizer, [{"role": "system", "content": "s"}, *turn(1, size=1)])
    hopeless = step(tiny_tokenizer, [{"role": "system", "content": "s"}, *turn(1, size=300)])
    broken = {"messages": [[]], "tokens": [[1]], "masks": [[1]]}
    assert ensure_trajectory_token_limit([fits, hopeless, broken], tiny_tokenizer, 100) == [fits]
    assert ensure_trajectory_token_limit([], tiny_tokenizer, 100) == []
