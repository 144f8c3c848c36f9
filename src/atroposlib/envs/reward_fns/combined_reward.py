"""Several rewards as one: the weighted sum of what each of them gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction
from atroposlib.errors import ConfigError

NORMALIZATIONS = ("none", "sum", "minmax")


@registry.register
class CombinedReward(RewardFunction):
    """``sum(weight_i * reward_i)`` over the parts; a completion any part failed on has no combined reward.

    ``normalization``: ``none``; ``sum`` divides by the sum of the weights; ``minmax`` scales the batch to 0..1.

    Example: ``CombinedReward(["format", {"type": "accuracy", "weight": 3.0}], normalization="sum")``
    """

    def __init__(
        self,
        rewards: Sequence[str | Mapping[str, Any] | RewardFunction],
        normalization: str = "none",
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        if normalization not in NORMALIZATIONS:
            raise ConfigError(f"normalization ({normalization!r}) must be one of {', '.join(NORMALIZATIONS)}")
        if not rewards:
            raise ConfigError("a combined reward needs at least one entry in rewards")
        super().__init__(weight=weight, **kwargs)
        self.normalization = normalization
        self.reward_functions = [one if isinstance(one, RewardFunction) else registry.create(one) for one in rewards]

    @property
    def name(self) -> str:
        return self._name or f"combined({','.join(part.name for part in self.reward_functions)})"

    def set_wandb_logger(self, logger: Any) -> None:
        super().set_wandb_logger(logger)
        for part in self.reward_functions:
            part.set_wandb_logger(logger)

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        parts = [part(completions, **kwargs) for part in self.reward_functions]  # calling applies each part's weight
        totals = [_sum_or_none(column) for column in zip(*parts, strict=True)]
        if self.normalization == "sum":
            weight = sum(part.weight for part in self.reward_functions)
            return [None if total is None else total / weight for total in totals] if weight > 0 else totals
        if self.normalization == "minmax":
            return _scale_to_unit(totals)
        return totals


def _sum_or_none(column: Sequence[float | None]) -> float | None:
    known = [reward for reward in column if reward is not None]
    return sum(known) if len(known) == len(column) else None


def _scale_to_unit(totals: list[float | None]) -> list[float | None]:
    known = [total for total in totals if total is not None]
    if not known or min(known) == max(known):
        return totals
    low, spread = min(known), max(known) - min(known)
    return [None if total is None else (total - low) / spread for total in totals]
