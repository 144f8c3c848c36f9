"""The base class of reward functions, and what happens when one fails.

A subclass writes ``compute``. Calling the object multiplies by the weight and contains failures: when ``compute`` raises,
the completions are tried one at a time; those that still fail are ``None`` in the result, counted in ``num_failures`` and
logged with a traceback once per kind of error. If nothing could be scored the error is raised instead, so that a mistake
in the reward is seen and not trained on.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.errors import RewardComputationError

logger = logging.getLogger(__name__)


class RewardFunction(ABC):
    """Scores a list of completions.

    Example:
        class Shortness(RewardFunction):
            def compute(self, completions, **kwargs):
                return [1.0 / (1 + len(self.get_content(one))) for one in completions]
    """

    # Defaults on the class: subclasses exist that never call this constructor.
    weight: float = 1.0
    num_failures: int = 0
    """Completions so far whose reward could not be computed."""
    created_as: str | None = None
    """What it is called where the registry was asked for it."""
    wandb_logger: Any = None
    _name: str | None = None
    _kinds_logged: frozenset[str] = frozenset()

    def __init__(self, weight: float = 1.0, name: str | None = None, **kwargs: Any) -> None:
        self.weight = weight
        self.config: dict[str, Any] = kwargs
        self._name = name

    @property
    def name(self) -> str:
        """The given name, else the class name in lower case."""
        return self._name or type(self).__name__.lower()

    @property
    def _shown(self) -> str:
        """What its user wrote, for messages: the given name, the registry's, or the class's."""
        return self._name or self.created_as or type(self).__name__

    @abstractmethod
    def compute(self, completions: Sequence[Any], **kwargs: Any) -> Sequence[float | None]:
        """One raw reward per completion. Lists in ``kwargs`` run parallel to ``completions``."""

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """Weighted rewards; ``None`` marks a completion whose reward failed."""
        raw = self.compute_or_none(completions, **kwargs)
        weighted = [None if reward is None else reward * self.weight for reward in raw]
        if self.wandb_logger is not None:
            self.log_metrics(raw, weighted)
        return weighted

    def compute_or_none(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """``compute`` with failures contained: unweighted rewards, ``None`` where one failed."""
        if not completions:
            return []
        try:
            return self._checked(self.compute(completions, **kwargs), len(completions))
        except Exception as error:  # rewards are user code: whatever it raises is a failed reward
            return self._one_by_one(completions, kwargs, error)

    def _one_by_one(
        self, completions: Sequence[Any], kwargs: dict[str, Any], first_error: Exception
    ) -> list[float | None]:
        rewards: list[float | None] = []
        for index, completion in enumerate(completions):
            if len(completions) == 1:  # trying the same call again would only fail again
                self._note_failure(index, first_error)
                rewards.append(None)
                continue
            try:
                rewards += self._checked(self.compute([completion], **_slice(kwargs, index, len(completions))), 1)
            except Exception as error:  # as above
                self._note_failure(index, error)
                rewards.append(None)
        if all(reward is None for reward in rewards):
            raise RewardComputationError(
                f"the reward {self._shown!r} failed for all {len(rewards)} completions "
                f"({type(first_error).__name__}: {first_error}); fix the reward or what it is given"
            ) from first_error
        return rewards

    def _checked(self, rewards: Sequence[float | None], expected: int) -> list[float | None]:
        if len(rewards) != expected:
            raise ValueError(f"the reward {self._shown!r} returned {len(rewards)} values for {expected} completions")
        checked: list[float | None] = []
        for index, reward in enumerate(rewards):
            number = None if reward is None else float(reward)
            if number is not None and not math.isfinite(number):
                self._note_failure(index, ValueError(f"reward is {number}"))
                number = None
            checked.append(number)
        return checked

    def _note_failure(self, index: int, error: Exception) -> None:
        self.num_failures += 1
        kind = f"{type(error).__name__}: {error}"[:200]
        if kind not in self._kinds_logged:
            self._kinds_logged |= {kind}
            logger.error("reward %r failed for completion %d; it gets no reward", self._shown, index, exc_info=error)

    def set_wandb_logger(self, logger: Any) -> None:
        """Send metrics of every call to ``logger.log``."""
        self.wandb_logger = logger

    def log_metrics(self, raw_rewards: Sequence[float | None], weighted_rewards: Sequence[float | None]) -> None:
        """Log ``reward/{name}/mean_raw, mean_weighted, min, max`` (of the raw rewards that were computed)."""
        raw = [reward for reward in raw_rewards if reward is not None]
        weighted = [reward for reward in weighted_rewards if reward is not None]
        if self.wandb_logger is None or not raw:
            return
        prefix = f"reward/{self.name}"
        self.wandb_logger.log(
            {
                f"{prefix}/mean_raw": sum(raw) / len(raw),
                f"{prefix}/mean_weighted": sum(weighted) / max(1, len(weighted)),
                f"{prefix}/min": min(raw),
                f"{prefix}/max": max(raw),
            }
        )

    @staticmethod
    def get_content(completion: Any) -> str:
        """The model's words in whatever shape a completion comes; "" when there are none.

        Strings, ``{"role": "assistant", "content"}``, ``{"message": {...}}`` and lists of messages (the first assistant one).
        """
        if isinstance(completion, str):
            return completion
        if isinstance(completion, Mapping):
            if completion.get("role") == "assistant":
                return _text(completion.get("content"))
            if isinstance(completion.get("message"), Mapping):
                return _text(completion["message"].get("content"))
        elif isinstance(completion, list | tuple):
            for message in completion:
                if isinstance(message, Mapping) and message.get("role") == "assistant":
                    return _text(message.get("content"))
        return ""


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)
    return "" if content is None else str(content)


def _slice(kwargs: dict[str, Any], index: int, size: int) -> dict[str, Any]:
    """The keyword arguments of one completion: lists that run parallel are cut to it, everything else stays."""
    return {
        key: [value[index]] if isinstance(value, list | tuple) and len(value) == size else value
        for key, value in kwargs.items()
    }


def per_completion(values: Any, size: int, *, what: str) -> list[Any]:
    """``values`` as one entry per completion: a list must have the right length, anything else is repeated."""
    if not isinstance(values, list | tuple):
        return [values] * size
    if len(values) != size:
        raise ValueError(f"{what} has {len(values)} entries for {size} completions; give one each, or a single value")
    return list(values)
