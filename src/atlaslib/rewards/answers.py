"""Finding the final answer in a model's text and comparing it with the right one (pure)."""

from __future__ import annotations

import re

_SOLUTION = re.compile(r"<(solution|answer)>(.*?)(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_HASHES = re.compile(r"####\s*(.+)")
_PHRASE = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)\s*(.+)", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def extract_answer(text: str) -> str:
    """The final answer of a text, or "" when there is none.

    In order: the last ``\\boxed{...}``, the last solution or answer block (or the boxed, marked or last number in it),
    the last line marked ``####`` or "answer is". A bare text without any mark has no final answer.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    blocks = _SOLUTION.findall(text)
    if blocks:
        return _within_block(blocks[-1][1].strip())
    for pattern in (_HASHES, _PHRASE):
        found = pattern.findall(text)
        if found:
            return _within_block(found[-1].strip().rstrip("."))
    return ""


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` with its braces balanced, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for position in range(begin, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            if depth == 0:
                return text[begin:position]
            depth -= 1
    return None


def normalize_answer(answer: str) -> str:
    """An answer in one spelling: no outer blanks, dollar signs, thousands commas or closing dot; whole floats as integers."""
    cleaned = answer.strip().strip("$").strip().rstrip(".").strip()
    number = _as_number(cleaned)
    if number is None:
        return " ".join(cleaned.lower().split())
    return str(int(number)) if number == int(number) else repr(round(number, 6))


def answers_match(given: str, truth: str) -> bool:
    """Whether two answers say the same: equal in one spelling, or equal as mathematics."""
    if not given.strip():
        return False
    if normalize_answer(given) == normalize_answer(truth):
        return True
    return ("\\" in given or "\\" in truth) and _math_equal(given, truth)


def _within_block(block: str) -> str:
    marked = _HASHES.findall(block) or _PHRASE.findall(block)
    if marked:
        block = marked[-1].strip().rstrip(".")
    if len(block.split()) <= 3 and _as_number(block.strip("$")) is None and not _NUMBER.search(block):
        return block
    numbers = _NUMBER.findall(block)
    return numbers[-1] if numbers else block


def _as_number(text: str) -> float | None:
    plain = text.replace(",", "").strip()
    try:
        if "/" in plain:
            top, _, bottom = plain.partition("/")
            return float(top) / float(bottom)
        value = float(plain)
    except (ValueError, ZeroDivisionError):
        return None
    return value if value == value and abs(value) != float("inf") else None


def _math_equal(given: str, truth: str) -> bool:
    from math_verify import parse, verify  # late: sympy is slow to import

    # Time-outs by signal only work on the main thread; answers here are a few characters long.
    return bool(
        verify(
            parse(f"${truth}$", parsing_timeout=None), parse(f"${given}$", parsing_timeout=None), timeout_seconds=None
        )
    )
