"""The policy loss against a plain float64 loop over sequences and tokens, for every option."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from atlaslib.algorithms.kl import kl_per_token
from atlaslib.algorithms.losses import LOSS_TYPES, LossOptions, TokenStreams, policy_loss
from atlaslib.types import StepTotals

LENGTHS = [3, 1, 4]
TOTALS = StepTotals(num_sequences=5, num_tokens=20, num_micro_steps=2)


def make_streams(
    dtype: torch.dtype = torch.float64, *, reference: bool = True, entropy: bool = True, **changes: Any
) -> TokenStreams:
    generator = torch.Generator().manual_seed(5)
    total = sum(LENGTHS)

    def draw(scale: float = 1.0) -> torch.Tensor:
        return torch.randn(total, generator=generator, dtype=dtype) * scale

    logprobs = -draw().abs() - 0.1
    values: dict[str, Any] = {
        "logprobs": logprobs.clone().requires_grad_(True),
        "old_logprobs": logprobs + draw(0.4),
        "sampler_logprobs": logprobs + draw(0.5),
        "advantages": draw(),
        "sample_index": torch.tensor([i for i, n in enumerate(LENGTHS) for _ in range(n)]),
        "sample_lengths": torch.tensor([float(n) for n in LENGTHS], dtype=dtype),
        "sft": torch.zeros(total, dtype=torch.bool),
        "ref_logprobs": logprobs + draw(0.3) if reference else None,
        "entropy": draw().abs().requires_grad_(True) if entropy else None,
    }
    return TokenStreams(**{**values, **changes})


def reference_loss(streams: TokenStreams, options: LossOptions, totals: StepTotals) -> float:
    """The definition, written as loops."""
    position = 0
    total = 0.0
    num_tokens_here = sum(LENGTHS)
    for length in LENGTHS:
        indices = range(position, position + length)
        position += length
        token_log_ratios = [(streams.logprobs[i] - streams.old_logprobs[i]).item() for i in indices]
        sampler_gaps = [float(streams.old_logprobs[i] - streams.sampler_logprobs[i]) for i in indices]
        for place, i in enumerate(indices):
            log_ratio = sum(token_log_ratios) / length if options.loss_type == "gspo" else token_log_ratios[place]
            ratio, advantage = math.exp(log_ratio), float(streams.advantages[i])
            if options.loss_type == "cispo":
                value = -min(ratio, 1 + options.upper) * advantage * streams.logprobs[i].item()
            else:
                bounded = ratio if options.delta is None else min(ratio, options.delta)
                value = -min(bounded * advantage, min(max(ratio, 1 - options.epsilon), 1 + options.upper) * advantage)
            if options.importance_correction != "none":
                gap = sum(sampler_gaps) if options.importance_level == "sequence" else sampler_gaps[place]
                weight = math.exp(gap)
                if options.importance_correction == "tis":
                    weight = min(weight, options.importance_cap)
                elif weight > options.importance_cap:
                    weight = 0.0
                value *= weight
            if streams.ref_logprobs is not None:
                difference = (streams.ref_logprobs[i] - streams.logprobs[i]).item()
                value += options.beta * (math.exp(difference) - difference - 1)
            if streams.entropy is not None:
                value -= options.entropy_coef * streams.entropy[i].item()
            if bool(streams.sft[i]):
                value = -streams.logprobs[i].item()
            total += value * {
                "grpo": 1 / (length * totals.num_sequences),
                "gspo": 1 / (length * totals.num_sequences),
                "dr_grpo": 1 / (totals.num_sequences * options.max_completion_length),
                "rloo": 1 / totals.num_sequences,
                "bnpo": 1 / (num_tokens_here * totals.num_micro_steps),
            }.get(options.loss_type, 1 / totals.num_tokens)
    return total


OPTIONS = [
    {},
    {"beta": 0.04},
    {"epsilon": 0.1, "epsilon_high": 0.3},
    {"delta": 1.15},
    {"entropy_coef": 0.05},
    {"importance_correction": "tis", "importance_cap": 1.2},
    {"importance_correction": "mis", "importance_cap": 1.2},
    {"importance_correction": "tis", "importance_cap": 1.5, "importance_level": "sequence"},
    {"importance_correction": "mis", "importance_cap": 1.5, "importance_level": "sequence", "beta": 0.1},
]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("changes", OPTIONS, ids=lambda changes: "-".join(map(str, changes.values())) or "plain")
def test_equals_the_definition(loss_type: Any, changes: dict[str, Any]) -> None:
    options = LossOptions(loss_type=loss_type, max_completion_length=7, **changes)
    streams = make_streams()
    assert policy_loss(streams, options, TOTALS).loss.item() == pytest.approx(
        reference_loss(streams, options, TOTALS), abs=1e-12
    )


@pytest.mark.parametrize("loss_type", [kind for kind in LOSS_TYPES if kind != "cispo"])
def test_gradient_by_finite_differences(loss_type: Any) -> None:
    options = LossOptions(loss_type=loss_type, beta=0.1, entropy_coef=0.02, max_completion_length=7)
    streams = make_streams()

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        streams.logprobs, streams.entropy = logprobs, entropy
        return policy_loss(streams, options, TOTALS).loss

    assert torch.autograd.gradcheck(loss, (streams.logprobs, streams.entropy))


def test_cispo_lets_gradient_through_the_logprob_only() -> None:
    streams = make_streams(reference=False, entropy=False)
    options = LossOptions(loss_type="cispo", epsilon_high=0.1)
    (grad,) = torch.autograd.grad(policy_loss(streams, options, TOTALS).loss, streams.logprobs)
    ratio = torch.exp(streams.logprobs - streams.old_logprobs).clamp(max=1.1)
    torch.testing.assert_close(grad, -(ratio * streams.advantages).detach() / TOTALS.num_tokens)


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    streams = make_streams(reference=False, entropy=False)
    streams.old_logprobs = streams.logprobs.detach().clone()
    (grad,) = torch.autograd.grad(policy_loss(streams, LossOptions(loss_type="dapo"), TOTALS).loss, streams.logprobs)
    torch.testing.assert_close(grad, -streams.advantages / TOTALS.num_tokens)


def test_clipped_tokens_have_no_gradient_and_are_counted() -> None:
    streams = make_streams(reference=False, entropy=False)
    result = policy_loss(streams, LossOptions(), TOTALS)
    (grad,) = torch.autograd.grad(result.loss, streams.logprobs)
    ratio = torch.exp(streams.logprobs - streams.old_logprobs)
    low, high = (ratio < 0.8) & (streams.advantages < 0), (ratio > 1.2) & (streams.advantages > 0)
    assert int(result.sums["clip_low"]) == int(low.sum())
    assert int(result.sums["clip_high"]) == int(high.sum())
    assert int((low | high).sum()) > 0
    assert bool((grad[low | high] == 0).all())
    assert bool((grad[~(low | high)] != 0).all())


@pytest.mark.parametrize("sft", [False, True])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_ratio_beyond_all_numbers_leaves_the_gradient_finite(loss_type: Any, sft: bool) -> None:
    streams = make_streams(torch.float32, reference=False, entropy=False)
    streams.old_logprobs[::2] = -500.0
    streams.sft[:] = sft
    (grad,) = torch.autograd.grad(policy_loss(streams, LossOptions(loss_type=loss_type), TOTALS).loss, streams.logprobs)
    assert bool(torch.isfinite(grad).all())
    assert bool((grad != 0).any())


def test_bnpo_averages_over_the_micro_step_however_it_is_cut() -> None:
    streams = make_streams(reference=False, entropy=False)
    options = LossOptions(loss_type="bnpo")
    whole = policy_loss(streams, options, TOTALS).loss
    split = LENGTHS[0]
    pieces = []
    for part, lengths in ((slice(None, split), LENGTHS[:1]), (slice(split, None), LENGTHS[1:])):
        fields = {
            name: getattr(streams, name)[part]
            for name in ("logprobs", "old_logprobs", "sampler_logprobs", "advantages", "sft")
        }
        index = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)])
        pieces.append(
            TokenStreams(**fields, sample_index=index, sample_lengths=torch.tensor(lengths, dtype=torch.float64))
        )
    totals = replace(TOTALS, num_micro_step_tokens=sum(LENGTHS))
    assert sum(policy_loss(piece, options, totals).loss.item() for piece in pieces) == pytest.approx(whole.item())


def test_supervised_tokens_are_cross_entropy() -> None:
    streams = make_streams()
    streams.sft = streams.sample_index == 1
    options = LossOptions(loss_type="dapo", beta=0.3, entropy_coef=0.1)
    assert policy_loss(streams, options, TOTALS).loss.item() == pytest.approx(
        reference_loss(streams, options, TOTALS), abs=1e-12
    )


def test_distillation_is_the_divergence_on_the_teachers_candidates() -> None:
    teacher = torch.tensor([[0.6, 0.3], [0.9, 0.05]], dtype=torch.float64).log()
    teacher = torch.cat([teacher, torch.full((6, 2), -math.inf, dtype=torch.float64)])
    policy = torch.full((8, 2), math.log(0.25), dtype=torch.float64, requires_grad=True)
    streams = make_streams(
        reference=False, entropy=False, distill_policy_logprobs=policy, distill_teacher_logprobs=teacher
    )
    with_term = policy_loss(streams, LossOptions(loss_type="dapo", distill_coef=2.0), TOTALS).loss
    without = policy_loss(make_streams(reference=False, entropy=False), LossOptions(loss_type="dapo"), TOTALS).loss
    expected = (
        0.6 * math.log(0.6 / 0.25)
        + 0.3 * math.log(0.3 / 0.25)
        + 0.9 * math.log(0.9 / 0.25)
        + 0.05 * math.log(0.05 / 0.25)
    )
    assert float(with_term.detach() - without.detach()) == pytest.approx(2.0 * expected / TOTALS.num_tokens)
    with_term.backward()
    assert policy.grad is not None
    assert bool((policy.grad[2:] == 0).all())


def test_unknown_sampler_logprobs_weigh_one() -> None:
    streams = make_streams(reference=False, entropy=False)
    streams.sampler_logprobs = torch.full_like(streams.sampler_logprobs, math.nan)
    corrected = policy_loss(streams, LossOptions(importance_correction="tis"), TOTALS)
    plain = policy_loss(streams, LossOptions(), TOTALS)
    assert corrected.loss.item() == plain.loss.item()
    assert float(corrected.sums["known"]) == 0.0


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) + 0.5 - 1)])
def test_kl_estimators(estimator: Any, expected: float) -> None:
    value = kl_per_token(
        torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.5], dtype=torch.float64), estimator
    )
    assert float(value[0]) == pytest.approx(expected, abs=1e-12)


def test_k3_is_never_negative_and_unbiased_for_a_categorical_policy() -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    terms = kl_per_token(policy.log(), reference.log(), "k3")
    assert bool((terms >= 0).all())
    assert float((policy * terms).sum()) == pytest.approx(float((policy * (policy / reference).log()).sum()))
