# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Triton kernels of the CUDA path but attention: cache write, norm, rotary, gated activation, sampling.

The element-wise kernels round where the modules of transformers round, so that sampling and training see the same
numbers. This module is imported on CUDA only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SAMPLE_CHUNK = 4096


@cache
def early_launch() -> dict[str, bool]:
    """Launch options of every kernel here: from Hopper on, it is set up while the one before still runs."""
    known = torch.version.hip is None and hasattr(tl.extra.cuda, "gdc_wait")  # Triton 3.4
    if known and torch.cuda.get_device_capability() >= (9, 0):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """First thing in every kernel: what came before has ended. Then the next kernel may be set up, up to this point."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _unpack_info(INFO, LAST, TABLES, IDS, POSITIONS, SLOTS, rows, table_width,
                 BLOCK: tl.constexpr, INFO_WIDTH: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    wait_for_inputs(EARLY)
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    real = row < rows
    owner = tl.load(INFO + row * INFO_WIDTH, mask=real, other=0)
    position = tl.load(INFO + row * INFO_WIDTH + 1, mask=real, other=0)
    slot = tl.load(INFO + row * INFO_WIDTH + 2, mask=real, other=-1)
    tl.store(IDS + row, tl.load(LAST + owner, mask=real, other=0), mask=real)
    tl.store(POSITIONS + row, position, mask=real)
    tl.store(SLOTS + row, slot, mask=real)
    tl.store(TABLES + owner * table_width + position // BLOCK, (slot // BLOCK).to(tl.int32), mask=real & (slot >= 0))


def unpack_info(info: Tensor, last_tokens: Tensor, tables: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, positions and cache slots, [R] each, of `info` [R, 8]; the block of each position goes into `tables`."""
    rows = info.shape[0]
    ids, positions, slots = torch.empty(3, rows + rows % 2, dtype=torch.int64, device=info.device)[:, :rows].unbind(0)
    _unpack_info[(triton.cdiv(rows, 128),)](
        info, last_tokens, tables, ids, positions, slots, rows, tables.stride(0),
        BLOCK=block, INFO_WIDTH=info.shape[1], SIZE=128, num_warps=4, **early_launch(),
    )  # fmt: skip
    return ids, positions, slots


@triton.jit
def _write_kv(
    KEY,
    VALUE,
    KEYS,
    VALUES,
    SLOTS,
    k_head,
    k_row,
    v_head,
    v_row,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row = tl.program_id(0)
    slot = tl.load(SLOTS + row)
    if slot < 0:
        return
    place = tl.arange(0, WIDTH)
    key = tl.load(KEY + row * k_row + (place // DK) * k_head + place % DK, mask=place < HEADS * DK)
    tl.store(KEYS + slot * (HEADS * DK) + place, key, mask=place < HEADS * DK)
    value = tl.load(VALUE + row * v_row + (place // DV) * v_head + place % DV, mask=place < HEADS * DV)
    tl.store(VALUES + slot * (HEADS * DV) + place, value, mask=place < HEADS * DV)


def write_kv(keys: Tensor, values: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """[kv_heads, T, dim] into the cache at flat slots [T] (int64; negative: skip)."""
    heads, rows, dk = key.shape
    dv = value.shape[2]
    width = triton.next_power_of_2(heads * max(dk, dv))
    _write_kv[(rows,)](
        key, value, keys, values, slots, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        HEADS=heads, DK=dk, DV=dv, WIDTH=width, num_warps=4, **early_launch(),
    )  # fmt: skip


@triton.jit
def _normed(x, WEIGHT, place, eps, WIDTH: tl.constexpr):
    """weight * (x / rms(x)), rounded to x's type before the weight, as Llama-like norms do."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    weight = tl.load(WEIGHT + place, mask=place < WIDTH, other=0.0)
    return weight * (wide * scale).to(x.dtype)


@triton.jit
def _rms_norm(X, WEIGHT, OUT, eps, WIDTH: tl.constexpr, PAD: tl.constexpr, EARLY: tl.constexpr):
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PAD)
    x = tl.load(X + row * WIDTH + place, mask=place < WIDTH, other=0.0)
    normed = _normed(x, WEIGHT, place, eps, WIDTH)
    tl.store(OUT + row * WIDTH + place, normed.to(OUT.dtype.element_ty), mask=place < WIDTH)


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    """What the norm module gives for [T, width]."""
    out = torch.empty_like(x)
    width = x.shape[1]
    _rms_norm[(x.shape[0],)](
        x, norm.weight, out, norm.variance_epsilon,
        WIDTH=width, PAD=triton.next_power_of_2(width), num_warps=4, **early_launch(),
    )  # fmt: skip
    return out


@triton.jit
def _add_norm(X, Y, WEIGHT, SUM, OUT, eps, part_size,
              PARTS: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PAD)
    at = row * WIDTH + place
    x = tl.load(X + at, mask=place < WIDTH, other=0.0)
    y = tl.load(Y + at, mask=place < WIDTH, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        y += tl.load(Y + part * part_size + at, mask=place < WIDTH, other=0.0)
    total = (x.to(tl.float32) + y.to(x.dtype).to(tl.float32)).to(x.dtype)
    tl.store(SUM + at, total, mask=place < WIDTH)
    normed = _normed(total, WEIGHT, place, eps, WIDTH)
    tl.store(OUT + at, normed.to(OUT.dtype.element_ty), mask=place < WIDTH)


def add_norm(x: Tensor, y: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """x + y, and the norm module's result for it; [T, width] each. Of a y [parts, T, width] in float32 the sum is added."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[1]
    _add_norm[(x.shape[0],)](
        x, y, norm.weight, total, out, norm.variance_epsilon, x.numel(),
        PARTS=y.shape[0] if y.dim() == 3 else 1, WIDTH=width, PAD=triton.next_power_of_2(width), num_warps=4,
        **early_launch(),
    )  # fmt: skip
    return total, out


@triton.jit
def _rope_and_write(Q, K, V, COS, SIN, Q_NORM, K_NORM, SLOTS, KEYS, VALUES, Q_OUT, eps, q_row, k_row, v_row,
                    QH: tl.constexpr, KH: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr,
                    NORM: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, PAD)[None, :]
    is_q = (h < QH) & (d < HALF)
    is_k = (h >= QH) & (h < QH + KH) & (d < HALF)
    q_at = row * q_row + h * 2 * HALF + d
    k_at = (h - QH) * 2 * HALF + d
    x1 = tl.where(is_q, tl.load(Q + q_at, mask=is_q, other=0.0), tl.load(K + row * k_row + k_at, mask=is_k, other=0.0))
    x2 = tl.where(
        is_q,
        tl.load(Q + q_at + HALF, mask=is_q, other=0.0),
        tl.load(K + row * k_row + k_at + HALF, mask=is_k, other=0.0),
    )
    kind = x1.dtype
    if NORM:  # over the two halves of each head
        w1, w2 = x1.to(tl.float32), x2.to(tl.float32)
        scale = tl.rsqrt((tl.sum(w1 * w1, 1) + tl.sum(w2 * w2, 1)) / (2 * HALF) + eps)[:, None]
        one = tl.where(is_q, tl.load(Q_NORM + d, mask=is_q, other=0.0), tl.load(K_NORM + d, mask=is_k, other=0.0))
        two = tl.where(
            is_q,
            tl.load(Q_NORM + HALF + d, mask=is_q, other=0.0),
            tl.load(K_NORM + HALF + d, mask=is_k, other=0.0),
        )
        x1, x2 = one * (w1 * scale).to(kind), two * (w2 * scale).to(kind)
    at = row * 2 * HALF + d
    cos_1, cos_2 = tl.load(COS + at, mask=d < HALF, other=0.0), tl.load(COS + at + HALF, mask=d < HALF, other=0.0)
    sin_1, sin_2 = tl.load(SIN + at, mask=d < HALF, other=0.0), tl.load(SIN + at + HALF, mask=d < HALF, other=0.0)
    y1 = ((x1 * cos_1).to(kind).to(tl.float32) + ((-x2) * sin_1).to(kind).to(tl.float32)).to(kind)
    y2 = ((x2 * cos_2).to(kind).to(tl.float32) + (x1 * sin_2).to(kind).to(tl.float32)).to(kind)
    q_out = row * QH * 2 * HALF + h * 2 * HALF + d
    tl.store(Q_OUT + q_out, y1, mask=is_q)
    tl.store(Q_OUT + q_out + HALF, y2, mask=is_q)
    width: tl.constexpr = KH * 2 * HALF
    slot = tl.load(SLOTS + row)
    if slot >= 0:
        tl.store(KEYS + slot * width + k_at, y1, mask=is_k)
        tl.store(KEYS + slot * width + k_at + HALF, y2, mask=is_k)
        value_1 = tl.load(V + row * v_row + k_at, mask=is_k, other=0.0)
        value_2 = tl.load(V + row * v_row + k_at + HALF, mask=is_k, other=0.0)
        tl.store(VALUES + slot * width + k_at, value_1, mask=is_k)
        tl.store(VALUES + slot * width + k_at + HALF, value_2, mask=is_k)


def rope_and_write(
    query: Tensor,  # [T, heads * dim], rows at their own stride, as `key` and `value`
    key: Tensor,  # [T, kv_heads * dim]
    value: Tensor,
    cos: Tensor,  # [T, dim]
    sin: Tensor,
    slots: Tensor,  # int64 [T], flat cache slots; negative: skip
    cache: tuple[Tensor, Tensor],  # keys and values, [blocks, block_size, kv_heads, dim]
    head_norms: tuple[Any, Any] | None,  # of query and key, before the rotation
) -> Tensor:
    """Rotary embedding as transformers computes it; key and value go into the cache, the query [heads, T, dim] comes back."""
    (rows, dim), kv_heads = cos.shape, cache[0].shape[2]
    heads = query.shape[1] // dim
    q_out = torch.empty(rows, heads, dim, dtype=query.dtype, device=query.device)
    q_norm, k_norm = head_norms or (None, None)
    _rope_and_write[(rows,)](
        query, key, value, cos, sin, q_norm and q_norm.weight, k_norm and k_norm.weight, slots, *cache, q_out,
        q_norm.variance_epsilon if q_norm else 0.0, query.stride(0), key.stride(0), value.stride(0),
        QH=heads, KH=kv_heads, HALF=dim // 2, PAD=triton.next_power_of_2(dim // 2),
        HEADS=triton.next_power_of_2(heads + kv_heads), NORM=head_norms is not None, num_warps=4,
        **early_launch(),
    )  # fmt: skip
    return q_out.transpose(0, 1)


@triton.jit
def _silu_mul(GATE, UP, OUT, gate_row, up_row, width, SIZE: tl.constexpr, EARLY: tl.constexpr):
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    gate = tl.load(GATE + row * gate_row + place, mask=place < width, other=0.0)
    up = tl.load(UP + row * up_row + place, mask=place < width, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(OUT + row * width + place, activated * up, mask=place < width)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of [..., T, width], the rows of each at their own stride."""
    width = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows = out.numel() // width
    size = min(2048, triton.next_power_of_2(width))
    _silu_mul[(rows, triton.cdiv(width, size))](
        gate, up, out, gate.stride(-2), up.stride(-2), width, SIZE=size, num_warps=4, **early_launch()
    )
    return out


@triton.jit
def _chunk_stats(LOGITS, INFO, STATS, vocab, row_step, num_chunks,
                 CHUNK: tl.constexpr, INFO_WIDTH: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    wait_for_inputs(EARLY)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(LOGITS + row.to(tl.int64) * row_step + place, mask=place < vocab, other=-float("inf")).to(tl.float32)
    temperature = tl.load(INFO + row * INFO_WIDTH + 6).to(tl.int32).to(tl.float32, bitcast=True)
    y = x * tl.where(temperature > 0, 1.0 / temperature, 1.0)
    raw_peak = tl.maximum(tl.max(x, 0), -1e30)  # a chunk of -inf alone stays a number
    peak = tl.maximum(tl.max(y, 0), -1e30)
    at = STATS + (row * num_chunks + chunk) * 5
    tl.store(at, peak)
    total = tl.sum(tl.exp(y - peak), 0)
    tl.store(at + 1, total)
    tl.store(at + 2, raw_peak)
    if (temperature == 1.0) | (temperature == 0.0):  # x and y are the same
        tl.store(at + 3, total)
    else:
        tl.store(at + 3, tl.sum(tl.exp(x - raw_peak), 0))
    if temperature == 0.0:
        best = tl.min(tl.where(x == raw_peak, place, vocab), 0)
        tl.store(at + 4, best.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def _mix(seed, counter):
    x = seed.to(tl.uint64) + (counter + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _pick(
    LOGITS,
    INFO,
    STATS,
    OUT,
    LAST,
    vocab,
    row_step,
    num_chunks,
    out_step,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    INFO_WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row = tl.program_id(0)
    info = INFO + row * INFO_WIDTH
    temperature = tl.load(info + 6).to(tl.int32).to(tl.float32, bitcast=True)
    inverse = tl.where(temperature > 0, 1.0 / temperature, 1.0)
    bits = _mix(tl.load(info + 5), tl.load(info + 4))
    u = (bits >> 40).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)
    c = tl.arange(0, CHUNKS)
    stats = STATS + (row * num_chunks + c) * 5
    real = c < num_chunks
    peaks = tl.load(stats, mask=real, other=-float("inf"))
    raw_peaks = tl.load(stats + 2, mask=real, other=-float("inf"))
    peak = tl.max(peaks, 0)
    raw_peak, greedy_chunk = tl.max(raw_peaks, 0, return_indices=True)
    sums = tl.where(real, tl.load(stats + 1, mask=real, other=0.0) * tl.exp(peaks - peak), 0.0)
    raw_total = tl.sum(tl.where(real, tl.load(stats + 3, mask=real, other=0.0) * tl.exp(raw_peaks - raw_peak), 0.0), 0)
    total = tl.sum(sums, 0)
    running = tl.cumsum(sums, 0)
    last = tl.max(tl.where(sums > 0, c, 0), 0)
    target = u * total
    chunk = tl.minimum(tl.sum(tl.where(real & (running <= target), 1, 0), 0), last)
    before = tl.sum(tl.where(c < chunk, sums, 0.0), 0)
    inside = tl.sum(tl.where(c == chunk, sums, 0.0), 0)
    share = tl.minimum(tl.maximum((target - before) / inside, 0.0), 0.99999994)
    place = tl.arange(0, CHUNK)
    at = chunk * CHUNK + place
    x = tl.load(LOGITS + row.to(tl.int64) * row_step + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
    weights = tl.exp(x * inverse - peak)
    inner = tl.cumsum(weights, 0)
    inner_last = tl.max(tl.where(weights > 0, place, 0), 0)
    offset = tl.minimum(tl.sum(tl.where(inner <= share * tl.max(inner, 0), 1, 0), 0), inner_last)
    greedy = tl.load(STATS + (row * num_chunks + greedy_chunk) * 5 + 4).to(tl.int32, bitcast=True)
    token = tl.where(temperature > 0, chunk * CHUNK + offset, greedy)
    chosen = tl.load(LOGITS + row.to(tl.int64) * row_step + token).to(tl.float32)
    logprob = chosen * inverse - peak - tl.log(total)
    tl.store(OUT + row, token)
    tl.store(OUT + out_step + row, logprob.to(tl.int32, bitcast=True))
    tl.store(OUT + 2 * out_step + row, (chosen - raw_peak - tl.log(raw_total)).to(tl.int32, bitcast=True))
    tl.store(LAST + tl.load(info), token.to(tl.int64))


def sample_rows(logits: Tensor, info: Tensor, out: Tensor, last_tokens: Tensor) -> None:
    """Plain sampling of [R, V] by `info` (see runner.py); writes token, log-prob and raw log-prob bits to out [3, >= R]."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, SAMPLE_CHUNK)
    stats = torch.empty(rows, chunks, 5, dtype=torch.float32, device=logits.device)
    width = info.shape[1]
    step: Any = logits.stride(0)
    _chunk_stats[(rows, chunks)](
        logits, info, stats, vocab, step, chunks, CHUNK=SAMPLE_CHUNK, INFO_WIDTH=width, num_warps=8, **early_launch()
    )
    _pick[(rows,)](
        logits, info, stats, out, last_tokens, vocab, step, chunks, out.stride(0),
        CHUNKS=triton.next_power_of_2(chunks), CHUNK=SAMPLE_CHUNK, INFO_WIDTH=width, num_warps=8, **early_launch(),
    )  # fmt: skip
