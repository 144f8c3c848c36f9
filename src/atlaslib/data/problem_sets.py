"""Prompts with known answers: generated arithmetic, and rows in the form of GSM8K.

Every row has ``prompt`` (chat or text) and ``ground_truth``. The answer is never part of the prompt: each builder checks its
own rows with :func:`check_no_leak`, and so can the user for rows from elsewhere.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atlaslib.errors import ConfigError

Row = dict[str, Any]
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def arithmetic_rows(
    count: int,
    *,
    seed: int = 0,
    low: int = 0,
    high: int = 9,
    operations: str = "+",
    system: str | None = None,
    chat: bool = True,
) -> list[Row]:
    """``count`` generated problems such as "What is 3+7?", without repetition as long as there are enough of them."""
    unknown = sorted(set(operations) - OPERATIONS.keys())
    if unknown or not operations:
        raise ConfigError(f"operations is {operations!r}; use any of {''.join(OPERATIONS)}")
    if count < 0 or low > high:
        raise ConfigError(f"count ({count}) must not be negative and low ({low}) not above high ({high})")
    chooser = random.Random(seed)
    space = (
        [(a, op, b) for a in range(low, high + 1) for op in operations for b in range(low, high + 1)]
        if high - low < 200
        else None
    )
    rows = []
    for left, sign, right in _draw(space, count, chooser, low, high, operations):
        question = f"What is {left}{sign}{right}?"
        rows.append({"prompt": _prompt(question, system, chat), "ground_truth": str(OPERATIONS[sign](left, right))})
    check_no_leak(rows, whole_words=False)
    return rows


def gsm8k_rows(records: Iterable[Mapping[str, str]], *, system: str | None = None, chat: bool = True) -> list[Row]:
    """Rows out of records with ``question`` and ``answer``, where the answer ends in ``#### value``."""
    rows = []
    for index, record in enumerate(records):
        _, mark, value = record["answer"].rpartition("####")
        if not mark:
            raise ConfigError(f"record {index} has no '#### value' in its answer: {record['answer'][-60:]!r}")
        rows.append(
            {
                "prompt": _prompt(record["question"], system, chat),
                "ground_truth": value.strip().replace(",", ""),
                "solution": record["answer"],
            }
        )
    check_no_leak(rows)
    return rows


def check_no_leak(rows: Sequence[Mapping[str, Any]], *, whole_words: bool = True) -> None:
    """Refuse rows whose prompt shows the worked solution, an answer mark, or an assistant turn that states the answer.

    A number that merely occurs in the question ("she has 3 apples ... how many are left?" with answer 3) is no leak; with
    ``whole_words`` False only the structural checks run.
    """
    for index, row in enumerate(rows):
        prompt, truth = row["prompt"], str(row["ground_truth"])
        turns = [("user", prompt)] if isinstance(prompt, str) else [(str(m["role"]), str(m["content"])) for m in prompt]
        text = "\n".join(content for _, content in turns)
        solution = row.get("solution")
        if solution and str(solution).strip() in text:
            raise ConfigError(
                f"row {index} shows its worked solution in the prompt; remove the assistant turn before training"
            )
        if f"#### {truth}" in text or f"\\boxed{{{truth}}}" in text:
            raise ConfigError(f"row {index} shows its marked answer {truth!r} in the prompt")
        told = [content for role, content in turns if role == "assistant"]
        if whole_words and any(re.search(rf"(?<!\w){re.escape(truth)}(?!\w)", content) for content in told):
            raise ConfigError(
                f"row {index} has an assistant turn that states the answer {truth!r}; remove it before training"
            )


def _prompt(question: str, system: str | None, chat: bool) -> Any:
    if not chat:
        return question if system is None else f"{system}\n{question}"
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": question}]


def _draw(
    space: list[tuple[int, str, int]] | None, count: int, chooser: random.Random, low: int, high: int, operations: str
) -> Iterable[tuple[int, str, int]]:
    if space is None:
        for _ in range(count):
            yield chooser.randint(low, high), chooser.choice(operations), chooser.randint(low, high)
        return
    while count > 0:
        chooser.shuffle(space)
        yield from space[:count]
        count -= len(space)
