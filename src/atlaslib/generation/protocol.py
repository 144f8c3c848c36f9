"""What every sampler offers: token ids in, completions with log-probs and policy versions out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

PROBE_TOKENS = 16
"""Tokens an external sampler makes to show which weights it carries."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SamplingSettings:
    """How completions are drawn."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    regex: str | None = None
    """Only samplers with constrained decoding (vLLM) take this"""
    logprobs_at_temperature: bool = True
    """Log-probs of softmax(logits / temperature) (True) or of softmax(logits)"""


@dataclass(kw_only=True, slots=True)
class Request:
    """Completions asked for one prompt."""

    prompt_ids: list[int]
    n: int = 1
    seed: int
    """A sampler that can seeds each request on its own, so results do not depend on what else is in the batch"""


@dataclass(kw_only=True, slots=True)
class SampledCompletion:
    """One completion: exactly the tokens that were drawn."""

    token_ids: list[int]
    logprobs: list[float] | None
    """Per token, untruncated and unpenalised, at the temperature the settings ask for; None = the sampler has none"""
    finish_reason: str
    """``stop`` or ``length``"""
    versions: list[int] = field(default_factory=list)
    """Distinct policy versions that made the tokens, ascending"""


class Sampler(Protocol):
    """A way to sample from the policy being trained."""

    def sync(self, version: int) -> None:
        """Make the next completions come from the trainer's present weights, known as ``version``."""

    def generate(self, requests: list[Request], settings: SamplingSettings) -> list[list[SampledCompletion]]:
        """``n`` completions per request, in order."""

    def close(self) -> None:
        """Give back what the sampler holds."""
