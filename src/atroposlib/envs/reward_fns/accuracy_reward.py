"""Is the final answer right? Mathematical equivalence by math-verify, on any thread."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction, per_completion

_BOXED = re.compile(r"\\boxed\s*\{")
_HASHES = re.compile(r"####\s*([^\n]+)")
_POWER_TOWER = re.compile(r"\^\s*\{?[^\s{}]*\^|\^\s*\{?\s*\d{5,}|\d{7,}\s*!")
_LONGEST_ANSWER = 20_000
_TIMEOUT_S = 5


@registry.register
class AccuracyReward(RewardFunction):
    """1.0 when the answer equals ``ground_truth`` (or ``solution``), else 0.0.

    The answer is what follows the last ``</think>`` (``split_on_think_tag``). More than ``max_boxed_threshold`` boxed
    answers there count as guessing: 0.0. Compared as LaTeX by math-verify; failing that, the first boxed or ``####``
    answer as a number within ``tolerance``.
    """

    def __init__(
        self,
        tolerance: float = 1e-6,
        split_on_think_tag: bool = True,
        max_boxed_threshold: int = 6,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.tolerance = tolerance
        self.split_on_think_tag = split_on_think_tag
        self.max_boxed_threshold = max_boxed_threshold

    def compute(
        self, completions: Sequence[Any], solution: Any = None, ground_truth: Any = None, **kwargs: Any
    ) -> list[float | None]:
        wanted = solution if ground_truth is None else ground_truth
        if wanted is None:
            raise ValueError(
                "the accuracy reward needs solution=... or ground_truth=... (one value, or one per completion)"
            )
        golds = per_completion(wanted, len(completions), what="solution")
        return [self._score(self.get_content(one), gold) for one, gold in zip(completions, golds, strict=True)]

    def _score(self, text: str, gold: Any) -> float:
        answer = text.rsplit("</think>", 1)[-1] if self.split_on_think_tag else text
        if len(_BOXED.findall(answer)) > self.max_boxed_threshold:
            return 0.0
        return 1.0 if is_equivalent(answer, gold, tolerance=self.tolerance) else 0.0


def accuracy_reward(completions: Sequence[Any], solution: Any = None, **kwargs: Any) -> list[float | None]:
    """``AccuracyReward()(completions, solution=solution)``."""
    return AccuracyReward()(completions, solution=solution, **kwargs)


def is_equivalent(answer: str, gold: Any, *, tolerance: float = 1e-6) -> bool:
    """Whether the answer in a model's text equals ``gold`` (a number, LaTeX, or text with a boxed or ``####`` answer)."""
    gold_text = final_answer(str(gold)) or str(gold).strip()
    found = final_answer(answer)
    if found is not None and found.strip().casefold() == gold_text.casefold() != "":
        return True
    return _math_verify(answer[-_LONGEST_ANSWER:], gold_text) or _close(found, gold_text, tolerance)


def final_answer(text: str) -> str | None:
    """The content of the first ``\\boxed{...}`` (braces balanced), else what follows ``####``, else None."""
    if match := _BOXED.search(text):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[match.end() : position].strip()
    hashes = _HASHES.search(text)
    return hashes.group(1).strip() if hashes else None


def _close(found: str | None, gold: str, tolerance: float) -> bool:
    if found is None:
        return False
    try:
        return abs(_number(found) - _number(gold)) <= tolerance
    except ValueError:
        return False


def _number(text: str) -> float:
    return float(text.replace(",", "").replace("$", "").replace("\\", "").strip().rstrip(".%"))


def _math_verify(answer: str, gold: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread:
        # math-verify limits its time with signals, which only the main thread has; what could run for ever is refused.
        if _POWER_TOWER.search(answer):
            return False
        for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
            logging.getLogger(name).setLevel(logging.ERROR)  # it warns about the missing limit on every call
    limit = _TIMEOUT_S if on_main_thread else None
    target = parse(answer, extraction_config=[LatexExtractionConfig()], parsing_timeout=limit)
    wanted = parse(f"\\boxed{{{gold}}}", parsing_timeout=limit) or parse(gold, parsing_timeout=limit)
    return bool(wanted and target) and bool(verify(wanted, target, timeout_seconds=limit))
