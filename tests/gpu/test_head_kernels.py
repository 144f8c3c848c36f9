"""The fused head kernels against plain torch on CUDA, and against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atlaslib.algorithms import head_kernels
from atlaslib.algorithms.logprobs import token_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def inputs(vocab: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return {
        "hidden": torch.randn(257, 64, device="cuda", dtype=torch.bfloat16, generator=generator),
        "weight": torch.randn(vocab, 64, device="cuda", dtype=torch.bfloat16, generator=generator) * 0.2,
        "targets": torch.randint(0, vocab, (257,), device="cuda", generator=generator),
        "temperature": torch.rand(257, device="cuda", generator=generator) + 0.5,
        "upstream": torch.randn(257, device="cuda", generator=generator),
        "entropy_upstream": torch.randn(257, device="cuda", generator=generator),
    }


def run(data: dict[str, torch.Tensor], chunk_size: int | None, entropy: bool) -> tuple[torch.Tensor, ...]:
    leaves = [data["hidden"].clone().requires_grad_(True), data["weight"].clone().requires_grad_(True)]
    result = token_logprobs(
        leaves[0],
        leaves[1],
        data["targets"],
        temperature=data["temperature"],
        chunk_size=chunk_size,
        with_entropy=True,
    )
    assert result.entropy is not None
    loss = (result.logprobs * data["upstream"]).sum()
    if entropy:
        loss = loss + (result.entropy * data["entropy_upstream"]).sum()
    loss.backward()
    return result.logprobs.detach(), result.entropy.detach(), *[leaf.grad.double() for leaf in leaves]


def plain(data: dict[str, torch.Tensor], entropy: bool) -> tuple[torch.Tensor, ...]:
    """float64 from the same bfloat16 numbers, without any rounding in between."""
    leaves = [data["hidden"].double().requires_grad_(True), data["weight"].double().requires_grad_(True)]
    log_p = torch.log_softmax(leaves[0] @ leaves[1].t() / data["temperature"].double().unsqueeze(1), dim=-1)
    logprobs = log_p.gather(1, data["targets"].unsqueeze(1))[:, 0]
    uncertainty = -(log_p.exp() * log_p).sum(-1)
    loss = (logprobs * data["upstream"]).sum()
    if entropy:
        loss = loss + (uncertainty * data["entropy_upstream"]).sum()
    loss.backward()
    return logprobs.detach(), uncertainty.detach(), *[leaf.grad for leaf in leaves]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 100])
@pytest.mark.parametrize("vocab", [1000, 151936])
def test_fused_equals_torch_and_float64(
    vocab: int, chunk_size: int | None, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = inputs(vocab, seed=vocab + 2 * entropy)
    exact = plain(data, entropy)
    results: list[tuple[torch.Tensor, ...]] = []
    for fused in (True, False):
        state: dict[str, Any] = {} if fused else {"works": False}
        monkeypatch.setattr(head_kernels, "_state", state)
        results.append(run(data, chunk_size, entropy))
        assert state == ({"works": True, "gradient": True} if fused else {"works": False})
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-3)
    for fused_part, torch_part, wanted in zip(*results, exact, strict=True):
        # bfloat16 logits bound both; the kernels may not be worse than torch by more than a little
        assert error(fused_part, wanted) < max(1.2 * error(torch_part, wanted), 1e-4)
        assert error(fused_part, wanted) < 0.02
