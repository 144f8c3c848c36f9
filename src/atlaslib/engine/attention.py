"""Paged attention, plugged into transformers by name.

While the engine runs its forward, the model's config names `atropos_paged` as attention implementation. The function
registered under that name takes this thread's :class:`StepContext` (where the tokens of the step live in the cache),
writes the new keys and values there, and attends over each sequence's own blocks. A forward of another thread that
sees the name has no context and gets the implementation the model had before, so a trainer is never disturbed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "atropos_paged"

AttendFn = Callable[..., Tensor]
_local = threading.local()
_own_implementation: dict[int, str | None] = {}  # id(config) -> what the model uses outside the engine


@dataclass(slots=True)
class LayerShape:
    """What one layer puts into the cache per token."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


@dataclass(slots=True)
class KVCache:
    """Keys and values of every layer, [num_blocks, block_size, kv_heads, dim] each."""

    keys: list[Tensor]
    values: list[Tensor]
    block_size: int

    @staticmethod
    def empty(layers: list[LayerShape], num_blocks: int, block_size: int, device: torch.device) -> KVCache:
        def make(shape: LayerShape, dim: int) -> Tensor:
            size = (num_blocks, block_size, shape.kv_heads, dim)
            if device.type == "cpu":  # masked places are read, so they must be numbers
                return torch.zeros(size, dtype=shape.dtype)
            return torch.empty(size, dtype=shape.dtype, device=device)

        keys = [make(shape, shape.key_dim) for shape in layers]
        return KVCache(keys, [make(shape, shape.value_dim) for shape in layers], block_size)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put [T, kv_heads, dim] at flat token slots [T]."""
        keys, values = self.keys[layer], self.values[layer]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, slots, key)
        values.view(-1, *values.shape[2:]).index_copy_(0, slots, value)

    def rows(self, tensor: Tensor, tables: Tensor) -> Tensor:
        """[B, kv_heads, width * block_size, dim] of the blocks in `tables` [B, width]."""
        picked = tensor.index_select(0, tables.reshape(-1))
        return picked.view(tables.shape[0], -1, *picked.shape[2:]).transpose(1, 2)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self.keys[0].device).unbind(1)
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, target, tensor.index_select(0, source))


@dataclass(slots=True)
class Span:
    """One sequence's tokens in a prefill step: rows [row, row + count) of the packed input."""

    row: int
    count: int
    start: int  # position of the first one
    slot: int
    blocks: np.ndarray[Any, Any]  # int64, blocks that hold positions [0, start + count)


@dataclass(slots=True)
class StepContext:
    """Where the packed tokens of one step live: `spans` in a prefill step, `tables` in a decode step."""

    cache: KVCache
    slots: Tensor  # int64 [T], flat cache slot of each new token
    spans: list[Span] = field(default_factory=list)
    tables: Tensor | None = None  # int [B, width], blocks of each row
    lengths: Tensor | None = None  # int [B], tokens to attend over (the new one included)
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # sliding window -> decode mask, made once a step
    attend: AttendFn | None = None  # set: another implementation of the whole thing (Triton, exact)
    table_rows: Tensor | None = None  # int64 [B], CUDA decode: rows of `tables`, or of the runner's when that is None
    tiles: Tensor | None = None  # int64 [tiles, 4], CUDA prefill: see paged_attention.paged_prefill
    keep: Tensor | None = None  # CUDA prefill: the rows whose logits are wanted, see fused.FusedStack
    recorded: dict[int, LayerShape] | None = None  # set: only note the shapes (start-up)


def current() -> StepContext | None:
    """The step this thread is running, if any."""
    return getattr(_local, "context", None)


@contextmanager
def running(context: StepContext) -> Iterator[None]:
    _local.context = context
    try:
        yield
    finally:
        _local.context = None


@contextmanager
def paged_attention(configs: list[Any]) -> Iterator[None]:
    """Attention goes through this module within the block, and through the model's own after it."""
    register()
    before = [config._attn_implementation for config in configs]
    for config, name in zip(configs, before, strict=True):
        if name != NAME:
            _own_implementation[id(config)] = name
        config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


def configs_of(modules: list[Any]) -> list[Any]:
    """The distinct config objects these modules read."""
    found = {id(c): c for m in modules if hasattr(c := getattr(m, "config", None), "_attn_implementation")}
    return list(found.values())


def register() -> None:
    """Make the name known to transformers (idempotent)."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(NAME, _mask_of_another_thread)
        AttentionInterface.register(NAME, _attention_forward)


def _mask_of_another_thread(*args: Any, **kwargs: Any) -> Any:
    """The engine passes its own (dummy) mask, so whoever asks here is another forward: its usual mask."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = _own_implementation.get(id(kwargs.get("config"))) or "sdpa"
    return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **kwargs)


def _attention_forward(
    module: Any,
    query: Tensor,  # [1, heads, T, dim]
    key: Tensor,  # [1, kv_heads, T, dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> Any:
    context = current()
    if context is None:
        kwargs.update(scaling=scaling, sliding_window=sliding_window, softcap=softcap)
        return _fallback(module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError("attention sinks")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if context.recorded is not None:
        context.recorded[module.layer_idx] = LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype)
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    attend = context.attend or attend_torch
    out = attend(context, module.layer_idx, query[0], key[0], value[0], scale, sliding_window, softcap)
    return out[None], None


def _fallback(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A forward that is not the engine's: what the model used before."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = _own_implementation.get(id(module.config)) or "sdpa"
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)  # type: ignore[attr-defined]
    return ALL_ATTENTION_FUNCTIONS[name](module, *args, **kwargs)


def attend_torch(
    context: StepContext,
    layer: int,
    query: Tensor,  # [heads, T, dim]
    key: Tensor,  # [kv_heads, T, dim]
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Plain torch, any device: [T, heads, value_dim]."""
    context.cache.write(layer, context.slots, key.transpose(0, 1), value.transpose(0, 1))
    if context.tables is not None:
        return _decode_torch(context, layer, query, scale, window, softcap)
    out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
    for span in context.spans:
        rows = slice(span.row, span.row + span.count)
        if span.start == 0:
            keys, values = key[:, rows], value[:, rows]
        else:
            blocks = torch.from_numpy(span.blocks).to(query.device)
            keys = _gather(context.cache.keys[layer], blocks, span.start + span.count)
            values = _gather(context.cache.values[layer], blocks, span.start + span.count)
        out[rows] = _prefill_torch(query[:, rows], keys, values, span.start, scale, window, softcap)
    return out


def _gather(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """[kv_heads, length, dim] of one sequence."""
    picked = cache.index_select(0, blocks)
    return picked.view(-1, *picked.shape[2:])[:length].transpose(0, 1)


def _prefill_torch(
    query: Tensor, key: Tensor, value: Tensor, start: int, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Causal attention of query rows at positions start.. over keys at 0..; [rows, heads, dim]."""
    rows, length = query.shape[1], key.shape[1]
    causal_only = start == 0 and (window is None or window >= length)
    mask = None if causal_only else causal_mask(rows, length, start, window, query.device)
    groups = query.shape[0] // key.shape[0]
    key, value = (x.repeat_interleave(groups, dim=0) if groups > 1 else x for x in (key, value))
    if softcap is None:
        out = scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, is_causal=causal_only and rows > 1, scale=scale
        )[0]
    else:
        full = mask if mask is not None else causal_mask(rows, length, 0, None, query.device)
        out = _softcapped(query, key, value, full, scale, softcap)
    return out.transpose(0, 1)


def causal_mask(rows: int, length: int, start: int, window: int | None, device: torch.device) -> Tensor:
    """True where query row i (position start + i) may look at key j; [rows, length]."""
    place = torch.arange(start, start + rows, device=device)[:, None]
    keys = torch.arange(length, device=device)[None, :]
    mask = keys <= place
    return mask if window is None else mask & (keys > place - window)


def _decode_torch(
    context: StepContext, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """One query per row over that row's blocks; the heads of a group are the rows of one small product."""
    tables = context.tables
    assert tables is not None
    assert context.lengths is not None
    batch, cache = tables.shape[0], context.cache
    keys, values = cache.rows(cache.keys[layer], tables), cache.rows(cache.values[layer], tables)
    mask = context.masks.get(window)
    if mask is None:
        place = torch.arange(keys.shape[2], device=keys.device)[None, :]
        mask = place < context.lengths[:, None]
        if window is not None:
            mask = mask & (place >= context.lengths[:, None] - window)
        mask = context.masks[window] = mask[:, None, None, :]
    heads, kv_heads = query.shape[0], keys.shape[1]
    grouped = query.transpose(0, 1).reshape(batch, kv_heads, heads // kv_heads, -1)
    if softcap is None:
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    else:
        out = _softcapped(grouped, keys, values, mask, scale, softcap)
    return out.reshape(batch, heads, -1)


def _softcapped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    scores = torch.matmul(query, key.transpose(-1, -2)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1, dtype=torch.float32)
    return torch.matmul(weights.to(query.dtype), value)
