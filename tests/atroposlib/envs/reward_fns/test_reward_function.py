"""A failed reward is None and counted, never 0.0; a reward that fails everywhere raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from atroposlib.envs.reward_fns.reward_function import RewardFunction
from atroposlib.errors import RewardComputationError


class Parsed(RewardFunction):
    """The completion read as a number: anything else is an error."""

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        offsets = kwargs.get("offset", [0.0] * len(completions))
        return [float(self.get_content(one)) + offset for one, offset in zip(completions, offsets, strict=True)]


def test_weight_and_name() -> None:
    assert Parsed(weight=2.0)(["1", "3"]) == [2.0, 6.0]
    assert Parsed().name == "parsed"
    assert Parsed(name="number", extra=5).config == {"extra": 5}
    assert Parsed(name="number").name == "number"
    assert Parsed()([]) == []


def test_one_failure_is_none_and_the_others_keep_their_reward(caplog: pytest.LogCaptureFixture) -> None:
    reward = Parsed(weight=2.0)
    assert reward(["1", "x", "3"], offset=[10.0, 20.0, 30.0]) == [22.0, None, 66.0]
    assert reward(["1", "x"]) == [2.0, None]
    assert reward.num_failures == 2
    assert sum("could not convert" in (record.exc_text or "") for record in caplog.records) == 1  # once per kind


def test_not_a_number_is_a_failure() -> None:
    assert Parsed()(["nan", "1"]) == [None, 1.0]
    assert Parsed()(["1", "inf"]) == [1.0, None]


@pytest.mark.parametrize("completions", [["x"], ["x", "y"]])
def test_all_failed_raises_with_the_cause(completions: list[str]) -> None:
    with pytest.raises(RewardComputationError, match="failed for all") as caught:
        Parsed()(completions)
    assert isinstance(caught.value.__cause__, ValueError)


def test_wrong_number_of_rewards_is_an_error() -> None:
    class Short(RewardFunction):
        def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
            return []

    with pytest.raises(RewardComputationError, match="0 values"):
        Short()(["a", "b"])


def test_metrics_are_logged() -> None:
    class Log:
        def __init__(self) -> None:
            self.seen: list[dict[str, float]] = []

        def log(self, metrics: dict[str, float]) -> None:
            self.seen.append(metrics)

    reward, log = Parsed(weight=2.0), Log()
    reward.set_wandb_logger(log)
    reward(["1", "x", "3"])
    assert log.seen == [
        {
            "reward/parsed/mean_raw": 2.0,
            "reward/parsed/mean_weighted": 4.0,
            "reward/parsed/min": 1.0,
            "reward/parsed/max": 3.0,
        }
    ]


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        ({"role": "assistant", "content": "a"}, "a"),
        ({"role": "user", "content": "a"}, ""),
        ({"message": {"role": "assistant", "content": "b"}}, "b"),
        (
            [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "first"},
                {"role": "assistant", "content": "2"},
            ],
            "first",
        ),
        ([{"role": "assistant", "content": [{"type": "text", "text": "part"}]}], "part"),
        (None, ""),
        (5, ""),
    ],
)
def test_get_content(completion: Any, text: str) -> None:
    assert RewardFunction.get_content(completion) == text
