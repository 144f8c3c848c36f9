"""The quickstart's two tasks as pure functions: prompts, the split into training and held-out ones, scores."""

from __future__ import annotations

import random
import re

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


# ---- write a letter a number of times, then stop ---------------------------------------------------------------------


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


# ---- answer a sum concisely ------------------------------------------------------------------------------------------


def split_sums(seed: int, largest: int = 9, held_out: int = 16) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of numbers to add: for training, and held out."""
    pairs = [(a, b) for a in range(1, largest + 1) for b in range(1, largest + 1)]
    random.Random(seed).shuffle(pairs)
    return pairs[held_out:], pairs[:held_out]


def sum_question(pair: tuple[int, int]) -> str:
    """The prompt."""
    return f"What is {pair[0]}+{pair[1]}?"


def score_sum(pair: tuple[int, int], answer: str) -> float:
    """1 when the last number of a short answer is the sum, and the answer is not just the question said again and cut off."""
    numbers = [int(number) for number in re.findall(r"\d+", answer)]
    return float(bool(numbers) and len(numbers) != 2 and numbers[-1] == sum(pair))
