"""Mathematics in R1 style: form counts only once the answer is right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.reward_fns.accuracy_reward import AccuracyReward
from atroposlib.envs.reward_fns.reward_function import RewardFunction

FORMAT_BONUS = 0.5
_ONE_THOUGHT_THEN_TEXT = re.compile(r"\s*<think>[^<]*</think>[^<]*")


def cascading_r1_math_reward(completions: Sequence[Any], solution: Any = None, **kwargs: Any) -> list[float | None]:
    """1.0 for the right answer, 1.5 when the text also opens with its only think block and holds no other tag, else 0.0."""
    accuracies = AccuracyReward().compute_or_none(completions, solution=solution, **kwargs)
    return [
        accuracy + FORMAT_BONUS if accuracy and _is_clean(completion) else accuracy
        for completion, accuracy in zip(completions, accuracies, strict=True)
    ]


def _is_clean(completion: Any) -> bool:
    return _ONE_THOUGHT_THEN_TEXT.fullmatch(RewardFunction.get_content(completion)) is not None
