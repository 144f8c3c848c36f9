"""The fused head kernels against plain torch on CUDA."""

from __future__ import annotations

import pytest
import torch

from atlaslib.algorithms import head_kernels
from atlaslib.algorithms.logprobs import token_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("chunk_size", [None, 100])
@pytest.mark.parametrize("vocab", [1000, 151936])
def test_fused_equals_torch(vocab: int, chunk_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(257, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
    weight = torch.randn(vocab, 64, device="cuda", dtype=torch.bfloat16, generator=generator) * 0.2
    targets = torch.randint(0, vocab, (257,), device="cuda", generator=generator)
    temperature = torch.rand(257, device="cuda", generator=generator) + 0.5
    upstream = torch.randn(257, device="cuda", generator=generator)
    results = []
    for fused in (True, False):
        monkeypatch.setattr(head_kernels, "_state", {} if fused else {"works": False})
        inputs = [hidden.clone().requires_grad_(True), weight.clone().requires_grad_(True)]
        logprobs = token_logprobs(
            inputs[0], inputs[1], targets, temperature=temperature, chunk_size=chunk_size
        ).logprobs
        (logprobs * upstream).sum().backward()
        results.append((logprobs.detach(), *[tensor.grad.float() for tensor in inputs]))
        if fused:
            assert head_kernels._state["works"] is True
            assert head_kernels._state["gradient"] is True
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-3)
    for got, expected in zip(results[0][1:], results[1][1:], strict=True):
        assert float((got - expected).norm() / expected.norm()) < 0.02
