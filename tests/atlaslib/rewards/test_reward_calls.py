"""Calling reward functions: every kind, and failures that are not scores."""

from __future__ import annotations

import asyncio
import math
import pickle
import time
from typing import Any

import pytest

from atlaslib.errors import ConfigError
from atlaslib.rewards.reward_calls import RewardInputs, RewardSet
from atroposlib.errors import RewardComputationError


def make_inputs(count: int = 3, **columns: list[Any]) -> RewardInputs:
    return RewardInputs(
        prompts=[f"p{i}" for i in range(count)],
        completions=["x" * i for i in range(count)],
        completion_ids=[[1] * i for i in range(count)],
        columns=columns,
    )


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_weighted_sum_and_names() -> None:
    class Constant:
        def __call__(self, completions: list[str], **_: Any) -> list[float]:
            return [1.0] * len(completions)

    table = RewardSet([length, Constant(), length], weights=[1.0, 10.0, 0.5]).score(make_inputs())
    assert table.names == ["length", "Constant", "length_2"]
    assert table.totals == [10.0, 11.5, 13.0]


def test_none_is_not_applicable() -> None:
    def some(completions: list[str], **_: Any) -> list[float | None]:
        return [None, 5.0, None]

    def nothing(completions: list[str], **_: Any) -> list[None]:
        return [None] * 3

    table = RewardSet([length, some]).score(make_inputs())
    assert table.totals == [0.0, 6.0, 2.0]
    assert all(math.isnan(value) for value in RewardSet([nothing]).score(make_inputs()).totals)


def test_an_exception_sets_one_sample_aside() -> None:
    def fragile(completions: list[str], **_: Any) -> list[float]:
        if "x" in completions:
            raise ValueError("broken grader")
        return [1.0] * len(completions)

    table = RewardSet([fragile, length]).score(make_inputs())
    assert math.isnan(table.totals[1])
    assert (table.totals[0], table.totals[2]) == (1.0, 3.0)
    assert table.failures == {"fragile": 1, "length": 0}


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], [1.0] * 4, []])
def test_a_wrong_number_of_values_is_a_failure_of_the_whole_batch(
    values: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    def constant(completions: list[str], **_: Any) -> list[float]:
        return values

    rewards = RewardSet([constant, length])
    table = rewards.score(make_inputs())
    assert all(map(math.isnan, table.totals))  # [1.0] would be right for each of them alone
    assert table.failures == {"constant": 3, "length": 0}
    assert "failed on a batch of 3, all of it is set aside" in caplog.text
    with pytest.raises(
        RewardComputationError, match=rf"constant returned {len(values)} values for 3 completions; return a list with"
    ):
        rewards.raise_if_broken(min_prompts=99)  # no prompt is to blame


def test_a_wrong_number_of_values_for_one_sample_is_a_failure_too() -> None:
    def clumsy(completions: list[str], **_: Any) -> list[float]:
        if len(completions) > 1:
            raise KeyError("answer")
        return [1.0] * (1 + len(completions[0]))

    table = RewardSet([clumsy]).score(make_inputs())
    assert table.totals[0] == 1.0
    assert table.failures == {"clumsy": 2}


def test_async_rewards_run_together() -> None:
    async def slow(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0.2)
        return [1.0] * len(completions)

    started = time.perf_counter()
    table = RewardSet([slow, slow, slow]).score(make_inputs())
    assert time.perf_counter() - started < 0.5
    assert table.totals == [3.0, 3.0, 3.0]


def test_only_named_columns_for_a_strict_signature() -> None:
    def strict(completions: list[str], answer: list[str]) -> list[float]:
        return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

    assert RewardSet(strict).score(make_inputs(answer=["", "y", "xx"], other=[1, 2, 3])).totals == [1.0, 0.0, 1.0]


def test_a_registered_reward_by_name() -> None:
    table = RewardSet(["accuracy"]).score(make_inputs(1, solution=["\\boxed{4}"]))
    assert table.names == ["accuracy"]
    assert len(table.totals) == 1


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match="neither a registered reward nor a loadable"):
        RewardSet(["no_such_reward_or_model"])


def test_a_classification_model_as_reward(tiny_tokenizer: Any) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config)
    rewards = RewardSet([model], processing_classes=[tiny_tokenizer])
    table = rewards.score(make_inputs())
    ids = tiny_tokenizer("p2xx", return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert table.totals[2] == pytest.approx(float(model(ids).logits[0, 0].detach()), abs=1e-5)
    assert table.names == ["LlamaForSequenceClassification"]


def test_an_infinite_reward_is_a_failure() -> None:
    def unbounded(completions: list[str], **_: Any) -> list[float]:
        return [math.inf if "x" in text else 1.0 for text in completions]

    table = RewardSet([unbounded]).score(make_inputs())
    assert table.totals[0] == 1.0
    assert math.isnan(table.totals[1])
    assert table.failures == {"unbounded": 2}


def test_a_function_that_never_worked_is_a_mistake() -> None:
    def broken(completions: list[str], **_: Any) -> list[float]:
        raise KeyError("answer")

    rewards = RewardSet([length, broken])
    rewards.score(make_inputs(1))
    rewards.raise_if_broken(min_prompts=2)  # one prompt may be the data's fault
    rewards.score(make_inputs(2))
    with pytest.raises(RewardComputationError, match=r"'broken' failed on every completion so far, of 2 prompts") as e:
        rewards.raise_if_broken(min_prompts=2)
    assert isinstance(e.value.__cause__, KeyError)


def test_a_function_that_worked_once_may_fail_later() -> None:
    is_down = False

    def judge(completions: list[str], **_: Any) -> list[float]:
        if is_down:
            raise ConnectionError("the judge is down")
        return [1.0] * len(completions)

    rewards = RewardSet([judge])
    rewards.score(make_inputs())
    is_down = True
    assert rewards.score(make_inputs()).failures == {"judge": 3}
    rewards.raise_if_broken()


def test_processes_judge_together() -> None:
    def some(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        raise KeyError("answer")

    unlucky, lucky, idle = RewardSet([some]), RewardSet([some]), RewardSet([some])
    unlucky.score(make_inputs(2))
    everybody = [unlucky, lucky, idle]

    def gather(own: list[Any]) -> list[Any]:
        assert len(own) == 1
        return [pickle.loads(pickle.dumps((set(r._worked), dict(r._failures)))) for r in everybody]

    for rewards in everybody:  # also one that never scored: none may go on alone
        with pytest.raises(RewardComputationError, match=r"'some' failed .* of 2 prompts \(KeyError: 'answer'\)"):
            rewards.raise_if_broken(min_prompts=2, gather=gather)
    lucky.functions = [length]
    lucky.score(make_inputs(2))
    for rewards in everybody:
        rewards.raise_if_broken(gather=gather)
    unlucky.raise_if_broken(gather=lambda _: pytest.fail("all functions have worked: nothing to exchange"))


def test_the_traceback_is_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    def broken(completions: list[str], **_: Any) -> list[float]:
        raise KeyError("answer")

    rewards = RewardSet([broken])
    for _ in range(3):
        rewards.score(make_inputs())
    shown = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.exc_info is not None for record in shown] == [True, False, False]


def test_rewards_that_never_apply_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def nothing(completions: list[str], **_: Any) -> list[None]:
        return [None] * len(completions)

    rewards = RewardSet([nothing])
    for _ in range(2):
        rewards.score(make_inputs())
    assert caplog.text.count("no reward applies to any of 3 completions") == 1
