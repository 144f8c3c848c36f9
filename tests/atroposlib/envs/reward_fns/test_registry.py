"""Reward functions by name: the right class, settings in order of precedence, wrong names with a hint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from atroposlib.envs.reward_fns import CombinedReward, registry
from atroposlib.envs.reward_fns.accuracy_reward import AccuracyReward
from atroposlib.envs.reward_fns.registry import BUILTIN, LegacyFunctionWrapper, RewardRegistry
from atroposlib.envs.reward_fns.reward_function import RewardFunction
from atroposlib.errors import RewardComputationError, UnknownRewardError


@pytest.mark.parametrize(
    ("name", "class_name"),
    [
        ("r1", "R1Reward"),
        ("r1_reward", "R1Reward"),
        ("accuracyx", "AccuracyXReward"),
        ("formatreasoning", "FormatReasoningReward"),
        ("accuracy", "AccuracyReward"),
        ("format", "FormatReward"),
        ("reasoning_steps", "ReasoningStepsReward"),
        ("reasoningsteps", "ReasoningStepsReward"),
        ("repetition_penalty", "RepetitionPenaltyReward"),
        ("cosine_scaled", "CosineScaledReward"),
        ("crossword_format", "CrosswordFormatReward"),
        ("chandas_meter", "ChandasMeterReward"),
        ("cascading_r1_math", "LegacyFunctionWrapper"),
    ],
)
def test_create_by_name(name: str, class_name: str) -> None:
    reward = registry.create(name, weight=3.0)
    assert type(reward).__name__ == class_name
    assert reward.weight == 3.0


def test_settings_of_a_config_win_over_defaults() -> None:
    reward: Any = registry.create(
        {"type": "format", "weight": 2.0, "params": {"preferred_tags": ["b"]}}, weight=9.0, name="mine"
    )
    assert (reward.weight, reward.preferred_tags, reward.name) == (2.0, ["b"], "mine")


def test_unknown_name_says_the_nearest() -> None:
    with pytest.raises(ImportError, match="did you mean 'accuracy'"):
        registry.create("acuracy")
    with pytest.raises(UnknownRewardError):
        registry.get("../../etc/passwd")
    with pytest.raises(UnknownRewardError, match="type"):
        registry.create({"weight": 1.0})
    with pytest.raises(ImportError):
        registry.load_required_functions([{"type": "combined", "params": {"rewards": ["nosuchthing"]}}])


def test_register_class_and_function() -> None:
    fresh = RewardRegistry()

    @fresh.register
    class LongReward(RewardFunction):
        def compute(self, completions: Any, **kwargs: Any) -> list[float | None]:
            return [float(len(one)) for one in completions]

    @fresh.register(name="other")
    class Whatever(LongReward):
        pass

    fresh.register_function("half", lambda completions, factor=0.5, **kwargs: [factor] * len(completions))
    assert fresh.create("long")(["abc"]) == [3.0]
    assert fresh.get("other") is Whatever
    half = fresh.create({"type": "half", "factor": 0.25}, weight=4.0)
    assert isinstance(half, LegacyFunctionWrapper)
    assert half(["x", "y"]) == [1.0, 1.0]
    assert set(fresh.list_registered()) == {"long", "other", "half", *BUILTIN}


def constant(value: float, weight: float) -> RewardFunction:
    return LegacyFunctionWrapper(lambda completions, **kwargs: [value] * len(completions), weight=weight)


@pytest.mark.parametrize(("normalization", "expected"), [("none", 2.5), ("sum", 0.625), ("minmax", 2.5)])
def test_combined_honours_the_weights_of_its_parts(normalization: str, expected: float) -> None:
    reward = CombinedReward([constant(1.0, 1.0), constant(0.5, 3.0)], normalization=normalization)
    assert reward(["x"]) == [expected]


def test_combined_weights_five_and_zero() -> None:
    reward = registry.create(
        {"type": "combined", "rewards": [{"type": "format", "weight": 5.0}, {"type": "format", "weight": 0.0}]}
    )
    assert reward(["<think>a</think>", "b"]) == [5.0, 0.0]
    assert reward.name == "combined(formatreward,formatreward)"


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: registry.create("accuracy"), "the reward 'accuracy' failed"),
        (lambda: registry.create({"type": "accuracy", "name": "exact"}), "the reward 'exact' failed"),
        (lambda: AccuracyReward(), "the reward 'AccuracyReward' failed"),
        (lambda: registry.create({"type": "combined", "rewards": ["accuracy"]}), "the reward 'combined' failed"),
    ],
)
def test_an_error_calls_a_reward_as_its_user_wrote_it(
    made: Callable[[], RewardFunction], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    reward = made()
    with pytest.raises(RewardComputationError, match=expected) as caught:
        reward(["no solution is given"])
    assert "accuracyreward" not in f"{caught.value} {caplog.text}"


def test_what_a_reward_was_created_as() -> None:
    assert registry.create("accuracy").created_as == "accuracy"
    assert registry.create({"type": "accuracy", "name": "exact"}).created_as == "exact"
    assert registry.create("accuracy").name == "accuracyreward"  # in the metrics of environments, as it has always been


def test_combined_scales_and_keeps_failures() -> None:
    def parse(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(one) for one in completions]

    reward = CombinedReward([LegacyFunctionWrapper(parse)], normalization="minmax", weight=2.0)
    assert reward(["1", "x", "3", "2"]) == [0.0, None, 2.0, 1.0]


def test_combined_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="normalization"):
        CombinedReward(["format"], normalization="softmax")
    with pytest.raises(ValueError, match="at least one"):
        CombinedReward([])


def test_subclasses_need_not_call_the_constructor() -> None:
    class Preset(CombinedReward):
        def __init__(self) -> None:
            self.normalization = "sum"
            self.reward_functions = [constant(1.0, 0.6), constant(0.5, 0.4)]
            self.weight = 2.0

    reward = Preset()
    assert reward(["x"]) == [pytest.approx(1.6)]
    assert reward.name.startswith("combined(")
    assert reward.num_failures == 0
