"""The same step, however it is cut: the weights after training must agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atlaslib.algorithms.losses import LOSS_TYPES


def same(first: torch.Tensor, second: torch.Tensor) -> None:
    torch.testing.assert_close(second, first, rtol=0, atol=3e-6)


@pytest.fixture
def whole(run: Any) -> torch.Tensor:
    weights: torch.Tensor = run(packing="padded")[0]
    return weights


@pytest.mark.parametrize("loss_type", [kind for kind in LOSS_TYPES if kind != "bnpo"])
def test_eight_times_one_equals_one_times_eight(loss_type: str, run: Any) -> None:
    # bnpo is left out: it averages inside each microbatch by definition
    one, _ = run(loss_type=loss_type, per_device_train_batch_size=8, gradient_accumulation_steps=1)
    eight, _ = run(loss_type=loss_type, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    same(one, eight)


@pytest.mark.parametrize(
    "options",
    [
        {"packing": "packed"},
        {"packing": "shared_prefix"},
        {"packing": "auto"},
        {"logprob_chunk_size": 3},
        {"backprop_accumulation_steps": 4},
        {"backprop_accumulation_micro_batch_size": 3},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "generation_aggregation_steps": 2},
        {"shuffle_generation_inputs": True},
        {"offload_untrained_models": True},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
def test_equals_the_plain_step(options: dict[str, Any], whole: torch.Tensor, run: Any) -> None:
    same(whole, run(**{"packing": "padded", **options})[0])


def test_the_comparison_can_fail(whole: torch.Tensor, run: Any) -> None:
    assert float((run(packing="padded", beta=0.0)[0] - whole).abs().max()) > 1e-5
