"""Building and checking scored groups."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.envs import groups


def rollout(**changes: Any) -> Any:
    return {"tokens": [1, 2, 3], "masks": [-100, 2, 3], "scores": 0.5, **changes}


def group(**changes: Any) -> dict[str, Any]:
    return {"tokens": [[1, 2], [3, 4]], "masks": [[-100, 2], [-100, 4]], "scores": [0.0, 1.0], **changes}


def test_rollouts_are_stacked_with_every_field_they_carry():
    items = [
        rollout(
            advantages=[0.0, 1.0, 1.0],
            inference_logprobs=[1.0, -0.1, -0.2],
            generation_params={"temperature": 0.7},
            distill_token_ids=[[1], [2], [3]],
            distill_logprobs=[[-0.1], [-0.2], [-0.3]],
            overrides={"sft": True},
            group_overrides={"group_size": 2},
            reward_components={"format": 0.25},
            policy_versions=[3, 4],
        )
        for _ in range(2)
    ]
    made: Any = groups.group_from_items(items)
    assert made["tokens"] == [[1, 2, 3]] * 2
    assert made["scores"] == [0.5, 0.5]
    assert made["inference_logprobs"] == [[1.0, -0.1, -0.2]] * 2
    assert made["generation_params"] == {"temperature": 0.7}
    assert made["distill_token_ids"] == [[[1], [2], [3]]] * 2
    assert made["distill_logprobs"] == [[[-0.1], [-0.2], [-0.3]]] * 2
    assert made["overrides"] == [{"sft": True}] * 2
    assert made["group_overrides"] == {"group_size": 2}
    assert made["reward_components"] == {"format": [0.25, 0.25]}
    assert made["policy_versions"] == [[3, 4], [3, 4]]


def test_absent_fields_are_empty_lists_as_they_always_were():
    made: Any = groups.group_from_items([rollout()])
    assert {key: made[key] for key in ("advantages", "ref_logprobs", "messages", "overrides", "images")} == {
        "advantages": [],
        "ref_logprobs": [],
        "messages": [],
        "overrides": [],
        "images": [],
    }
    assert made["group_overrides"] == {}
    assert "inference_logprobs" not in made


def test_a_logprob_list_of_only_some_rollouts_is_left_out():
    made: Any = groups.group_from_items([rollout(inference_logprobs=[1.0, 0.0, 0.0]), rollout()])
    assert "inference_logprobs" not in made


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"group_overrides": None}, None),
        ({"group_overrides": {"group_size": 3}}, "wrong_size"),
        ({"tokens": [[1, 2]]}, "wrong_size"),
        ({"tokens": None}, "wrong_size"),
        ({"scores": [1.0, 1.0]}, "equal_scores"),
        ({"scores": [float("nan"), 1.0]}, "not_finite_score"),
        ({"scores": [float("inf"), 1.0]}, "not_finite_score"),
        ({"scores": [None, 1.0]}, "not_finite_score"),
        ({"scores": [None, None]}, "not_finite_score"),
    ],
)
def test_checks_name_the_reason(changes: dict[str, Any], reason: str | None):
    rejection = groups.check_group(group(**changes), group_size=2, ensure_scores_are_not_same=True)
    assert (rejection.reason if rejection else None) == reason


def test_equal_scores_pass_when_asked():
    assert groups.check_group(group(scores=[1.0, 1.0]), group_size=2, ensure_scores_are_not_same=False) is None


def test_a_sequence_as_long_as_the_limit_does_not_fit():
    assert groups.check_lengths(group(), max_token_len=3) is None
    rejection = groups.check_lengths(group(), max_token_len=2)
    assert rejection is not None
    assert rejection.reason == "too_long"
    assert "2 tokens" in rejection.detail


def test_trained_lengths_count_what_the_mask_keeps():
    assert groups.trained_lengths({"masks": [[-100, 5, 6], [-100, -100, -100], (7, 8)]}) == [2, 0, 2]


def test_policy_versions_are_added_where_absent():
    have = group(policy_versions=[[9], [9]])
    lacks = group()
    groups.add_policy_versions([have, lacks, None], {5, 3})
    assert have["policy_versions"] == [[9], [9]]
    assert lacks["policy_versions"] == [[3, 5], [3, 5]]
    groups.add_policy_versions(untouched := group(), set())
    assert "policy_versions" not in untouched
