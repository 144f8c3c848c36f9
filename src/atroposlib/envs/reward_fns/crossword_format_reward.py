"""Are crossword answers given as ``1-Across: WORD``?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

ANSWER = r"\d+\s*-\s*(?:Across|Down)\s*:[ \t]*(\S+)"


@registry.register
@registry.register(name="crossword_format")
class CrosswordFormatReward(RewardFunction):
    """``reward_value`` when any of ``format_patterns`` occurs; what a pattern's first group captures is the word.

    With ``penalize_invalid_chars`` a word with a character outside ``valid_chars`` makes it 0.0.
    """

    def __init__(
        self,
        format_patterns: Sequence[str] | None = None,
        reward_value: float = 1.0,
        penalize_invalid_chars: bool = True,
        valid_chars: str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.format_patterns = [re.compile(pattern, re.IGNORECASE) for pattern in format_patterns or (ANSWER,)]
        self.reward_value = reward_value
        self.penalize_invalid_chars = penalize_invalid_chars
        self.valid_chars = frozenset(valid_chars)

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        return [self._score(self.get_content(completion)) for completion in completions]

    def _score(self, text: str) -> float:
        matches = [match for pattern in self.format_patterns for match in pattern.finditer(text)]
        words = [match.group(1) for match in matches if match.re.groups]
        if not matches or (self.penalize_invalid_chars and not all(map(self._is_valid, words))):
            return 0.0
        return self.reward_value

    def _is_valid(self, word: str) -> bool:
        return set(word.rstrip(",.;:!?").upper()) <= self.valid_chars


def crossword_format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """``CrosswordFormatReward()(completions)``."""
    return CrosswordFormatReward()(completions, **kwargs)
