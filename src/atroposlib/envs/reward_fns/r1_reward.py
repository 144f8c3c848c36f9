"""Think first, then answer, and answer right: the rewards that made R1-style training known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction, per_completion

_THINK = re.compile(r"<think>.*?</think>", re.DOTALL | re.IGNORECASE)
_CLOSE = re.compile(r"</think>", re.IGNORECASE)


@registry.register
class FormatReasoningReward(RewardFunction):
    """``reward_value`` when the text has a think block (``require_thinking``) and words after it (``require_response``).

    More than one block fails unless ``allow_multiple_thinking``.
    """

    def __init__(
        self,
        reward_value: float = 0.5,
        require_thinking: bool = True,
        require_response: bool = True,
        allow_multiple_thinking: bool = False,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.reward_value = reward_value
        self.require_thinking, self.require_response = require_thinking, require_response
        self.allow_multiple_thinking = allow_multiple_thinking

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        return [self.reward_value if self._is_well_formed(self.get_content(one)) else 0.0 for one in completions]

    def _is_well_formed(self, text: str) -> bool:
        blocks = _THINK.findall(text)
        if (self.require_thinking and not blocks) or (len(blocks) > 1 and not self.allow_multiple_thinking):
            return False
        return not self.require_response or bool(_THINK.sub("", text).strip())


@registry.register
class AccuracyXReward(RewardFunction):
    """``reward_value`` when the words after the thinking contain the solution (``exact_match``: are the solution)."""

    def __init__(
        self,
        exact_match: bool = False,
        case_sensitive: bool = False,
        reward_value: float = 1.0,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.exact_match, self.case_sensitive, self.reward_value = exact_match, case_sensitive, reward_value

    def compute(self, completions: Sequence[Any], solution: Any = None, **kwargs: Any) -> list[float | None]:
        if solution is None:
            raise ValueError("the accuracyx reward needs solution=... (one text, or one per completion)")
        golds = per_completion(solution, len(completions), what="solution")
        pairs = zip(map(self.get_content, completions), map(str, golds), strict=True)
        return [self.reward_value if self._is_right(text, gold) else 0.0 for text, gold in pairs]

    def _is_right(self, text: str, gold: str) -> bool:
        answer, gold = _CLOSE.split(text)[-1].strip(), gold.strip()
        if not self.case_sensitive:
            answer, gold = answer.casefold(), gold.casefold()
        return bool(gold) and (answer == gold if self.exact_match else gold in answer)


@registry.register
class R1Reward(RewardFunction):
    """``format_weight`` for thinking and then answering, plus ``accuracy_weight`` when the answer contains the solution."""

    def __init__(
        self, format_weight: float = 0.5, accuracy_weight: float = 1.0, weight: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.format_reward = FormatReasoningReward(reward_value=1.0, weight=format_weight)
        self.accuracy_reward = AccuracyXReward(weight=accuracy_weight)

    def compute(self, completions: Sequence[Any], solution: Any = None, **kwargs: Any) -> list[float | None]:
        formats = self.format_reward.compute(completions)
        accuracies = self.accuracy_reward.compute(completions, solution=solution)
        return [
            (form or 0.0) * self.format_reward.weight + (accuracy or 0.0) * self.accuracy_reward.weight
            for form, accuracy in zip(formats, accuracies, strict=True)
        ]


def r1_reward(completions: Sequence[Any], solution: Any = None, **kwargs: Any) -> list[float | None]:
    """``R1Reward()(completions, solution=solution)``."""
    return R1Reward()(completions, solution=solution, **kwargs)
