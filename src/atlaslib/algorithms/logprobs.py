"""Log-probs of tokens straight from hidden states, without ever holding all logits.

The language-model head of a 150k vocabulary makes 150k numbers per token; a batch of them is the largest tensor of a training
step. Here the head is applied chunk by chunk over the positions; the backward pass computes each chunk again, or reuses it
when everything fits the budget. Only the tokens that are trained pass through the head at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from atlaslib.algorithms import head_kernels

CPU_CHUNK_ELEMENTS = 64 * 1024 * 1024
CUDA_CHUNK_ELEMENTS = 512 * 1024 * 1024
"""With no chunk size given, a chunk holds at most this many logits (256 MiB and 2 GiB in float32)."""
CUDA_KEEP_SHARE = 0.1
"""Logits are kept for the backward pass when they take at most this share of the free memory (CPU: when one chunk holds them)."""


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
    num_tokens = hidden.shape[0]
    dtype = compute_dtype or weight.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inverse = 1.0 / torch.as_tensor(temperature, device=hidden.device).to(wide)
    inverse = inverse.expand(num_tokens) if inverse.dim() == 0 else inverse
    size, keep = _chunking(hidden.device, num_tokens, weight.shape[0], dtype, chunk_size)
    call = _Call(
        chunk_size=size, keep=keep, with_entropy=with_entropy, head=head or HeadOptions(), dtype=dtype, wide=wide
    )
    logprobs, entropy = cast(
        tuple[torch.Tensor, torch.Tensor],
        _HeadLogprobs.apply(hidden, weight, bias, targets, inverse.contiguous(), call),  # type: ignore[no-untyped-call]
    )
    return TokenLogprobs(logprobs if target_ids.dim() == 2 else logprobs.squeeze(1), entropy if with_entropy else None)


def _chunking(
    device: torch.device, num_tokens: int, vocab_size: int, dtype: torch.dtype, chunk_size: int | None
) -> tuple[int, bool]:
    """Positions per chunk, and whether the logits of all chunks stay for the backward pass."""
    on_cuda = device.type == "cuda"
    if chunk_size is None:
        most = max(1, (CUDA_CHUNK_ELEMENTS if on_cuda else CPU_CHUNK_ELEMENTS) // max(vocab_size, 1))
        size = max(1, -(-num_tokens // max(1, -(-num_tokens // most))))  # chunks of one size
    else:
        size = max(1, min(chunk_size, num_tokens))
    if chunk_size is not None or not on_cuda:
        return size, size >= num_tokens
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, not in use now
    return size, num_tokens * vocab_size * dtype.itemsize <= CUDA_KEEP_SHARE * free


@dataclass(kw_only=True, slots=True, frozen=True)
class _Call:
    chunk_size: int
    keep: bool
    with_entropy: bool
    head: HeadOptions
    dtype: torch.dtype
    wide: torch.dtype


def _linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: _Call) -> torch.Tensor:
    """[c, V] in the compute dtype, as the head gives it."""
    return torch.nn.functional.linear(
        hidden.to(call.dtype), weight.to(call.dtype), None if bias is None else bias.to(call.dtype)
    )


def _logits(raw: torch.Tensor, inverse: torch.Tensor, call: _Call) -> torch.Tensor:
    """[c, V] logits / temperature in the wide dtype; a new tensor, free to be written to."""
    logits = raw.to(call.wide)
    if call.head.softcap is not None:
        logits = torch.tanh(logits * (call.head.logit_scale / call.head.softcap)).mul_(call.head.softcap)
        return logits.mul_(inverse.unsqueeze(1))
    factor = (inverse * call.head.logit_scale).unsqueeze(1)
    return logits.mul_(factor) if logits is not raw else logits * factor


class _HeadLogprobs(torch.autograd.Function):
    """Forward keeps the log-sum-exp per token, and the raw logits if they may stay; backward rebuilds what it lacks."""

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
        ctx.set_materialize_grads(False)
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            num_tokens = hidden.shape[0]
            keep = call.keep and any(ctx.needs_input_grad[:3])
            logprobs = torch.empty(targets.shape, dtype=call.wide, device=hidden.device)
            entropy = torch.zeros(num_tokens if call.with_entropy else 0, dtype=call.wide, device=hidden.device)
            lse = torch.empty(num_tokens, dtype=call.wide, device=hidden.device)
            kept: list[torch.Tensor] = []
            for start in range(0, num_tokens, call.chunk_size):
                part = slice(start, start + call.chunk_size)
                raw = _linear(hidden[part], weight, bias, call)
                fused = _fused_logsumexp(raw, inverse[part], call)
                if fused is not None:
                    lse[part] = fused[0]
                    factor = (inverse[part] * call.head.logit_scale).unsqueeze(1)
                    logprobs[part] = raw.gather(1, targets[part]).to(call.wide) * factor - fused[0].unsqueeze(1)
                    if call.with_entropy:
                        entropy[part] = fused[1]
                else:
                    logits = _logits(raw, inverse[part], call)
                    lse[part] = torch.logsumexp(logits, dim=-1)
                    logprobs[part] = logits.gather(1, targets[part]) - lse[part].unsqueeze(1)
                    if call.with_entropy:
                        log_p = logits.sub_(lse[part].unsqueeze(1))
                        entropy[part] = -torch.linalg.vecdot(log_p.exp(), log_p)
                if keep:
                    kept.append(raw)
            ctx.call, ctx.kept = call, kept
            ctx.save_for_backward(hidden, weight, bias, targets, inverse, lse, entropy)
            return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, inverse, lse, entropy = ctx.saved_tensors
        call: _Call = ctx.call
        grad_logprobs, grad_entropy = grad_outputs
        if not call.with_entropy:
            grad_entropy = None
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            grad_hidden = torch.empty_like(hidden) if need_hidden else None
            grad_weight: torch.Tensor | None = None
            grad_bias: torch.Tensor | None = None
            for number, start in enumerate(range(0, hidden.shape[0], call.chunk_size)):
                part = slice(start, start + call.chunk_size)
                raw = ctx.kept[number] if ctx.kept else _linear(hidden[part], weight, bias, call)
                narrow, exact_bias = _chunk_gradient(
                    raw,
                    lse[part],
                    inverse[part],
                    targets[part],
                    None if grad_logprobs is None else grad_logprobs[part],
                    None if grad_entropy is None else (entropy[part], grad_entropy[part]),
                    call,
                )
                if ctx.kept:
                    ctx.kept[number] = None
                if grad_hidden is not None:
                    grad_hidden[part] = (narrow @ weight.to(call.dtype)).to(hidden.dtype)
                if need_weight:
                    grad_weight = _add_product(grad_weight, narrow, hidden[part].to(call.dtype), weight.dtype)
                if need_bias:
                    grad_bias = _add(grad_bias, exact_bias.sum(0), bias.dtype)
            ctx.kept = []
            return grad_hidden, grad_weight, grad_bias, None, None, None


def _fused_logsumexp(raw: torch.Tensor, inverse: torch.Tensor, call: _Call) -> tuple[torch.Tensor, torch.Tensor] | None:
    """[c] log-sum-exp and [c] entropy by the CUDA kernel, where it applies."""
    if call.head.softcap is not None or not head_kernels.usable(raw):
        return None
    return head_kernels.row_logsumexp(raw, inverse * call.head.logit_scale)


def _chunk_gradient(
    raw: torch.Tensor,
    lse: torch.Tensor,
    inverse: torch.Tensor,
    targets: torch.Tensor,
    grad_logprobs: torch.Tensor | None,
    entropy: tuple[torch.Tensor, torch.Tensor] | None,
    call: _Call,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[c, V] gradient of the raw head output in the compute dtype, and as exact as it was computed; ``raw`` may be overwritten."""
    single = grad_logprobs is not None and targets.shape[1] == 1 and call.head.softcap is None
    if single and grad_logprobs is not None and head_kernels.usable(raw):
        fused = head_kernels.gradient_in_place(
            raw, inverse * call.head.logit_scale, lse, targets[:, 0], grad_logprobs[:, 0], entropy
        )
        if fused is not None:
            return fused, fused
    logits = _logits(raw, inverse, call)
    slope = _slope(logits, inverse, call)
    exact = _grad_of_logits(logits.sub_(lse.unsqueeze(1)), targets, grad_logprobs, entropy).mul_(slope)
    return exact.to(call.dtype), exact


def _slope(logits: torch.Tensor, inverse: torch.Tensor, call: _Call) -> torch.Tensor:
    """d(logits / temperature) / d(raw head output): [c, 1], or [c, V] with a soft cap."""
    factor = (inverse * call.head.logit_scale).unsqueeze(1)
    if call.head.softcap is None:
        return factor
    capped = logits / (call.head.softcap * inverse.unsqueeze(1))
    return (1.0 - capped.square_()).mul_(factor)


def _grad_of_logits(
    log_p: torch.Tensor,
    targets: torch.Tensor,
    grad_logprobs: torch.Tensor | None,
    entropy: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """d loss / d(logits / temperature): scatter(g) - p * sum(g), and for the entropy H: -g_H * p * (log p + H).

    ``log_p`` may be overwritten.
    """
    rows = log_p.shape[0]
    total = log_p.new_zeros(rows, 1) if grad_logprobs is None else grad_logprobs.sum(1, keepdim=True).to(log_p.dtype)
    if entropy is None:
        grad = log_p.exp_().mul_(-total)
    else:
        value, grad_value = entropy
        grad = log_p.exp() * (-total - grad_value.unsqueeze(1) * (log_p + value.unsqueeze(1)))
    return grad if grad_logprobs is None else grad.scatter_add_(1, targets, grad_logprobs.to(grad.dtype))


def _add_product(
    total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``total`` plus left transposed times right."""
    if total is None or left.dtype != dtype:
        return _add(total, left.t() @ right, dtype)
    return total.addmm_(left.t(), right)


def _add(total: torch.Tensor | None, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if total is None:
        return part.to(dtype)
    return total.add_(part.to(dtype))
