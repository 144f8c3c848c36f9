"""Attention for flat rows: the linear layers see every distinct token once, attention sees whole sequences.

A flat row holds the tokens of many samples one after the other, without pads, and beginnings that samples share only once. Linear layers, norms
and activations work on it as it is. For attention, queries, keys and values are gathered into one row per sample (a shared
beginning into each of its samples), the causal kernel of torch runs on those, and the results go back to the flat row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

NAME = "atlas_flat"


@dataclass(kw_only=True, slots=True, frozen=True)
class FlatPlan:
    """Where the tokens of a flat row stand in whole sequences."""

    gather: torch.Tensor
    """[S, W] flat position of every token of every sample; pads point anywhere"""
    place: torch.Tensor
    """[N] for each flat position, one place (sample * W + column) where its result is found"""


_plan: list[FlatPlan] = []


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
    found = {
        id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")
    }
    return list(found.values())


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
    samples, width = plan.gather.shape
    index = plan.gather.reshape(-1)

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        """[S, heads, W, D]"""
        heads, _, dim = tensor.shape[1:]
        return tensor[0].index_select(1, index).view(heads, samples, width, dim).transpose(0, 1)

    output = torch.nn.functional.scaled_dot_product_attention(
        spread(query),
        _repeat_heads(spread(key), query.shape[1]),
        _repeat_heads(spread(value), query.shape[1]),
        dropout_p=dropout,
        scale=scaling,
        is_causal=True,
    )
    flat = output.transpose(1, 2).reshape(samples * width, query.shape[1], value.shape[-1])
    return flat.index_select(0, plan.place).unsqueeze(0), None


def _repeat_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Key and value heads as many as query heads (grouped-query attention)."""
    times = heads // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)
