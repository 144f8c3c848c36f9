"""Estimators of KL(policy || reference) from the log-probs of sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch

KLEstimator = Literal["k1", "k2", "k3"]


def kl_per_token(
    policy_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KLEstimator = "k3"
) -> torch.Tensor:
    """[T] estimates. ``k1 = p - r`` (unbiased, may be negative), ``k2 = (p - r)^2 / 2``, ``k3 = exp(r - p) - (r - p) - 1``
    (unbiased, never negative)."""
    difference = ref_logprobs - policy_logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference**2
    return torch.expm1(difference) - difference
