"""The carriers of the training side.

``TrainingSample`` is where both sources meet: rollouts made in this process and groups from the rollout server become the
same thing, and everything below it (microbatches, log-probs, loss) is one code path.

Letters for shapes: ``L`` positions of a sample, ``R`` rows and ``W`` width of a microbatch, ``T`` trained tokens of a
microbatch (flat), ``S`` samples of a microbatch, ``K`` distilled candidates per token, ``V`` vocabulary, ``H`` hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True, slots=True)
class TrainingSample:
    """One token sequence to train on. All per-token lists have length ``L``.

    Example: prompt ``[5, 6]`` and completion ``[7, 2]`` give ``token_ids=[5, 6, 7, 2]`` and
    ``loss_mask=[False, False, True, True]``.
    """

    token_ids: list[int]
    """The exact tokens the sampler saw and made."""
    loss_mask: list[bool]
    """True where the token is trained."""
    sampler_logprobs: list[float] | None = None
    """Log-prob of each token under the sampling policy; only read where ``loss_mask``; None = unknown."""
    advantages: list[float]
    """Advantage of each token; only read where ``loss_mask``."""
    reward: float
    temperature: float = 1.0
    """The temperature the tokens were sampled at; the trainer's log-probs use the same."""
    policy_versions: list[int] = field(default_factory=list)
    """Distinct policy versions that made the tokens, ascending; empty = unknown."""
    group_id: str = ""
    env: str | None = None
    truncated: bool = False
    """The completion was cut by the length limit."""
    sft: bool = False
    """Train by plain cross-entropy instead of the policy objective."""
    ref_logprobs: list[float] | None = None
    """Reference log-probs given from outside; None = the trainer asks its reference model."""
    distill_token_ids: list[list[int]] | None = None
    distill_logprobs: list[list[float]] | None = None
    """Per position: candidate ids and the teacher's log-probs of them (for the token at that position)."""
    images: Any = None

    @property
    def num_trained_tokens(self) -> int:
        """How many tokens carry loss. The first token of a sequence has no prediction and never counts."""
        return sum(self.loss_mask[1:])


@dataclass(kw_only=True, slots=True, frozen=True)
class FlatRuns:
    """A flat row as runs of queries and the keys they see: a shared beginning, or a sample's own tokens after one.

    Queries stand in the row in the order of the runs. The last query of a run sees all its keys, the one before it one less, and so on.
    """

    key_index: torch.Tensor | None
    """[K] position in the row of every run's keys, run after run; None = the row as it is (nothing is shared)"""
    query_starts: torch.Tensor
    """[G + 1] int32: where the runs' queries begin, and the end"""
    key_starts: torch.Tensor
    """[G + 1] int32: where the runs' keys begin in ``key_index``, and the end"""
    longest_queries: int
    """no run has more queries"""
    longest_keys: int
    """no run sees more keys"""


@dataclass(kw_only=True, slots=True)
class Microbatch:
    """Rows for one forward pass, and the flat list of the tokens trained in them.

    Padded, packed and prefix-shared layouts differ only in the first five fields.
    """

    input_ids: torch.Tensor
    """[R, W] int64"""
    position_ids: torch.Tensor | None
    """[R, W] int64; None = 0..W-1 in every row"""
    gather_index: torch.Tensor | None
    """[S, W'] for flat rows: position of every token of every sample in the row; None = plain causal rows"""
    place_index: torch.Tensor | None
    """[W] for flat rows: one place (sample * W' + column) in that table for every position"""
    runs: FlatRuns | None
    """for flat rows: the same as runs of queries and keys"""
    source_index: torch.Tensor
    """[T] flat position (row * W + column) whose hidden state predicts the token"""
    target_ids: torch.Tensor
    """[T] the trained tokens"""
    sample_index: torch.Tensor
    """[T] which sample of this microbatch the token belongs to, 0..S-1"""
    sample_lengths: torch.Tensor
    """[S] trained tokens of each sample, float"""
    temperature: torch.Tensor
    """[T]"""
    advantages: torch.Tensor
    """[T]"""
    sampler_logprobs: torch.Tensor
    """[T]; NaN where unknown"""
    sft: torch.Tensor
    """[T] bool"""
    given_ref_logprobs: torch.Tensor
    """[T]; NaN where the sample brought none"""
    distill_ids: torch.Tensor | None = None
    """[T, K] int64"""
    distill_logprobs: torch.Tensor | None = None
    """[T, K]; -inf pads"""
    old_logprobs: torch.Tensor | None = None
    """[T] the trainer's own log-probs before the first update on this batch, when they are needed"""
    ref_logprobs: torch.Tensor | None = None
    """[T] reference log-probs, kept over the iterations on this batch"""
    num_input_tokens: int = 0
    """Tokens computed in the forward pass, pads included"""

    @property
    def num_samples(self) -> int:
        return int(self.sample_lengths.shape[0])

    @property
    def num_trained_tokens(self) -> int:
        return int(self.target_ids.shape[0])


@dataclass(kw_only=True, slots=True, frozen=True)
class StepTotals:
    """What the loss of one optimizer step is divided by: counts over all micro-steps and all processes."""

    num_sequences: float
    num_tokens: float
    num_micro_steps: float
    num_micro_step_tokens: float | None = None
    """Trained tokens of the micro-step at hand (bnpo averages over it); None = those of the microbatch"""
