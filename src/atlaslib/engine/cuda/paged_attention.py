# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Attention over the blocks of each sequence, in Triton: one query per row (decode) and tiles of queries (prefill).

Both read keys and values where the cache has them, so whole prompts, chunks, shared beginnings and replies are the same to them.
This module is imported on CUDA only.
"""

from __future__ import annotations

from math import log

import torch
import triton
import triton.language as tl
from torch import Tensor

from atlaslib.engine.cuda.kernels import early_launch, wait_for_inputs

DECODE_TUNING = [(64, 2, 3), (32, 2, 3), (32, 4, 2)]  # (keys per tile, warps, stages) for head sizes to 64, 128, 256
# (queries and keys per tile, warps, stages) for head sizes to 64, 128, 256 and beyond
PREFILL_TUNING = [(128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 16, 4, 1)]
FEW_ROWS = (128, 4, 3)  # head sizes to 64, when there are fewer than 1024 rows of work: more keys in flight per row


@triton.jit
def _rows_of(CACHE, at, wanted, MASKED: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr):
    d = tl.arange(0, PAD)
    place = CACHE + at[:, None] * WIDTH + d[None, :]
    if MASKED:
        rows = tl.load(place, mask=wanted[:, None] & (d < WIDTH)[None, :], other=0.0)
    elif WIDTH != PAD:
        rows = tl.load(place, mask=(d < WIDTH)[None, :], other=0.0)
    else:
        rows = tl.load(place)
    return rows


@triton.jit
def _attend_tile(query, KEYS, VALUES, table, head, n, wanted, visible, peak, total, acc, scale, softcap,
                 MASKED: tl.constexpr, BASE_2: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr,
                 DV: tl.constexpr, DVP: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """The keys at positions `n` into the running softmax of each query: highest score, sum of weights, weighted values.

    With MASKED `wanted` [TILE] says which of them exist and `visible` [queries, TILE] which of them a query may see.
    With BASE_2 the scores are in units of log 2 (`scale` and `softcap` say so), which is faster but takes more registers.
    """
    if MASKED:
        block = tl.load(table + n // BLOCK, mask=wanted, other=0).to(tl.int64)
    else:
        block = tl.load(table + n // BLOCK).to(tl.int64)
    at = (block * BLOCK + n % BLOCK) * KV_HEADS + head
    key = _rows_of(KEYS, at, wanted, MASKED, DK, DKP)
    value = _rows_of(VALUES, at, wanted, MASKED, DV, DVP)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee" if EXACT else "tf32") * scale
    if SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    if MASKED:
        scores = tl.where(visible, scores, -1e30)
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None]) if BASE_2 else tl.exp(scores - higher[:, None])
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    shrink = tl.exp2(peak - higher) if BASE_2 else tl.exp(peak - higher)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee" if EXACT else "tf32")
    return higher, total, acc


@triton.jit
def _paged_decode(QUERY, KEYS, VALUES, OUT, TABLES, SLOTS, LENGTHS, scale, softcap, q_head, q_row, table_width, info_step,
                  KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr,
                  DV: tl.constexpr, DVP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
                  SOFTCAP: tl.constexpr, EXACT: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    wait_for_inputs(EARLY)
    row = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(LENGTHS + row * info_step)
    table = TABLES + tl.load(SLOTS + row * info_step) * table_width
    g = tl.arange(0, ROWS)
    dk = tl.arange(0, DKP)
    dv = tl.arange(0, DVP)
    q_at = (head * GROUP + g)[:, None] * q_head + row * q_row + dk[None, :]
    query = tl.load(QUERY + q_at, mask=(g < GROUP)[:, None] & (dk < DK)[None, :], other=0.0)
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DVP], tl.float32)
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    for start in range((first // TILE) * TILE, length, TILE):
        n = start + tl.arange(0, TILE)
        valid = (n < length) & (n >= first)
        peak, total, acc = _attend_tile(
            query, KEYS, VALUES, table, head, n, valid, valid[None, :], peak, total, acc, scale, softcap,
            True, False, KV_HEADS, DK, DKP, DV, DVP, BLOCK, SOFTCAP, EXACT,
        )  # fmt: skip
    result = acc / tl.maximum(total, 1e-30)[:, None]
    out_at = (row * KV_HEADS + head) * GROUP * DV + g[:, None] * DV + dv[None, :]
    tl.store(OUT + out_at, result.to(OUT.dtype.element_ty), mask=(g < GROUP)[:, None] & (dv < DV)[None, :])


def paged_decode(
    query: Tensor,  # [heads, B, dim]
    keys: Tensor,  # [blocks, block_size, kv_heads, dim]
    values: Tensor,
    tables: Tensor,  # int32 [slots, width]
    slots: Tensor,  # int64 [B], row of `tables`
    lengths: Tensor,  # int64 [B], same stride as `slots`
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    one_tile: bool = False,  # the same tiles for every batch size, so that a row's bits do not depend on the batch
) -> Tensor:
    """One query per row over that row's blocks; [B, heads, value_dim]."""
    heads, batch, dk = query.shape
    _, block, kv_heads, dv = values.shape
    group = heads // kv_heads
    out = torch.empty(batch, heads, dv, dtype=query.dtype, device=query.device)
    tile, warps, stages = DECODE_TUNING[0 if dk <= 64 else 1 if dk <= 128 else 2]
    if dk <= 64 and batch * kv_heads < 1024 and not one_tile:
        tile, warps, stages = FEW_ROWS
    _paged_decode[(batch, kv_heads)](
        query, keys, values, out, tables, slots, lengths, scale, softcap or 0.0,
        query.stride(0), query.stride(1), tables.stride(0), slots.stride(0),
        KV_HEADS=kv_heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), DK=dk, DKP=triton.next_power_of_2(dk),
        DV=dv, DVP=triton.next_power_of_2(dv), BLOCK=block, TILE=tile, WINDOW=window or 0,
        SOFTCAP=softcap is not None, EXACT=query.dtype == torch.float32, num_warps=warps, num_stages=stages, **early_launch(),
    )  # fmt: skip
    return out


@triton.jit
def _paged_prefill(QUERY, KEYS, VALUES, OUT, TABLES, TILES, scale, softcap, q_head, q_row, table_width,
                   KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr,
                   DV: tl.constexpr, DVP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
                   SOFTCAP: tl.constexpr, EXACT: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    wait_for_inputs(EARLY)
    tile = TILES + tl.program_id(0) * 4
    count = tl.load(tile + 1).to(tl.int32)
    if count == 0:
        return
    row = tl.load(tile) + tl.arange(0, ROWS)
    start = tl.load(tile + 2).to(tl.int32)
    table = TABLES + tl.load(tile + 3) * table_width
    head = tl.program_id(1)
    real = tl.arange(0, ROWS) < count
    dk = tl.arange(0, DKP)
    dv = tl.arange(0, DVP)
    q_at = head * q_head + row[:, None] * q_row + dk[None, :]
    query = tl.load(QUERY + q_at, mask=real[:, None] & (dk < DK)[None, :], other=0.0)
    position = start + tl.arange(0, ROWS)
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DVP], tl.float32)
    length = start + count
    first = tl.maximum(start + 1 - WINDOW, 0) // TILE * TILE if WINDOW > 0 else 0
    if WINDOW == 0:  # keys that every query of the tile sees
        for begin in range(0, (start + 1) // TILE * TILE, TILE):
            peak, total, acc = _attend_tile(
                query, KEYS, VALUES, table, head // GROUP, begin + tl.arange(0, TILE), real, real, peak, total, acc, scale,
                softcap, False, True, KV_HEADS, DK, DKP, DV, DVP, BLOCK, SOFTCAP, EXACT,
            )  # fmt: skip
        first = (start + 1) // TILE * TILE
    for begin in range(first, length, TILE):
        n = begin + tl.arange(0, TILE)
        visible = n[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (n[None, :] > position[:, None] - WINDOW)
        peak, total, acc = _attend_tile(
            query, KEYS, VALUES, table, head // GROUP, n, n < length, visible, peak, total, acc, scale, softcap,
            True, True, KV_HEADS, DK, DKP, DV, DVP, BLOCK, SOFTCAP, EXACT,
        )  # fmt: skip
    result = acc / tl.maximum(total, 1e-30)[:, None]
    out_at = (row[:, None] * (KV_HEADS * GROUP) + head) * DV + dv[None, :]
    tl.store(OUT + out_at, result.to(OUT.dtype.element_ty), mask=real[:, None] & (dv < DV)[None, :])


def prefill_tiling(dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Queries and keys per tile, warps and stages for head sizes up to `dim`."""
    if dtype == torch.float32:
        return (32, 32, 4, 1) if dim <= 128 else (16, 16, 4, 1)
    return PREFILL_TUNING[0 if dim <= 64 else 1 if dim <= 128 else 2 if dim <= 256 else 3]


def paged_prefill(
    query: Tensor,  # [heads, T, dim]
    keys: Tensor,  # [blocks, block_size, kv_heads, dim], those of this step written
    values: Tensor,
    tables: Tensor,  # int32 [slots, width]
    tiles: Tensor,  # int64 [tiles, 4]: first row, number of rows (0: nothing to do), position of the first, slot
    scale: float,
    window: int | None,
    softcap: float | None,
    tiling: tuple[int, int, int, int],
) -> Tensor:
    """The queries of each tile over their sequence's blocks up to themselves; [T, heads, value_dim]."""
    heads, rows, dk = query.shape
    _, block, kv_heads, dv = values.shape
    out = torch.empty(rows, heads, dv, dtype=query.dtype, device=query.device)
    per_tile, tile, warps, stages = tiling
    _paged_prefill[(tiles.shape[0], heads)](
        query, keys, values, out, tables, tiles, scale / log(2), (softcap or 0.0) / log(2),
        query.stride(0), query.stride(1), tables.stride(0),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, ROWS=per_tile, DK=dk, DKP=triton.next_power_of_2(dk), DV=dv,
        DVP=triton.next_power_of_2(dv), BLOCK=block, TILE=tile, WINDOW=window or 0, SOFTCAP=softcap is not None,
        EXACT=query.dtype == torch.float32, num_warps=warps, num_stages=stages, **early_launch(),
    )  # fmt: skip
    return out
