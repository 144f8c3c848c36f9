"""Groups of the wire to training samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from atlaslib.data.scored_groups import batch_advantages, to_samples
from atlaslib.errors import ScoredGroupError
from atlaslib.types import TrainingSample


def make_group(**changes: Any) -> dict[str, Any]:
    group: dict[str, Any] = {
        "tokens": [[1, 2, 3, 4], [1, 2, 5]],
        "masks": [[-100, -100, 3, 4], [-100, -100, 5]],
        "scores": [1.0, 0.0],
        "advantages": None,
        "ref_logprobs": None,
        "messages": None,
        "generation_params": None,
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.7], [1.0, 1.0, -0.2]],
        "overrides": None,
        "group_overrides": None,
        "images": None,
        "env_id": 3,
        "distill_token_ids": None,
        "distill_logprobs": None,
        "group_id": "g1",
    }
    return {**group, **changes}


def converted(group: dict[str, Any], *, default_temperature: float) -> list[TrainingSample]:
    return to_samples(group, batch_advantages([group])[0], default_temperature=default_temperature)


def test_masks_scores_and_logprobs() -> None:
    first, second = converted(make_group(policy_versions=[[4, 5], [5]]), default_temperature=0.9)
    assert first.token_ids == [1, 2, 3, 4]
    assert first.loss_mask == [False, False, True, True]
    assert first.sampler_logprobs is not None
    assert first.sampler_logprobs[2:] == [-0.5, -0.7]
    assert all(math.isnan(value) for value in first.sampler_logprobs[:2])
    assert first.advantages[2] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4))
    assert second.advantages == pytest.approx([-first.advantages[0]] * 3)
    assert (first.policy_versions, second.policy_versions) == ([4, 5], [5])
    assert (first.reward, first.temperature, first.env, first.group_id) == (1.0, 0.9, "3", "g1")


def test_numpy_rows_are_accepted() -> None:
    group = make_group(
        tokens=[np.array([1, 2, 3, 4]), np.array([1, 2, 5])],
        masks=[np.array([-100, -100, 3, 4]), np.array([-100, -100, 5])],
    )
    group["inference_logprobs"] = [np.array([1.0, 1.0, -0.5, -0.7]), np.array([1.0, 1.0, -0.2])]
    assert converted(group, default_temperature=1.0)[0].token_ids == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([[0.1, 0.2, 0.3, 0.4], [9.0]], [0.1, 0.2, 0.3, 0.4]),
        ([[7.0], [9.0]], [7.0] * 4),
        ([7.0, 9.0], [7.0] * 4),
        ([[5.0, 6.0], [9.0]], [0.0, 0.0, 5.0, 6.0]),
    ],
)
def test_given_advantages_win(given: Any, expected: list[float]) -> None:
    assert converted(make_group(advantages=given), default_temperature=1.0)[0].advantages == expected


def test_advantages_of_a_wrong_length_are_refused_by_name() -> None:
    with pytest.raises(ScoredGroupError, match=r"group g1, sequence 0: 3 advantages for 4 tokens \(2 trained\)"):
        converted(make_group(advantages=[[1.0, 2.0, 3.0], [1.0]]), default_temperature=1.0)


def test_overrides_of_sequence_and_group() -> None:
    group = make_group(
        group_overrides={"temperature": 0.7, "sft": True},
        overrides=[{"set_advantage_to_zero": True, "sft": False}, {"temperature": 0.5}],
    )
    first, second = converted(group, default_temperature=1.0)
    assert (first.advantages, first.sft, first.temperature) == ([0.0] * 4, False, 0.7)
    assert (second.sft, second.temperature) == (True, 0.5)


def test_generation_temperature_and_pass_through_fields() -> None:
    group = make_group(
        generation_params={"temperature": 0.6},
        images=[["picture"], None],
        distill_token_ids=[[[1], [2], [3], [4]], [[1], [2], [5]]],
        distill_logprobs=[[[0.0], [0.0], [-0.1], [-0.2]], [[0.0], [0.0], [-0.3]]],
        ref_logprobs=[[1.0, 1.0, -0.9, -0.8], [1.0, 1.0, -0.4]],
    )
    first, second = converted(group, default_temperature=1.0)
    assert first.temperature == 0.6
    assert first.images == ["picture"]
    assert second.distill_token_ids == [[1], [2], [5]]
    assert first.distill_logprobs == [[0.0], [0.0], [-0.1], [-0.2]]
    assert first.ref_logprobs is not None
    assert first.ref_logprobs[2:] == [-0.9, -0.8]


def test_uneven_rows_are_refused() -> None:
    with pytest.raises(ScoredGroupError, match="they must be as many"):
        converted(make_group(scores=[1.0]), default_temperature=1.0)
    with pytest.raises(ScoredGroupError, match="4 tokens and 1 masks"):
        converted(make_group(masks=[[-100], [-100, -100, 5]]), default_temperature=1.0)


def test_a_missing_score_trains_nothing() -> None:
    samples = converted(make_group(scores=[None, 1.0]), default_temperature=1.0)
    assert samples[0].advantages == [0.0] * 4
    assert math.isnan(samples[0].reward)


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [([[7]], [[-0.1]]), ([[7]] * 4, [[-0.1]] * 3), ([[7, 8]] * 4, [[-0.1]] * 4)],
    ids=["too few positions", "fewer log-probs", "other numbers of candidates"],
)
def test_uneven_distillation_is_refused(ids: list[list[int]], logprobs: list[list[float]]) -> None:
    group = make_group(distill_token_ids=[ids, None], distill_logprobs=[logprobs, None])
    with pytest.raises(ScoredGroupError, match="sequence 0: distill_token_ids and distill_logprobs must hold one list"):
        converted(group, default_temperature=1.0)


def test_impossible_logprobs_are_unknown() -> None:
    group = make_group(inference_logprobs=[[1.0, 1.0, -math.inf, -0.7], [1.0, 1.0, math.nan]])
    first, second = converted(group, default_temperature=1.0)
    assert first.sampler_logprobs is not None
    assert second.sampler_logprobs is not None
    assert math.isnan(first.sampler_logprobs[2])
    assert first.sampler_logprobs[3] == -0.7
    assert math.isnan(second.sampler_logprobs[2])
