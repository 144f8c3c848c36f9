"""The teacher's reward, formula by formula."""

from __future__ import annotations

import pytest

from atlaslib.errors import ConfigError
from atlaslib.rewards.teaching import TeachingReward


def test_the_four_cases() -> None:
    reward = TeachingReward(efficiency_weight=1.0, degradation_penalty=2.0)
    assert reward.score(guided=True, baseline=False, num_tokens=100) == 1.5
    assert reward.score(guided=True, baseline=True, num_tokens=100) == 0.75
    assert reward.score(guided=False, baseline=False, num_tokens=5) == 0.0
    assert reward.score(guided=False, baseline=True, num_tokens=5) == -2.0


def test_shorter_teaching_earns_more() -> None:
    reward = TeachingReward()
    assert reward.score(guided=True, baseline=False, num_tokens=10) > reward.score(
        guided=True, baseline=False, num_tokens=300
    )


def test_no_right_answer_is_missing_not_zero() -> None:
    scores = TeachingReward()(
        solutions=["4", "4"], baseline_solutions=["5", "5"], ground_truths=["4", None], teaching_lengths=[0, 0]
    )
    assert scores == [2.0, None]


def test_negative_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="degradation_penalty"):
        TeachingReward(degradation_penalty=-1)
