"""Attention for flat rows: the linear layers see every distinct token once, attention sees whole sequences.

A flat row holds the tokens of many samples one after the other, without pads, and beginnings that samples share only once. Linear layers, norms
and activations work on it as it is. Attention has two ways:

* on a GPU with half-precision tensors, the flash kernel for sequences of different lengths: queries stay where they are, only the keys and values of
  shared beginnings are repeated for each of their samples;
* everywhere else, queries, keys and values are gathered into one row per sample (a shared beginning into each of its samples), the causal kernel of
  torch runs on those, and the results go back to the flat row.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from atlaslib.types import FlatRuns

NAME = "atlas_flat"


@dataclass(kw_only=True, slots=True, frozen=True)
class FlatPlan:
    """Where the tokens of a flat row stand in whole sequences."""

    gather: torch.Tensor
    """[S, W] flat position of every token of every sample; pads point anywhere"""
    place: torch.Tensor
    """[N] for each flat position, one place (sample * W + column) where its result is found"""
    runs: FlatRuns
    """the same as runs of queries and keys, for the flash kernel"""


_plan: list[FlatPlan] = []
_known_configs: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def flat_attention(model: Any, plan: FlatPlan | None) -> Iterator[None]:
    """Inside this block the model's attention follows ``plan``; None leaves it as it is."""
    if plan is None:
        yield
        return
    _register()
    configs = _configs(model)
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation_internal = NAME
    _plan.append(plan)
    try:
        yield
    finally:
        _plan.pop()
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


def supports_flat(model: Any) -> bool:
    """Plain causal attention through transformers' interface: no windows, no soft caps, no learned sinks."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config() if hasattr(base.config, "get_text_config") else base.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    odd = any(
        getattr(config, name, None)
        for name in ("attn_logit_softcapping", "attention_chunk_size", "use_bidirectional_attention")
    )
    window = (
        getattr(config, "sliding_window", None)
        and getattr(config, "use_sliding_window", True)
        and not getattr(config, "layer_types", None)
    )
    plain = config._attn_implementation in {"sdpa", "eager", "flash_attention_2", "flash_attention_3"}
    return (
        bool(getattr(base, "_supports_attention_backend", False))
        and kinds == {"full_attention"}
        and not odd
        and not window
        and plain
    )


def _configs(model: Any) -> list[Any]:
    """The settings objects the attention of ``model`` reads; looked for once."""
    if model not in _known_configs:
        configs = (getattr(module, "config", None) for module in model.modules())
        _known_configs[model] = list({id(it): it for it in configs if hasattr(it, "_attn_implementation")}.values())
    return _known_configs[model]


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(NAME, _no_mask)
        AttentionInterface.register(NAME, _attend)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, N, D] tensors of a flat row -> [1, N, heads, D]."""
    plan = _plan[-1]
    if query.is_cuda and torch.is_autocast_enabled("cuda"):  # rotary embeddings leave queries and keys in float32
        query, key, value = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (query, key, value))
    if _flash_applies(query, value, dropout):
        return _flash(query, key, value, plan.runs, scaling), None
    samples, width = plan.gather.shape
    index = plan.gather.reshape(-1)

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        """[S, heads, W, D]; all heads of a token lie together and are moved together"""
        heads, tokens, dim = tensor.shape[1:]
        rows = tensor[0].transpose(0, 1).reshape(tokens, heads * dim).index_select(0, index)
        return rows.view(samples, width, heads, dim).transpose(1, 2)

    output = torch.nn.functional.scaled_dot_product_attention(
        spread(query),
        _repeat_heads(spread(key), query.shape[1]),
        _repeat_heads(spread(value), query.shape[1]),
        dropout_p=dropout,
        scale=scaling,
        is_causal=True,
    )
    flat = output.transpose(1, 2).reshape(samples * width, -1).index_select(0, plan.place)
    return flat.view(1, -1, query.shape[1], value.shape[-1]), None


def _flash_applies(query: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """What the flash kernel takes: half precision, heads of up to 256 numbers; torch's builds for AMD have another kernel."""
    dim = query.shape[-1]
    return (
        query.is_cuda
        and torch.version.hip is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and value.shape[-1] == dim
        and dim <= 256
        and dim % 8 == 0
        and dropout == 0.0
    )


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: FlatRuns, scaling: float | None
) -> torch.Tensor:
    """[1, N, heads, D] by the kernel behind torch.nn.attention.varlen, whose public face lacks grouped-query attention before torch 2.12."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        """[N, heads, D]"""
        return tensor[0].transpose(0, 1)

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        """[K, heads, D]; through float32 so that the gradients of a shared beginning are summed in float32"""
        if runs.key_index is None:
            return rows(tensor)
        return rows(tensor).float().index_select(0, runs.key_index).to(tensor.dtype)

    output: torch.Tensor = torch.ops.aten._flash_attention_forward(
        rows(query),
        seen(key),
        seen(value),
        runs.query_starts,
        runs.key_starts,
        runs.longest_queries,
        runs.longest_keys,
        0.0,
        True,  # causal: the last query of a run sees all its keys
        False,
        scale=scaling,
    )[0]
    return output.unsqueeze(0)


def _repeat_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Key and value heads as many as query heads (grouped-query attention)."""
    times = heads // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)
