"""Chunked log-probs: values, gradients, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atlaslib.algorithms.logprobs import HeadOptions, token_logprobs


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    head: HeadOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias) * head.logit_scale
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    log_p = torch.log_softmax(logits / temperature.unsqueeze(1), dim=-1)
    return log_p.gather(1, targets), -(log_p.exp() * log_p).sum(-1)


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "hidden": torch.randn(11, 6, generator=generator, dtype=dtype, requires_grad=True),
        "weight": torch.randn(23, 6, generator=generator, dtype=dtype, requires_grad=True),
        "bias": torch.randn(23, generator=generator, dtype=dtype, requires_grad=True),
        "targets": torch.randint(0, 23, (11, 3), generator=generator),
        "temperature": torch.tensor([0.5, 1.0, 2.0] * 3 + [0.75, 0.25]),
    }


@pytest.mark.parametrize("chunk_size", [None, 1, 4, 100])
@pytest.mark.parametrize("head", [HeadOptions(), HeadOptions(logit_scale=0.5, softcap=3.0)])
def test_equals_the_plain_computation(chunk_size: int | None, head: HeadOptions) -> None:
    data = inputs()
    expected, expected_entropy = plain(
        data["hidden"], data["weight"], data["bias"], data["targets"], data["temperature"].double(), head
    )
    upstream = torch.randn(11, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected_grads = torch.autograd.grad(
        (expected * upstream).sum() + 0.3 * expected_entropy.sum(), [data["hidden"], data["weight"], data["bias"]]
    )
    result = token_logprobs(
        data["hidden"],
        data["weight"],
        data["targets"],
        bias=data["bias"],
        temperature=data["temperature"],
        chunk_size=chunk_size,
        with_entropy=True,
        head=head,
    )
    assert result.entropy is not None
    torch.testing.assert_close(result.logprobs, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.entropy, expected_entropy, rtol=0, atol=1e-12)
    grads = torch.autograd.grad(
        (result.logprobs * upstream).sum() + 0.3 * result.entropy.sum(), [data["hidden"], data["weight"], data["bias"]]
    )
    for got, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


def test_gradients_by_finite_differences() -> None:
    data = inputs()

    def function(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = token_logprobs(
            hidden, weight, data["targets"], bias=bias, temperature=data["temperature"], chunk_size=4, with_entropy=True
        )
        assert result.entropy is not None
        return result.logprobs, result.entropy

    assert torch.autograd.gradcheck(function, (data["hidden"], data["weight"], data["bias"]))


def test_frozen_head_gets_no_gradient() -> None:
    data = inputs(torch.float32)
    weight = data["weight"].detach()
    token_logprobs(data["hidden"], weight, data["targets"][:, 0], chunk_size=3).logprobs.sum().backward()
    assert weight.grad is None
    assert data["hidden"].grad is not None


def test_bfloat16_weights_give_float32_logprobs_near_the_exact_ones() -> None:
    data = inputs(torch.float32)
    exact = token_logprobs(data["hidden"], data["weight"], data["targets"][:, 0]).logprobs
    rough = token_logprobs(data["hidden"], data["weight"], data["targets"][:, 0], compute_dtype=torch.bfloat16).logprobs
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, exact, rtol=0, atol=0.1)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the largest tensor any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize(("chunk_size", "limit"), [(16, 16 * 5000), (None, 256 * 5000)])
def test_logits_are_never_held_whole(chunk_size: int | None, limit: int) -> None:
    hidden = torch.randn(256, 8, requires_grad=True)
    weight = torch.randn(5000, 8, requires_grad=True)
    with LargestTensor() as largest:
        token_logprobs(
            hidden, weight, torch.randint(0, 5000, (256,)), chunk_size=chunk_size, with_entropy=True
        ).logprobs.sum().backward()
    assert largest.elements == limit
