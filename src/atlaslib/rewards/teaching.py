"""The teacher's reward: how much better the student answers with the teaching than without (pure).

With p0, p1 in {0, 1} the student's correctness without and with teaching, L the tokens of the teaching text and
e = 100 / (100 + L) its efficiency:

    p1 > p0          1 + w * e                      it helped; more so when it was short
    p1 = p0 = 1      0.5 * (1 + w * e)              it did no harm
    p1 = p0 = 0      0
    p1 < p0          -d                             it made things worse

A row without a right answer has no reward (None), not zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atlaslib.errors import ConfigError
from atlaslib.rewards.answers import answers_match

EFFICIENCY_SCALE_TOKENS = 100.0


class TeachingReward:
    """Improvement over the student's own baseline, with an efficiency bonus and a penalty for making it worse.

    Example: ``TeachingReward(efficiency_weight=1.0, degradation_penalty=2.0)``
    """

    __name__ = "teaching"

    def __init__(self, *, efficiency_weight: float = 1.0, degradation_penalty: float = 2.0) -> None:
        if efficiency_weight < 0 or degradation_penalty < 0:
            raise ConfigError(
                f"efficiency_weight ({efficiency_weight}) and degradation_penalty ({degradation_penalty}) must not be negative"
            )
        self.efficiency_weight = efficiency_weight
        self.degradation_penalty = degradation_penalty

    def __call__(
        self,
        *,
        solutions: Sequence[str],
        baseline_solutions: Sequence[str],
        ground_truths: Sequence[str | None],
        teaching_lengths: Sequence[int],
        **_: Any,
    ) -> list[float | None]:
        """One reward per row; the rest of what a reward function gets (texts of every role) is not needed here."""
        rows = zip(solutions, baseline_solutions, ground_truths, teaching_lengths, strict=True)
        return [
            None
            if truth is None
            else self.score(guided=answers_match(guided, truth), baseline=answers_match(base, truth), num_tokens=length)
            for guided, base, truth, length in rows
        ]

    def score(self, *, guided: bool, baseline: bool, num_tokens: int) -> float:
        """The reward of one teaching text of ``num_tokens`` tokens."""
        bonus = 1.0 + self.efficiency_weight * EFFICIENCY_SCALE_TOKENS / (EFFICIENCY_SCALE_TOKENS + num_tokens)
        if guided and not baseline:
            return bonus
        if guided:
            return 0.5 * bonus
        return -self.degradation_penalty if baseline else 0.0
