"""Language models as judges: agreement, escalation, failure."""

from __future__ import annotations

import json

import pytest

from atlaslib.errors import ConfigError
from atlaslib.rewards.judges import Judgement, JudgeReward, consistent, parse_verdict


def verdict(score: float, uncertainty: float = 0.0) -> str:
    return "Sure: " + json.dumps({"score": score, "uncertainty": uncertainty, "rationale": f"r{score}"})


class Scripted:
    """A judge model that answers from a script and remembers what it was asked (a fake: no language model runs here)."""

    def __init__(self, small: list[str | Exception], large: str | Exception | None = None) -> None:
        self.small, self.large, self.calls = list(small), large, []

    async def __call__(self, model: str, prompt: str, temperature: float) -> str:
        self.calls.append((model, temperature, prompt))
        reply = self.small.pop(0) if model == "small" else self.large
        if isinstance(reply, Exception):
            raise reply
        assert reply is not None
        return reply


async def judge(ask: Scripted, **kwargs: object) -> tuple[JudgeReward, list[float | None]]:
    reward = JudgeReward(ask=ask, small_model="small", large_model="large", judges=["accuracy"])
    return reward, await reward(prompts=["2+2?"], completions=["4"], ground_truths=["4"], **kwargs)


async def test_agreement_takes_the_surest_opinion() -> None:
    ask = Scripted([verdict(0.8, 0.2), verdict(0.9, 0.1), verdict(0.85, 0.3)])
    reward, scores = await judge(ask)
    assert scores == [0.9]
    assert [temperature for _, temperature, _ in ask.calls] == [0.2, 0.5, 0.8]
    assert "Reference answer:\n4" in ask.calls[0][2]
    assert reward.statistics.num_escalated == 0


async def test_disagreement_goes_to_the_arbiter() -> None:
    ask = Scripted([verdict(0.0), verdict(1.0), verdict(0.5)], verdict(0.25))
    reward, scores = await judge(ask)
    assert scores == [0.25]
    assert "scores spread by 0.41" in (reward.last_judgements[0]["accuracy"].escalation_reason or "")
    assert '"score": 1.0' in ask.calls[-1][2]


async def test_uncertainty_goes_to_the_arbiter() -> None:
    _, scores = await judge(Scripted([verdict(0.5, 0.9), verdict(0.5), verdict(0.5)], verdict(1.0)))
    assert scores == [1.0]


async def test_failed_judge_is_missing_not_zero() -> None:
    down = ConnectionError("refused")
    reward, scores = await judge(Scripted([down, down, "no json here"], down))
    assert scores == [None]
    assert reward.statistics.num_failed == 1
    assert any("refused" in error for error in reward.statistics.last_errors)


async def test_same_question_is_asked_once() -> None:
    ask = Scripted([verdict(0.5)] * 3)
    reward = JudgeReward(ask=ask, small_model="small", judges=["accuracy"])
    assert await reward(prompts=["q"], completions=["a"]) == [0.5]
    assert await reward(prompts=["q"], completions=["a"]) == [0.5]
    assert len(ask.calls) == 3
    assert reward.statistics.num_cached == 1


def test_scores_that_cannot_be_true_together_are_lowered() -> None:
    row = {
        name: Judgement(judge=name, score=score)
        for name, score in {"accuracy": 0.2, "process": 0.9, "helpfulness": 0.9}.items()
    }
    assert {name: judgement.score for name, judgement in consistent(row).items()} == {
        "accuracy": 0.2,
        "process": pytest.approx(0.3),
        "helpfulness": 0.9,
    }


@pytest.mark.parametrize("text", ["nothing", '{"score": 7}', '{"rationale": "x"}', "{broken"])
def test_invalid_verdicts_raise(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse_verdict(text)


def test_unknown_judge_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        JudgeReward(ask=Scripted([]), small_model="s", judges=["acuracy"])
