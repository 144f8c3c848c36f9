"""One policy loss with options, over the flat list of trained tokens.

Every loss here is ``sum over tokens of weight * objective``. The options choose the objective of a token (clipped ratio,
clipped weight times log-prob, plain cross-entropy) and its weight (how tokens and sequences are averaged). The weights use counts of the
whole optimizer step over all processes, so the sum over microbatches and processes is the loss of the step, however it was cut.

| loss_type   | ratio            | clip                              | averaging                                     |
|-------------|------------------|-----------------------------------|-----------------------------------------------|
| grpo        | token            | [1 - eps, 1 + eps_high]           | mean over tokens, then over sequences         |
| dr_grpo     | token            | same                              | sum / (sequences * max_completion_length)     |
| dapo        | token            | same, eps_high 0.28 by default    | mean over all tokens of the step              |
| bnpo        | token            | same                              | mean over tokens of each micro-step           |
| gspo        | sequence (mean)  | same                              | as grpo                                       |
| cispo       | token, detached  | weight at most 1 + eps_high (5)   | as dapo                                       |
| rloo        | token            | as grpo                           | sum over tokens, then mean over sequences     |
| reinforce++ | token            | as grpo                           | as dapo                                       |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from atlaslib.algorithms.kl import KLEstimator, kl_per_token
from atlaslib.types import StepTotals

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "rloo", "reinforce++"]
LOSS_TYPES: tuple[str, ...] = get_args(LossType)
ImportanceCorrection = Literal["none", "tis", "mis"]
MAX_LOG_RATIO = 20.0
"""Beyond it a ratio carries no gradient: exp() of a larger one is infinite in float32, and a clipped infinity has the gradient NaN."""
DEFAULT_EPSILON_HIGH: dict[str, float] = {"dapo": 0.28, "cispo": 4.0}


@dataclass(kw_only=True, slots=True, frozen=True)
class LossOptions:
    """The choices of :func:`policy_loss`."""

    loss_type: LossType = "grpo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    """Upper clip; None = ``epsilon`` (dapo 0.28, cispo 4.0)"""
    delta: float | None = None
    """Two-sided clipping: ratios never count above this, also for negative advantages"""
    beta: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = 0.0
    importance_correction: ImportanceCorrection = "none"
    importance_cap: float = 2.0
    importance_level: Literal["token", "sequence"] = "token"
    max_completion_length: int = 256
    """The constant dr_grpo divides by"""
    distill_coef: float = 1.0

    @property
    def upper(self) -> float:
        """The upper clip in force."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return DEFAULT_EPSILON_HIGH.get(self.loss_type, self.epsilon)


@dataclass(kw_only=True, slots=True)
class TokenStreams:
    """The inputs of the loss, one entry per trained token."""

    logprobs: torch.Tensor
    """[T] of the policy being trained; carries the gradient"""
    old_logprobs: torch.Tensor
    """[T] denominator of the ratio, no gradient"""
    sampler_logprobs: torch.Tensor
    """[T] of the policy that sampled; NaN where unknown"""
    advantages: torch.Tensor
    """[T]"""
    sample_index: torch.Tensor
    """[T]"""
    sample_lengths: torch.Tensor
    """[S]"""
    sft: torch.Tensor
    """[T] bool"""
    entropy: torch.Tensor | None = None
    """[T]"""
    ref_logprobs: torch.Tensor | None = None
    """[T]"""
    distill_policy_logprobs: torch.Tensor | None = None
    """[T, K] the policy's log-probs of the teacher's candidates"""
    distill_teacher_logprobs: torch.Tensor | None = None
    """[T, K]; -inf pads"""


@dataclass(kw_only=True, slots=True)
class LossResult:
    """The loss of a microbatch (its share of the step's loss) and sums for the metrics."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums over tokens, to be divided by ``tokens`` (also a sum) once all microbatches are in"""


def policy_loss(tokens: TokenStreams, options: LossOptions, totals: StepTotals) -> LossResult:
    """The loss of one microbatch as its share of the whole step; see the table in the module docstring."""
    weights = token_weights(options, tokens.sample_index, tokens.sample_lengths, totals)
    ratio = _ratio(tokens, options)
    objective, clipped = _policy_objective(tokens, options, ratio)
    correction = _importance_weights(tokens, options)
    if correction is not None:
        objective = objective * correction
    per_token = objective
    kl: torch.Tensor | None = None
    if tokens.ref_logprobs is not None:
        kl = kl_per_token(tokens.logprobs, tokens.ref_logprobs, options.kl_estimator)
        per_token = per_token + options.beta * kl
    if tokens.entropy is not None and options.entropy_coef:
        per_token = per_token - options.entropy_coef * tokens.entropy
    per_token = torch.where(tokens.sft, -tokens.logprobs, per_token)
    distill = _distillation(tokens)
    if distill is not None:
        per_token = per_token + options.distill_coef * distill
    loss = (weights.detach() * per_token).sum()
    return LossResult(loss=loss, sums=_sums(tokens, ratio, clipped, kl, distill, correction))


def token_weights(
    options: LossOptions, sample_index: torch.Tensor, sample_lengths: torch.Tensor, totals: StepTotals
) -> torch.Tensor:
    """[T] weight of each token in the loss of the step."""
    kind = options.loss_type
    ones = torch.ones_like(sample_index, dtype=sample_lengths.dtype)
    if kind in {"grpo", "gspo"}:
        return 1.0 / (sample_lengths.clamp(min=1.0)[sample_index] * max(totals.num_sequences, 1.0))
    if kind == "dr_grpo":
        return ones / (max(totals.num_sequences, 1.0) * options.max_completion_length)
    if kind == "rloo":
        return ones / max(totals.num_sequences, 1.0)
    if kind == "bnpo":
        here = totals.num_micro_step_tokens or float(sample_index.shape[0])
        return ones / (max(here, 1.0) * max(totals.num_micro_steps, 1.0))
    return ones / max(totals.num_tokens, 1.0)


def _ratio(tokens: TokenStreams, options: LossOptions) -> torch.Tensor:
    """[T] ratio policy / old, per token or (gspo) the geometric mean over the sequence."""
    log_ratio = tokens.logprobs - tokens.old_logprobs
    if options.loss_type == "gspo":
        log_ratio = _sequence_mean(log_ratio, tokens)[tokens.sample_index]
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


def _sequence_sum(values: torch.Tensor, tokens: TokenStreams) -> torch.Tensor:
    sums = torch.zeros(tokens.sample_lengths.shape[0], dtype=values.dtype, device=values.device)
    return sums.index_add(0, tokens.sample_index, values)


def _sequence_mean(values: torch.Tensor, tokens: TokenStreams) -> torch.Tensor:
    return _sequence_sum(values, tokens) / tokens.sample_lengths.clamp(min=1.0).to(values.dtype)


def _policy_objective(
    tokens: TokenStreams, options: LossOptions, ratio: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """[T] what is minimised, and which tokens were clipped below and above."""
    advantages = tokens.advantages
    low, high = 1.0 - options.epsilon, 1.0 + options.upper
    if options.loss_type == "cispo":
        weight = ratio.detach().clamp(max=high)
        none = torch.zeros_like(tokens.sft)
        return -weight * advantages * tokens.logprobs, (none, (ratio > high) & (advantages > 0))
    bounded = ratio if options.delta is None else ratio.clamp(max=options.delta)
    objective = -torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
    return objective, ((ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0))


def _importance_weights(tokens: TokenStreams, options: LossOptions) -> torch.Tensor | None:
    """[T] weight for sampler and trainer not agreeing on the same weights: truncated (tis) or masked (mis) at the cap."""
    if options.importance_correction == "none":
        return None
    known = ~torch.isnan(tokens.sampler_logprobs)
    log_weight = torch.where(
        known, tokens.old_logprobs - tokens.sampler_logprobs, torch.zeros_like(tokens.old_logprobs)
    )
    if options.importance_level == "sequence":
        log_weight = _sequence_sum(log_weight, tokens)[tokens.sample_index]
    weight = torch.exp(log_weight.detach())
    if options.importance_correction == "tis":
        return weight.clamp(max=options.importance_cap)
    return torch.where(weight > options.importance_cap, torch.zeros_like(weight), weight)


def _distillation(tokens: TokenStreams) -> torch.Tensor | None:
    """[T] sum over the teacher's candidates of p_teacher * (log p_teacher - log p_policy); 0 where a token has none."""
    if tokens.distill_policy_logprobs is None or tokens.distill_teacher_logprobs is None:
        return None
    teacher = tokens.distill_teacher_logprobs
    present = torch.isfinite(teacher)
    safe = torch.where(present, teacher, torch.zeros_like(teacher))
    terms = torch.exp(safe) * (safe - tokens.distill_policy_logprobs)
    return torch.where(present, terms, torch.zeros_like(terms)).sum(-1)


@torch.no_grad()
def _sums(
    tokens: TokenStreams,
    ratio: torch.Tensor,
    clipped: tuple[torch.Tensor, torch.Tensor],
    kl: torch.Tensor | None,
    distill: torch.Tensor | None,
    correction: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    known = ~torch.isnan(tokens.sampler_logprobs)
    gap = torch.where(known, tokens.logprobs - tokens.sampler_logprobs, torch.zeros_like(tokens.logprobs))
    sums = {
        "tokens": torch.full((), float(tokens.logprobs.shape[0]), device=ratio.device),
        "ratio": ratio.sum(),
        "clip_low": clipped[0].sum(),
        "clip_high": clipped[1].sum(),
        "logprobs": tokens.logprobs.sum(),
        "known": known.sum(),
        # k3 estimate of KL(sampler || trainer) on the sampler's own tokens
        "mismatch_kl": (torch.expm1(gap) - gap).sum(),
        "mismatch_abs": gap.abs().sum(),
    }
    if tokens.entropy is not None:
        sums["entropy"] = tokens.entropy.sum()
    if kl is not None:
        sums["kl"] = kl.sum()
    if distill is not None:
        sums["distill"] = distill.sum()
    if correction is not None:
        sums["importance_weight"] = correction.sum()
        sums["importance_masked"] = (correction == 0).sum()
    return {name: value.detach().float() for name, value in sums.items()}
