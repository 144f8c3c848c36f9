"""The update on CUDA: flat rows by the flash kernel and compiled layers give what padded rows of the plain model give."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

from atlaslib.data.packing import build_microbatch
from atlaslib.models.tiny import tiny_llama
from atlaslib.trainers import flat_attention
from atlaslib.trainers.compiled import CompiledModules
from atlaslib.trainers.grpo_config import GRPOConfig
from atlaslib.trainers.policy import PolicyForward
from atlaslib.trainers.step_metrics import StepMetrics
from atlaslib.trainers.update import PolicyUpdate
from atlaslib.types import TrainingSample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def samples(seed: int = 0) -> list[TrainingSample]:
    """Three groups with prompts of their own, completions of different lengths, gaps in the masks."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(5, 500, (count,), generator=generator).tolist()

    made = []
    for group, (prompt_length, lengths) in enumerate([(37, [80, 3, 129]), (1, [64, 65]), (130, [17, 200, 40])]):
        prompt = ids(prompt_length)
        for number, length in enumerate(lengths):
            tokens = [*prompt, *ids(length)]
            trained = [False] * prompt_length + [index % 7 != 3 for index in range(length)]
            made.append(
                TrainingSample(
                    token_ids=tokens,
                    loss_mask=trained,
                    sampler_logprobs=[-6.2] * len(tokens),
                    advantages=[(-1.0) ** number] * len(tokens),
                    reward=0.0,
                    group_id=str(group),
                )
            )
    return made


@pytest.fixture
def model() -> Any:
    """Grouped-query attention with heads of 64."""
    return tiny_llama(vocab_size=500, hidden=256, layers=3, heads=4, kv_heads=2, max_len=512, seed=0).to("cuda")


def run(model: Any, layout: Any, around: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    forward = PolicyForward(unwrap=lambda it: it, **({"around": around} if around else {}))
    logprobs = forward(model, build_microbatch(samples(), layout=layout, device="cuda"), with_entropy=True).logprobs[
        :, 0
    ]
    generator = torch.Generator("cuda").manual_seed(5)
    (logprobs * torch.randn(logprobs.shape, device="cuda", generator=generator)).sum().backward()
    return logprobs.detach(), torch.cat([p.grad.double().flatten() for p in model.parameters()])


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
def test_bfloat16_is_as_near_to_float32_as_plain_bfloat16(
    model: Any, layout: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = run(model, "padded")
    half = model.to(torch.bfloat16)
    usual = run(half, "padded")
    calls: list[int] = []
    flash = flat_attention._flash
    monkeypatch.setattr(flat_attention, "_flash", lambda *given: calls.append(1) or flash(*given))
    around = CompiledModules() if compiled else None
    got = run(half, layout, around)
    assert bool(calls) == (layout != "padded")
    assert around is None or around.works
    for part, wanted, plain in zip(got, exact, usual, strict=True):
        assert error(part, wanted) < max(1.3 * error(plain, wanted), 1e-3)
        assert error(part, wanted) < 0.05


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_takes_the_flash_kernel_too(model: Any, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = run(model, "padded")
    with torch.autocast("cuda", torch.bfloat16):
        usual = run(model, "padded")
        calls: list[int] = []
        flash = flat_attention._flash
        monkeypatch.setattr(flat_attention, "_flash", lambda *given: calls.append(1) or flash(*given))
        got = run(model, "shared_prefix", CompiledModules() if compiled else None)
    assert calls
    for part, wanted, plain in zip(got, exact, usual, strict=True):
        assert error(part, wanted) < max(1.3 * error(plain, wanted), 1e-3)


def test_compiled_layers_serve_batches_of_any_size(model: Any) -> None:
    half = model.to(torch.bfloat16)
    around = CompiledModules()
    forward = PolicyForward(unwrap=lambda it: it, around=around)
    plain = PolicyForward(unwrap=lambda it: it)
    for seed, count in enumerate((8, 5, 2, 7, 3)):
        batch = build_microbatch(samples(seed)[:count], layout="shared_prefix", device="cuda")
        with torch.no_grad():
            expected = plain(half, batch).logprobs
        got = forward(half, batch).logprobs
        got.sum().backward()
        assert error(got.detach(), expected) < 0.01
    assert around.works


@pytest.mark.parametrize("packing", ["padded", "shared_prefix"])
def test_an_update_moves_the_weights_as_the_plain_loss_does(model: Any, packing: str) -> None:
    """The policy loss at ratio near 1 against its plain formula on whole logits in float32."""
    from accelerate import Accelerator

    data = samples()
    model.zero_grad()
    total = 0.0
    for sample in data:
        logits = model(input_ids=torch.tensor([sample.token_ids], device="cuda")).logits[0].float()
        log_p = torch.log_softmax(logits, -1)
        trained = torch.tensor([i for i in range(1, len(sample.token_ids)) if sample.loss_mask[i]], device="cuda")
        targets = torch.tensor(sample.token_ids, device="cuda")[trained]
        ratio = torch.exp(log_p[trained - 1, targets] + 6.2)
        advantage = sample.advantages[0]
        objective = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        total = total + objective.mean() / len(data)
    total.backward()
    expected = torch.cat([p.grad.double().flatten() for p in model.parameters()])

    half = model.to(torch.bfloat16)
    half.zero_grad()
    metrics = StepMetrics()
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        beta=0.0,
        packing=packing,
        compile_modules=True,
        report_to="none",
        temperature=1.0,
    )
    update = PolicyUpdate(accelerator=Accelerator(), config=config, reference=None, pad_id=0, metrics=lambda: metrics)
    (pieces,) = update.micro_steps(data, 1, half)
    loss = sum(update.loss(half, piece).loss for piece in pieces)
    loss.backward()
    assert float(loss) == pytest.approx(float(total), rel=0.02, abs=2e-3)
    assert error(torch.cat([p.grad.double().flatten() for p in half.parameters()]), expected) < 0.06
