# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Exact mode on CUDA: the operations whose order of summation libraries choose by shape, in Triton with one order.

A program computes its rows with the same instructions whatever the grid around it: products in tiles of one size, sums of a
row in chunks of one size, attention of every query by itself over key tiles counted from the sequence's first token (the
engine's paged decode kernel, also for prompts and for the trainer's pass). Imported on CUDA only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from atlaslib.engine.cuda.paged_attention import paged_decode

_BLOCK = 16  # tokens of a cache block in the trainer's pass


@triton.jit
def _product(X, WEIGHT, OUT, rows, columns, inner, x_row, w_row, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    row_tiles = tl.cdiv(rows, M)
    m = (tl.program_id(0) % row_tiles) * M + tl.arange(0, M)
    n = (tl.program_id(0) // row_tiles) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    x_at = X + m[:, None].to(tl.int64) * x_row + k[None, :]
    w_at = WEIGHT + n[None, :].to(tl.int64) * w_row + k[:, None]
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, inner, K):
        inside = start + k < inner
        x = tl.load(x_at + start, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at + start, mask=(n < columns)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    at = OUT + m[:, None].to(tl.int64) * columns + n[None, :]
    tl.store(at, total.to(OUT.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, inner] @ weight [columns, inner].T."""
    (rows, inner), columns = x.shape, weight.shape[0]
    x, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x, weight))
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    m, n, k = (32, 32, 32) if x.dtype == torch.float32 else (64, 128, 64)
    _product[(triton.cdiv(rows, m) * triton.cdiv(columns, n),)](
        x, weight, out, rows, columns, inner, x.stride(0), weight.stride(0), M=m, N=n, K=k, num_warps=4, num_stages=3
    )
    return out


@triton.jit
def _row_sum(X, OUT, width, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(0, width, CHUNK):
        total += tl.load(X + row * width + start + place, mask=start + place < width, other=0.0).to(tl.float32)
    tl.store(OUT + row, tl.sum(total, 0).to(OUT.dtype.element_ty))


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty(flat.shape[0], dtype=x.dtype, device=x.device)
    _row_sum[(flat.shape[0],)](flat, out, flat.shape[1], CHUNK=1024, num_warps=4)
    return out.view(x.shape[:-1])


@triton.jit
def _token_logprobs(LOGITS, TOKENS, DIVISORS, OUT, vocab, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, CHUNK)
    divisor = tl.load(DIVISORS + row)
    peaks = tl.full([CHUNK], -float("inf"), tl.float32)
    for start in range(0, vocab, CHUNK):
        inside = start + place < vocab
        peaks = tl.maximum(peaks, tl.load(LOGITS + row * vocab + start + place, mask=inside, other=-float("inf")))
    peak = tl.max(peaks, 0) / divisor
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(0, vocab, CHUNK):
        inside = start + place < vocab
        x = tl.load(LOGITS + row * vocab + start + place, mask=inside, other=-float("inf"))
        total += tl.exp(x / divisor - peak)
    chosen = tl.load(LOGITS + row * vocab + tl.load(TOKENS + row))
    tl.store(OUT + row, chosen / divisor - peak - tl.log(tl.sum(total, 0)))


def token_logprobs(logits: Tensor, tokens: Tensor, divisors: Tensor) -> Tensor:
    """log softmax(logits / divisor) at `tokens`; float32 [R, V], int64 [R], float32 [R] -> float32 [R]."""
    logits = logits.contiguous()
    if logits.data_ptr() % 16:  # another layout of the kernel would sum in another order
        logits = logits.clone()
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _token_logprobs[(rows,)](logits, tokens.contiguous(), divisors.contiguous(), out, vocab, CHUNK=4096, num_warps=8)
    return out


def attention(
    query: Tensor,  # [B, heads, T, dim]
    key: Tensor,  # [B, kv_heads, T, dim]
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention of whole sequences that start at position 0; [B, heads, T, value_dim]."""
    batch, heads, length, dim = query.shape
    keys, values = (
        functional.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, -length % _BLOCK)).reshape(-1, _BLOCK, x.shape[1], x.shape[3])
        for x in (key, value)
    )
    tables = torch.arange(keys.shape[0], dtype=torch.int32, device=query.device).view(batch, -1)
    sequences = torch.arange(batch, device=query.device).repeat_interleave(length)
    lengths = torch.arange(1, length + 1, device=query.device).repeat(batch)
    rows = query.transpose(0, 1).reshape(heads, batch * length, dim)
    out = paged_decode(rows, keys, values, tables, sequences, lengths, scale, window, softcap, one_tile=True)
    return out.view(batch, length, heads, -1).transpose(1, 2)
