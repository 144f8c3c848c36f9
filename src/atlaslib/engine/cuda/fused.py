"""The decoder stack of the plain Llama form on CUDA, in fewer and larger kernels than its modules launch.

Llama, Qwen2, Qwen3 and Mistral share one layer: norm, attention, norm, gated product. Within `FusedStack.active` the stack's
forward is the loop below, for the thread that runs an engine step; every other forward is the module's own. The weights
are the model's parameters. Projections of one input (q, k, v; gate, up) become one matrix product, for which their weights
are laid next to each other in memory: the same parameter objects with the same values in a shared storage.

In a step that reads prompts only the rows whose logits are wanted go through the gated product of the last layer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from atlaslib.engine import attention
from atlaslib.engine.attention import StepContext
from atlaslib.engine.cuda import kernels

logger = logging.getLogger(__name__)
_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
_STACK_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_LARGE = 1 << 25  # elements of a weight: smaller ones gain from being merged, a larger one from being split (few rows)
_SPLIT_ROWS = 512  # with more of them a product fills the device as it is


class Projections:
    """Linear layers of one input: one product where they are plain, their own forwards where not (adapters)."""

    def __init__(self, linears: list[Any], *, merge: bool) -> None:
        self.linears = linears
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if merge and _mergeable(linears):
            self.sizes = [linear.out_features for linear in linears]
            self.weight = _share_storage([linear.weight for linear in linears])
            self.bias = _share_storage([linear.bias for linear in linears]) if linears[0].bias is not None else None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.weight is None:
            return tuple(linear(x) for linear in self.linears)
        return torch.split(functional.linear(x, self.weight, self.bias), self.sizes, dim=-1)


def _mergeable(linears: list[Any]) -> bool:
    """Plain layers of one input size and type, all with or all without bias."""
    first = linears[0]
    return all(
        type(linear) is torch.nn.Linear
        and (linear.in_features, linear.weight.dtype) == (first.in_features, first.weight.dtype)
        and (linear.bias is None) == (first.bias is None)
        and linear.weight.numel() < _LARGE
        for linear in linears
    )


def _share_storage(parameters: list[Any]) -> Tensor:
    """One tensor that holds all of them in order; each parameter's data becomes a view of it."""
    whole = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        end = start + parameter.shape[0]
        parameter.data = whole[start:end]
        start = end
    return whole


def down_projection(linear: Any, x: Tensor) -> Tensor:
    """What the layer gives for [T, inner], or for few rows and a large weight float32 parts of it, [2, T, hidden].

    So few outputs of so long sums are too few tiles for the device. cuBLAS, too, computes them in two halves, but adds
    these up in a kernel of its own; `kernels.add_norm` does it on the way.
    """
    if not _splittable(linear, x):
        result: Tensor = linear(x)
        return result
    rows, half = x.shape[0], x.shape[1] // 2
    weight = linear.weight.view(-1, 2, half)
    return torch.bmm(x.view(rows, 2, half).transpose(0, 1), weight.permute(1, 2, 0), out_dtype=torch.float32)


def _splittable(linear: Any, x: Tensor) -> bool:
    return (
        x.shape[0] <= _SPLIT_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] % 16 == 0  # halves that start at a multiple of 16 bytes
        and type(linear) is torch.nn.Linear
        and linear.bias is None
        and linear.weight.numel() >= _LARGE
        and linear.weight.is_contiguous()
        and hasattr(torch.ops.aten.bmm, "dtype")  # torch 2.8
    )


class FusedLayer:
    """The two halves of one decoder layer, without norms and residual additions."""

    def __init__(self, layer: Any, *, merge: bool) -> None:
        self.attention, self.mlp = layer.self_attn, layer.mlp
        self.second_norm = layer.post_attention_layernorm
        self.qkv = Projections([getattr(self.attention, name) for name in ("q_proj", "k_proj", "v_proj")], merge=merge)
        self.gate_up = Projections([self.mlp.gate_proj, self.mlp.up_proj], merge=merge)
        own = getattr(self.attention, "sliding_window", None)
        whole_model = getattr(self.attention.config, "sliding_window", None)  # Mistral's layers read the config
        self.window = own if hasattr(self.attention, "sliding_window") else whole_model

    def attend(self, h: Tensor, cos: Tensor, sin: Tensor, context: StepContext) -> Tensor:
        """[T, hidden] -> [T, hidden]; keys and values go into the cache."""
        module = self.attention
        layer, rows = int(module.layer_idx), h.shape[0]
        query, key, value = self.qkv(h)
        cache = context.cache.keys[layer], context.cache.values[layer]
        head_norms = (module.q_norm, module.k_norm) if hasattr(module, "q_norm") else None
        query = kernels.rope_and_write(query, key, value, cos, sin, context.slots, cache, head_norms)
        assert context.attend is not None
        out = context.attend(context, layer, query, None, None, module.scaling, self.window, None)
        projected: Tensor = module.o_proj(out.reshape(rows, -1))
        return projected

    def gated(self, h: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden], or the parts of that sum, see `down_projection`."""
        return down_projection(self.mlp.down_proj, kernels.silu_mul(*self.gate_up(h)))


class FusedStack:
    """Another forward for the decoder stack of `model`."""

    def __init__(self, model: Any, *, merge: bool = True) -> None:
        self.stack = next((module for module in model.modules() if _known(module)), None)
        if self.stack is None:
            logger.info("%s runs its own modules: not of the plain Llama form", type(model).__name__)
            return
        with torch.no_grad():
            self.layers = [FusedLayer(layer, merge=merge) for layer in self.stack.layers]
        first_norms = [layer.input_layernorm for layer in self.stack.layers]
        self.norms = [*first_norms, self.stack.norm]

    @contextmanager
    def active(self) -> Iterator[None]:
        """The stack answers with `forward` inside this block."""
        if self.stack is None:
            yield
            return
        self.stack.__dict__["forward"] = self.forward
        try:
            yield
        finally:
            del self.stack.__dict__["forward"]

    def forward(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
        """Hidden states after the last norm, of the rows `context.keep` only where that is set."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        stack, context = self.stack, attention.current()
        assert stack is not None
        if context is None or context.recorded is not None:
            return type(stack).forward(stack, input_ids=input_ids, position_ids=position_ids, **kwargs)
        x = stack.embed_tokens(input_ids)[0]  # [T, hidden]
        cos, sin = (part[0] for part in stack.rotary_emb(x, position_ids))
        h = kernels.rms_norm(x, self.norms[0])
        for layer, next_norm in zip(self.layers, self.norms[1:], strict=True):
            attended = layer.attend(h, cos, sin, context)
            if layer is self.layers[-1] and context.keep is not None:
                x, attended = x[context.keep], attended[context.keep]
            x, h = kernels.add_norm(x, attended, layer.second_norm)
            x, h = kernels.add_norm(x, layer.gated(h), next_norm)
        return BaseModelOutputWithPast(last_hidden_state=h[None])


def _known(stack: Any) -> bool:
    """A decoder stack of one of the families, whole and without hooks."""
    home = type(stack).__module__
    if home not in [f"transformers.models.{name}.modeling_{name}" for name in _FAMILIES]:
        return False
    if set(stack._modules) != _STACK_PARTS or len(stack.layers) != stack.config.num_hidden_layers:
        return False
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in stack.modules()):
        return False
    return all(_known_layer(layer, stack) for layer in stack.layers)


def _known_layer(layer: Any, stack: Any) -> bool:
    norms = (layer.input_layernorm, layer.post_attention_layernorm, stack.norm)
    return (
        set(layer._modules) == _LAYER_PARTS
        and {norm.weight.dtype for norm in norms} == {stack.embed_tokens.weight.dtype}
        and set(layer.self_attn._modules) in (_PROJECTIONS, _PROJECTIONS | {"q_norm", "k_norm"})
        and set(layer.mlp._modules) == {"gate_proj", "up_proj", "down_proj", "act_fn"}
        and type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
        and layer.self_attn.head_dim == 2 * stack.rotary_emb.inv_freq.shape[0]
    )
