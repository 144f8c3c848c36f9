"""Does the text reason in visible steps?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

PATTERN_WEIGHTS = {"numbered_steps": 0.5, "list_numbers": 0.5, "bullet_points": 0.4, "transition_words": 0.3}
PATTERNS = {
    "numbered_steps": re.compile(r"\bstep\s+\d+", re.IGNORECASE),
    "list_numbers": re.compile(r"^\s*\d+\.\s", re.MULTILINE),
    "bullet_points": re.compile(r"^\s*[-*•]\s", re.MULTILINE),
    "transition_words": re.compile(
        r"\b(?:first|second|third|next|then|finally|lastly|subsequently|initially)\b",
        re.IGNORECASE,
    ),
}


@registry.register
@registry.register(name="reasoning_steps")
class ReasoningStepsReward(RewardFunction):
    """Each kind of step marker adds ``weight * min(1, count / min_steps)``; a text of more than ``min_words`` words adds
    ``base_score``; at most 1.0.
    """

    def __init__(
        self,
        min_words: int = 10,
        min_steps: int = 3,
        base_score: float = 0.1,
        pattern_weights: Mapping[str, float] | None = None,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.min_words, self.min_steps, self.base_score = min_words, min_steps, base_score
        self.pattern_weights = {**PATTERN_WEIGHTS, **(pattern_weights or {})}

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        return [self._score(self.get_content(completion)) for completion in completions]

    def _score(self, text: str) -> float:
        score = self.base_score if len(text.split()) > self.min_words else 0.0
        for name, pattern in PATTERNS.items():
            score += self.pattern_weights[name] * min(1.0, len(pattern.findall(text)) / self.min_steps)
        return min(1.0, score)


def reasoning_steps_reward(completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """``ReasoningStepsReward()(completions)``."""
    return ReasoningStepsReward()(completions, **kwargs)
