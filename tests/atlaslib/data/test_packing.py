"""Layouts of microbatches: same trained tokens, same log-probs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from atlaslib.data.packing import build_microbatch, split_evenly
from atlaslib.trainers.policy import PolicyForward
from atlaslib.types import TrainingSample


def make(prompt: list[int], completion: list[int], group: str = "g", **changes: Any) -> TrainingSample:
    total = len(prompt) + len(completion)
    values: dict[str, Any] = {
        "token_ids": [*prompt, *completion],
        "loss_mask": [False] * len(prompt) + [True] * len(completion),
        "advantages": [0.5] * total,
        "reward": 1.0,
        "group_id": group,
    }
    return TrainingSample(**{**values, **changes})


SAMPLES = [
    make([5, 6, 7], [8, 9]),
    make([5, 6, 7], [10, 11, 12]),
    make([20, 21], [22], "h"),
    make([30], [31, 32, 33, 34], "i"),
]


def test_padded_rows_and_flat_tokens() -> None:
    batch = build_microbatch(SAMPLES, pad_id=0)
    assert batch.input_ids.tolist() == [
        [5, 6, 7, 8, 9, 0],
        [5, 6, 7, 10, 11, 12],
        [20, 21, 22, 0, 0, 0],
        [30, 31, 32, 33, 34, 0],
    ]
    assert batch.position_ids is None
    assert batch.gather_index is None
    assert batch.target_ids.tolist() == [8, 9, 10, 11, 12, 22, 31, 32, 33, 34]
    assert batch.source_index.tolist() == [2, 3, 8, 9, 10, 13, 18, 19, 20, 21]
    assert batch.sample_index.tolist() == [0, 0, 1, 1, 1, 2, 3, 3, 3, 3]
    assert batch.sample_lengths.tolist() == [2.0, 3.0, 1.0, 4.0]
    assert batch.num_input_tokens == 24


def test_shared_prefix_holds_the_prompt_once() -> None:
    batch = build_microbatch(SAMPLES[:2], layout="shared_prefix")
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 10, 11, 12]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5]]
    assert batch.source_index.tolist() == [2, 3, 2, 5, 6]
    assert batch.gather_index is not None
    assert batch.place_index is not None
    assert batch.gather_index.tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 5, 6, 7]]
    assert batch.gather_index.flatten()[batch.place_index].tolist() == list(range(8))


def test_other_groups_with_the_same_prompt_are_not_merged() -> None:
    batch = build_microbatch([make([5, 6], [7], "a"), make([5, 6], [8], "b")], layout="shared_prefix")
    assert batch.input_ids.tolist() == [[5, 6, 7, 5, 6, 8]]


def test_packed_rows_have_no_pads() -> None:
    batch = build_microbatch(SAMPLES, layout="packed")
    assert batch.input_ids.shape == (1, 19)
    assert batch.target_ids.tolist() == build_microbatch(SAMPLES).target_ids.tolist()


@pytest.mark.parametrize("layout", ["packed", "shared_prefix"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layouts_give_the_same_logprobs_and_gradients(layout: Any, attention: str, tiny_model: Any) -> None:
    tiny_model.set_attn_implementation(attention)
    forward = PolicyForward(unwrap=lambda model: model)
    results = []
    for kind in ("padded", layout):
        tiny_model.zero_grad()
        logprobs = forward(tiny_model, build_microbatch(SAMPLES, layout=kind)).logprobs[:, 0]
        (logprobs * torch.arange(10)).sum().backward()
        results.append((logprobs.detach(), torch.cat([p.grad.flatten() for p in tiny_model.parameters()])))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=2e-6)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-4, atol=2e-5)
    assert tiny_model.config._attn_implementation == attention


def test_logprobs_are_those_of_the_model(tiny_model: Any) -> None:
    got = PolicyForward(unwrap=lambda model: model)(tiny_model, build_microbatch(SAMPLES[:1])).logprobs[:, 0]
    logits = tiny_model(input_ids=torch.tensor([SAMPLES[0].token_ids])).logits[0]
    expected = torch.log_softmax(logits, -1)[[2, 3], [8, 9]]
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


def test_missing_logprobs_are_nan_and_masks_in_the_middle_hold() -> None:
    sample = TrainingSample(
        token_ids=[1, 2, 3, 4],
        loss_mask=[True, True, False, True],
        advantages=[0.0, 1.0, 0.0, 2.0],
        reward=0.0,
        sampler_logprobs=[math.nan, -1.0, math.nan, -2.0],
    )
    batch = build_microbatch([sample, make([1], [2])])
    assert batch.target_ids.tolist() == [2, 4, 2]
    assert batch.advantages.tolist() == [1.0, 2.0, 0.5]
    assert batch.sampler_logprobs[:2].tolist() == [-1.0, -2.0]
    assert math.isnan(batch.sampler_logprobs[2])


def test_distilled_candidates_are_padded() -> None:
    sample = make([1], [2, 3], distill_token_ids=[[], [2, 9], [3]], distill_logprobs=[[], [-0.1, -3.0], [-0.2]])
    batch = build_microbatch([sample, make([1], [4])])
    assert batch.distill_ids is not None
    assert batch.distill_logprobs is not None
    assert batch.distill_ids.tolist() == [[2, 9], [3, 0], [0, 0]]
    assert batch.distill_logprobs.tolist() == [
        [pytest.approx(-0.1), -3.0],
        [pytest.approx(-0.2), -math.inf],
        [-math.inf, -math.inf],
    ]


def test_splitting_keeps_order_and_balance() -> None:
    assert [len(part) for part in split_evenly(SAMPLES, 3)] == [2, 1, 1]
    assert [len(part) for part in split_evenly(SAMPLES[:1], 2)] == [1, 0]


def test_runs_of_a_flat_row_give_attention_of_whole_samples() -> None:
    batch = build_microbatch([*SAMPLES, make([40, 41], [], "j")], layout="shared_prefix")
    assert batch.runs is not None
    assert batch.runs.key_index is not None
    starts, key_starts = batch.runs.query_starts.tolist(), batch.runs.key_starts.tolist()
    assert starts == [0, 3, 5, 8, 10, 11, 12, 16, 18]
    seen = [batch.runs.key_index[a:b].tolist() for a, b in itertools.pairwise(key_starts)]
    assert seen[:3] == [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7]]
    assert seen[3:] == [[8, 9], [8, 9, 10], [11], [11, 12, 13, 14, 15], [16, 17]]
    assert (batch.runs.longest_queries, batch.runs.longest_keys) == (4, 8)


def test_runs_of_a_row_without_shared_beginnings_are_the_samples() -> None:
    runs = build_microbatch(SAMPLES, layout="packed").runs
    assert runs is not None
    assert runs.key_index is None
    assert runs.query_starts.tolist() == runs.key_starts.tolist() == [0, 5, 11, 14, 19]
