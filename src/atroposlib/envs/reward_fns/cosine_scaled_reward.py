"""How near is the text to a reference text?

Without a model name the texts are compared by hashed character n-grams: no download, the same on every machine, blind
to meaning (it sees spelling). With a model name a sentence-transformers model embeds them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction, per_completion
from atroposlib.errors import MissingExtraError

Embedder = Callable[[list[str]], NDArray[np.float32]]
"""Texts -> unit vectors, shape [texts, dimensions]; an empty text is the zero vector."""
_DIMENSIONS = 4096


@registry.register
@registry.register(name="cosine_scaled")
class CosineScaledReward(RewardFunction):
    """``clip(1 - scale_factor * cosine_distance(completion, solution), min_reward, max_reward)``.

    ``default_reward`` is for a completion or solution without any text.
    """

    def __init__(
        self,
        model_name: str | None = None,
        scale_factor: float = 1.0,
        min_reward: float = -1.0,
        max_reward: float = 1.0,
        default_reward: float = 0.0,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.model_name, self.scale_factor = model_name, scale_factor
        self.min_reward, self.max_reward, self.default_reward = min_reward, max_reward, default_reward
        self.embed: Embedder = embed_ngrams if model_name is None else _sentence_transformer(model_name)

    def compute(
        self, completions: Sequence[Any], solution: Any = None, ground_truth: Any = None, **kwargs: Any
    ) -> list[float | None]:
        wanted = solution if ground_truth is None else ground_truth
        if wanted is None:
            raise ValueError("the cosine reward needs solution=... (one text, or one per completion)")
        texts = [self.get_content(completion) for completion in completions]
        golds = [str(gold) for gold in per_completion(wanted, len(texts), what="solution")]
        similarities = (self.embed(texts) * self.embed(golds)).sum(axis=1)
        return [
            self._scaled(float(similarity)) if text.strip() and gold.strip() else self.default_reward
            for similarity, text, gold in zip(similarities, texts, golds, strict=True)
        ]

    def _scaled(self, similarity: float) -> float:
        return min(self.max_reward, max(self.min_reward, 1.0 - self.scale_factor * (1.0 - similarity)))


def cosine_scaled_reward(completions: Sequence[Any], solution: Any = None, **kwargs: Any) -> list[float | None]:
    """``CosineScaledReward()(completions, solution=solution)``."""
    return CosineScaledReward()(completions, solution=solution, **kwargs)


def embed_ngrams(texts: list[str]) -> NDArray[np.float32]:
    """Unit vectors of hashed 2- to 4-character n-grams of the lower-cased text, words set off by spaces."""
    vectors = np.zeros((len(texts), _DIMENSIONS), dtype=np.float32)
    for row, text in enumerate(texts):
        padded = f" {' '.join(text.lower().split())} "
        for size in (2, 3, 4):
            for start in range(len(padded) - size + 1):
                vectors[row, zlib.crc32(padded[start : start + size].encode()) % _DIMENSIONS] += 1.0
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(norms == 0.0, 1.0, norms), dtype=np.float32)


@lru_cache(maxsize=4)
def _sentence_transformer(model_name: str) -> Embedder:
    try:
        from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        feature = f"cosine_scaled with model_name={model_name!r}"
        raise MissingExtraError(feature, package="sentence-transformers", extra="rewardfns") from error
    model = SentenceTransformer(model_name)

    def embed(texts: list[str]) -> NDArray[np.float32]:
        return np.asarray(model.encode(texts, normalize_embeddings=True), dtype=np.float32)

    return embed
