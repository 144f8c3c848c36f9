"""Reward functions by name.

Built-in names are listed in ``BUILTIN``; a module is imported when its name is first used. A name not listed is looked
for as a file beside this one (``{name}.py`` or ``{name}_reward.py``), so that a dropped-in file works too.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, overload

from atroposlib.envs.reward_fns.reward_function import RewardFunction
from atroposlib.errors import UnknownRewardError, unknown_name_message

RewardClass = TypeVar("RewardClass", bound=type[RewardFunction])
RewardCallable = Callable[..., Sequence[float]]

_PACKAGE = "atroposlib.envs.reward_fns"

BUILTIN: dict[str, str] = {
    "accuracy": "accuracy_reward:AccuracyReward",
    "accuracyx": "r1_reward:AccuracyXReward",
    "cascading_r1_math": "cascading_r1_math_reward:cascading_r1_math_reward",
    "chandas_meter": "chandas_meter_reward:ChandasMeterReward",
    "combined": "combined_reward:CombinedReward",
    "cosine_scaled": "cosine_scaled_reward:CosineScaledReward",
    "crossword_format": "crossword_format_reward:CrosswordFormatReward",
    "format": "format_reward:FormatReward",
    "formatreasoning": "r1_reward:FormatReasoningReward",
    "r1": "r1_reward:R1Reward",
    "reasoning_steps": "reasoning_steps_reward:ReasoningStepsReward",
    "repetition_penalty": "repetition_penalty_reward:RepetitionPenaltyReward",
}


class LegacyFunctionWrapper(RewardFunction):
    """Makes a reward function out of a plain function ``f(completions, **kwargs) -> list of floats``."""

    def __init__(self, func: RewardCallable, weight: float = 1.0, **kwargs: Any) -> None:
        name = kwargs.pop("name", None) or getattr(func, "__name__", "function")
        super().__init__(weight=weight, name=name, **kwargs)
        self.func = func

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> Sequence[float]:
        return self.func(completions, **{**self.config, **kwargs})


class RewardRegistry:
    """Name -> reward class or function."""

    def __init__(self) -> None:
        self._entries: dict[str, type[RewardFunction] | RewardCallable] = {}

    @overload
    def register(self, cls: RewardClass, name: str | None = None) -> RewardClass: ...
    @overload
    def register(self, cls: None = None, name: str | None = None) -> Callable[[RewardClass], RewardClass]: ...
    def register(self, cls: Any = None, name: str | None = None) -> Any:
        """Class decorator, with or without arguments; the default name is the class name in lower case less "reward"."""

        def add(decorated: RewardClass) -> RewardClass:
            self._entries[name or decorated.__name__.lower().removesuffix("reward")] = decorated
            return decorated

        return add if cls is None else add(cls)

    def register_function(self, name: str, function: RewardCallable) -> None:
        """Register a plain function under ``name``."""
        self._entries[name] = function

    def create(self, name_or_config: str | Mapping[str, Any], **defaults: Any) -> RewardFunction:
        """A reward function from a name or ``{"type": name, "weight": ..., "params": {...}, ...}``; the config wins over ``defaults``."""
        if isinstance(name_or_config, str):
            name, settings = name_or_config, defaults
        else:
            given = {key: value for key, value in name_or_config.items() if key not in ("type", "params")}
            if "type" not in name_or_config:
                raise UnknownRewardError(f"a reward configuration needs the key 'type', got {dict(name_or_config)!r}")
            name, settings = str(name_or_config["type"]), {**defaults, **given, **(name_or_config.get("params") or {})}
        entry = self.get(name)
        if isinstance(entry, type):
            reward: RewardFunction = entry(**settings)
            reward.created_as = str(settings.get("name") or name)
            return reward
        return LegacyFunctionWrapper(entry, **{"name": name, **settings})

    def get(self, name: str) -> type[RewardFunction] | RewardCallable:
        """The class or function called ``name``; raises ``UnknownRewardError`` (an ImportError) otherwise."""
        for candidate in (name, name.lower(), name.lower().removesuffix("_reward")):
            if candidate in self._entries:
                return self._entries[candidate]
            if candidate in BUILTIN:
                module, _, attribute = BUILTIN[candidate].partition(":")
                self._entries[candidate] = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), attribute)
                return self._entries[candidate]
        self._entries[name] = _entry_from_file(name, self.list_registered())
        return self._entries[name]

    def list_registered(self) -> list[str]:
        """Every name that can be used now, built-in ones included."""
        return sorted({*self._entries, *BUILTIN})

    def load_required_functions(self, config: Iterable[str | Mapping[str, Any]]) -> None:
        """Import everything a list of names and configurations will need, so that a wrong name fails at once."""
        for one in config:
            self.get(one if isinstance(one, str) else str(one["type"]))
            nested = {} if isinstance(one, str) else {**one, **(one.get("params") or {})}
            self.load_required_functions(nested.get("rewards") or [])


def _entry_from_file(name: str, known: Iterable[str]) -> type[RewardFunction] | RewardCallable:
    base = name.removesuffix("_reward")
    folder = Path(__file__).parent
    for stem in dict.fromkeys((base, f"{base}_reward", name)):
        if re.fullmatch(r"[A-Za-z_]\w*", stem) and (folder / f"{stem}.py").is_file():
            module = importlib.import_module(f"{_PACKAGE}.{stem}")
            if (entry := _entry_of_module(module, base)) is not None:
                return entry
            raise UnknownRewardError(f"{folder / stem}.py holds no RewardFunction class and no function {base!r}")
    raise UnknownRewardError(unknown_name_message("reward function", name, known))


def _entry_of_module(module: ModuleType, base: str) -> type[RewardFunction] | RewardCallable | None:
    """The class named after the file, else the first class by name, else a function named after the file."""
    classes = {
        key.lower(): value
        for key, value in sorted(vars(module).items())
        if inspect.isclass(value) and issubclass(value, RewardFunction) and value.__module__ == module.__name__
    }
    plain = base.replace("_", "").lower()
    for wanted in (f"{plain}reward", plain):
        if wanted in classes:
            return classes[wanted]
    if classes:
        return next(iter(classes.values()))
    functions = (getattr(module, candidate, None) for candidate in (base, f"{base}_reward", "format_reward"))
    return next((function for function in functions if callable(function)), None)


registry = RewardRegistry()
