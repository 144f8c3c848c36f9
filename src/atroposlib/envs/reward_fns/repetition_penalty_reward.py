"""A penalty for text that repeats itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

STOPWORDS = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "from", "has", "have", "he", "i", "if", "in",
    "is", "it", "its", "not", "of", "on", "or", "she", "so", "than", "that", "the", "their", "them", "then", "there",
    "these", "they", "this", "to", "was", "we", "were", "what", "when", "which", "will", "with", "you",
})  # fmt: skip
_ALWAYS_FINE_REPEATS = 3  # a content word may come up this often in a text of any length
_FINE_SHARE = 0.05


@registry.register
@registry.register(name="repetition_penalty")
class RepetitionPenaltyReward(RewardFunction):
    """0.0 for text that does not repeat itself, down to -1.0.

    Fewer than ``min_words`` words or ``min_sentences`` sentences: ``short_text_penalty``. A sentence of more than three words
    said again: ``paragraph_repetition_base_penalty`` less up to 0.4 for how many. Otherwise the rates of over-used words,
    repeated 3- to 5-grams, stuttered words and equal sentence openings, weighted by ``component_weights``: nothing up to
    ``threshold``, beyond it at least -0.1.
    """

    def __init__(
        self,
        threshold: float = 0.05,
        min_words: int = 10,
        min_sentences: int = 2,
        short_text_penalty: float = -0.1,
        paragraph_repetition_base_penalty: float = -0.6,
        component_weights: Sequence[float] | dict[str, float] | None = None,
        stopwords: Iterable[str] | None = None,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.threshold, self.min_words, self.min_sentences = threshold, min_words, min_sentences
        self.short_text_penalty = short_text_penalty
        self.paragraph_repetition_base_penalty = paragraph_repetition_base_penalty
        weights = component_weights.values() if isinstance(component_weights, dict) else component_weights
        self.component_weights = tuple(weights or (0.3, 0.4, 0.6, 0.5))
        self.stopwords = frozenset(STOPWORDS if stopwords is None else stopwords)

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        return [self._score(self.get_content(completion)) for completion in completions]

    def _score(self, text: str) -> float:
        sentences = [part.split() for part in re.split(r"[.!?\n]+\s*", text.lower()) if part.strip()]
        words = re.findall(r"[\w']+", text.lower())
        if len(words) < self.min_words or len(sentences) < self.min_sentences:
            return self.short_text_penalty
        said_again = _num_repeated([tuple(sentence) for sentence in sentences if len(sentence) > 3])
        if said_again:
            return self.paragraph_repetition_base_penalty - 0.4 * min(1.0, said_again / len(sentences))
        rates = (
            self._overused_word_rate(words),
            max(_repeat_rate(_ngrams(words, size)) for size in (3, 4, 5)),
            sum(left == right for left, right in pairwise(words)) / (len(words) - 1),
            _repeat_rate([tuple(sentence[:2]) for sentence in sentences if len(sentence) > 1]),
        )
        penalty = sum(weight * rate for weight, rate in zip(self.component_weights, rates, strict=True))
        return 0.0 if penalty <= self.threshold else -min(1.0, max(0.1, penalty))

    def _overused_word_rate(self, words: list[str]) -> float:
        allowed = max(_ALWAYS_FINE_REPEATS, int(_FINE_SHARE * len(words)))
        counts = Counter(word for word in words if word not in self.stopwords)
        return sum(max(0, count - allowed) for count in counts.values()) / len(words)


def _ngrams(words: list[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]


def _num_repeated(things: list[tuple[str, ...]]) -> int:
    return len(things) - len(set(things))


def _repeat_rate(things: list[tuple[str, ...]]) -> float:
    return _num_repeated(things) / len(things) if things else 0.0


def repetition_penalty_reward(completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """``RepetitionPenaltyReward()(completions)``."""
    return RepetitionPenaltyReward()(completions, **kwargs)
