"""The update's log-probs with the engine's bits (``exact=True``): a token that was just sampled has the ratio 1, not 1 up to rounding.

Rows are padded on the right, the decoder runs in exact arithmetic, and the way from hidden states to logits is the model's own
(head, scale, soft cap), chunk by chunk; chunks are computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from atlaslib.algorithms.logprobs import TokenLogprobs
from atlaslib.engine.exact import exact_arithmetic, exact_token_logprobs

CHUNK = 1024
"""Positions in work at a time when no chunk size is given"""


def exact_logprobs(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    *,
    chunk_size: int | None,
    with_entropy: bool,
    entropy_gradient: bool,
) -> TokenLogprobs:
    """Of ``targets`` [T, K] at ``temperature`` [T]; ``logits_of`` makes [c, V] of the decoder's ``hidden`` [T, H], cut into chunks."""

    def chunk(part: torch.Tensor, ids: torch.Tensor, divisor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with exact_arithmetic(part.device):
            logits = logits_of(part)
            columns = [exact_token_logprobs(logits, column, divisor) for column in ids.unbind(1)]
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = _entropy(logits, divisor) if with_entropy else divisor.new_zeros(len(part))
        return torch.stack(columns, dim=1), entropy

    size = chunk_size or CHUNK
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    pieces = [
        checkpoint(chunk, hidden[i : i + size], targets[i : i + size], temperature[i : i + size], **settings)
        for i in range(0, hidden.shape[0], size)
    ]
    logprobs, entropy = (torch.cat(column) for column in zip(*pieces, strict=True))
    return TokenLogprobs(logprobs, entropy if with_entropy else None)


def _entropy(logits: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    log_p = torch.log_softmax(logits.float() / divisor.unsqueeze(1), dim=-1)
    return -(log_p.exp() * log_p).sum(-1)
