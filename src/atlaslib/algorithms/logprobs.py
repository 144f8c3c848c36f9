"""Log-probs of tokens straight from hidden states, without ever holding all logits.

The language-model head of a 150k vocabulary makes 150k numbers per token; a batch of them is the largest tensor of a training
step. Here the head is applied chunk by chunk over the positions; the backward pass computes each chunk again, or reuses it
when everything fits the budget. Only the tokens that are trained pass through the head at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

AUTO_BUDGET_ELEMENTS = 64 * 1024 * 1024
"""With no chunk size given, a chunk holds at most this many logits (256 MiB in float32)."""


class TokenLogprobs(NamedTuple):
    """What the head says about the asked tokens."""

    logprobs: torch.Tensor
    """[T, K] log softmax(logits / temperature) at the asked ids, float32"""
    entropy: torch.Tensor | None
    """[T] entropy of softmax(logits / temperature), float32"""


@dataclass(kw_only=True, slots=True, frozen=True)
class HeadOptions:
    """How a model turns hidden states into logits beyond one linear map."""

    logit_scale: float = 1.0
    """logits are multiplied by this (Cohere, Granite)"""
    softcap: float | None = None
    """logits become softcap * tanh(logits / softcap) (Gemma 2)"""


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: torch.Tensor | float = 1.0,
    chunk_size: int | None = None,
    with_entropy: bool = False,
    head: HeadOptions | None = None,
    compute_dtype: torch.dtype | None = None,
) -> TokenLogprobs:
    """Log-probs of ``target_ids`` ([T] or [T, K]) from ``hidden`` [T, H] and the head ``weight`` [V, H].

    ``chunk_size`` positions are in work at a time; None chooses by the budget, and when one chunk holds everything the logits
    are kept for the backward pass instead of being computed again.
    """
    targets = target_ids if target_ids.dim() == 2 else target_ids.unsqueeze(1)
    num_tokens, vocab_size = hidden.shape[0], weight.shape[0]
    budget = max(1, AUTO_BUDGET_ELEMENTS // max(vocab_size, 1))
    size = min(chunk_size or budget, max(num_tokens, 1))
    wide = torch.float64 if (compute_dtype or weight.dtype) == torch.float64 else torch.float32
    inverse = 1.0 / torch.as_tensor(temperature, device=hidden.device).to(wide)
    inverse = inverse.expand(num_tokens) if inverse.dim() == 0 else inverse
    call = _Call(
        chunk_size=size,
        keep=size >= num_tokens,
        with_entropy=with_entropy,
        head=head or HeadOptions(),
        dtype=compute_dtype or weight.dtype,
    )
    logprobs, entropy = cast(
        tuple[torch.Tensor, torch.Tensor],
        _HeadLogprobs.apply(hidden, weight, bias, targets, inverse.contiguous(), call),
    )
    return TokenLogprobs(logprobs if target_ids.dim() == 2 else logprobs.squeeze(1), entropy if with_entropy else None)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Call:
    chunk_size: int
    keep: bool
    with_entropy: bool
    head: HeadOptions
    dtype: torch.dtype


def _chunk_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, inverse: torch.Tensor, call: _Call
) -> torch.Tensor:
    """[c, V] float32 (float64 for float64 weights) logits / temperature."""
    wide = torch.float64 if call.dtype == torch.float64 else torch.float32
    logits = torch.nn.functional.linear(
        hidden.to(call.dtype), weight.to(call.dtype), None if bias is None else bias.to(call.dtype)
    ).to(wide)
    if call.head.logit_scale != 1.0:
        logits = logits * call.head.logit_scale
    if call.head.softcap is not None:
        logits = torch.tanh(logits / call.head.softcap) * call.head.softcap
    return logits.mul_(inverse.unsqueeze(1))


class _HeadLogprobs(torch.autograd.Function):
    """Forward keeps per token only the log-sum-exp; backward rebuilds each chunk of logits, or reads the kept one."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        inverse: torch.Tensor,
        call: _Call,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            wide = torch.float64 if call.dtype == torch.float64 else torch.float32
            num_tokens = hidden.shape[0]
            logprobs = torch.empty(targets.shape, dtype=wide, device=hidden.device)
            entropy = torch.zeros(num_tokens if call.with_entropy else 0, dtype=wide, device=hidden.device)
            lse = torch.empty(num_tokens, dtype=wide, device=hidden.device)
            kept: torch.Tensor | None = None
            for start in range(0, num_tokens, call.chunk_size):
                part = slice(start, start + call.chunk_size)
                logits = _chunk_logits(hidden[part], weight, bias, inverse[part], call)
                lse[part] = torch.logsumexp(logits, dim=-1)
                logprobs[part] = logits.gather(1, targets[part]) - lse[part].unsqueeze(1)
                if call.with_entropy:
                    entropy[part] = lse[part] - _expected_logit(logits, lse[part])
                kept = logits if call.keep and any(ctx.needs_input_grad[:3]) else None
            ctx.call = call
            ctx.save_for_backward(hidden, weight, bias, targets, inverse, lse, entropy, kept)
            return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, inverse, lse, entropy, kept = ctx.saved_tensors
        call: _Call = ctx.call
        grad_logprobs, grad_entropy = grad_outputs
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            grad_hidden = torch.empty_like(hidden) if need_hidden else None
            grad_weight: torch.Tensor | None = None
            grad_bias: torch.Tensor | None = None
            for start in range(0, hidden.shape[0], call.chunk_size):
                part = slice(start, start + call.chunk_size)
                logits = kept if kept is not None else _chunk_logits(hidden[part], weight, bias, inverse[part], call)
                grad_logits = _grad_of_logits(
                    logits,
                    lse[part],
                    targets[part],
                    grad_logprobs[part],
                    (entropy[part], grad_entropy[part]) if call.with_entropy else None,
                )
                if call.head.softcap is not None:
                    capped = logits / (call.head.softcap * inverse[part].unsqueeze(1))
                    grad_logits = grad_logits * (1.0 - capped**2)
                grad_logits *= inverse[part].unsqueeze(1) * call.head.logit_scale
                narrow = grad_logits.to(call.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = (narrow @ weight.to(call.dtype)).to(hidden.dtype)
                if need_weight:
                    grad_weight = _add(grad_weight, narrow.t() @ hidden[part].to(call.dtype), weight.dtype)
                if need_bias:
                    grad_bias = _add(grad_bias, grad_logits.sum(0), bias.dtype)
            return grad_hidden, grad_weight, grad_bias, None, None, None


def _expected_logit(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """[c] sum over the vocabulary of p * logit."""
    return torch.einsum("cv,cv->c", torch.exp(logits - lse.unsqueeze(1)), logits)


def _grad_of_logits(
    logits: torch.Tensor,
    lse: torch.Tensor,
    targets: torch.Tensor,
    grad_logprobs: torch.Tensor,
    entropy: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """d loss / d(logits / temperature): scatter(g) - p * sum(g), and for the entropy H: -g_H * p * (log p + H)."""
    log_p = logits - lse.unsqueeze(1)
    p = torch.exp(log_p)
    total = grad_logprobs.sum(1, keepdim=True)
    if entropy is None:
        grad = p.mul_(-total)
    else:
        value, grad_value = entropy
        grad = p * (-total - grad_value.unsqueeze(1) * (log_p + value.unsqueeze(1)))
    return grad.scatter_add_(1, targets, grad_logprobs.to(grad.dtype))


def _add(total: torch.Tensor | None, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if total is None:
        return part.to(dtype)
    return total.add_(part.to(dtype))
