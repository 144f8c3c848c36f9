"""A decode step of the plain Llama form without the modules' call overhead, for CPU and float32.

At a few rows per step a small model spends most of its time in module calls. This runs the same arithmetic directly on the
module's own weight tensors, read anew every step, so there is nothing to refresh after an optimizer step. Only models
whose every part is of a known class are taken (:func:`lean_decode_for`), and before each step :meth:`LeanDecode.usable` looks
for hooks, replaced parts and autocast; whenever something is unusual the caller runs the module itself. Where a C compiler
is at hand the whole step is one compiled function (:mod:`atlaslib.engine.cpu.native_decode`), else torch calls one after the other.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

from atlaslib.engine.attention import StepContext, attend_torch
from atlaslib.engine.cpu.native_decode import native_decode_for

logger = logging.getLogger(__name__)
_FAMILIES = {f"{name}ForCausalLM": name.lower() for name in ("Llama", "Qwen2", "Qwen3", "Mistral")}
_INNER_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ACTIVATIONS = ("SiLU", "SiLUActivation")


class LeanDecode:
    """Logits of one token per row; see the module text."""

    def __init__(self, model: Any, threads: int) -> None:
        self.model = model
        self.inner = model.model
        modules = list(model.modules())
        self._classes = [(module, type(module)) for module in modules]
        self._children = [(m._modules, list(m._modules.values())) for m in modules if m._modules]
        self._layers = [_Layer(layer) for layer in self.inner.layers]
        self.native = native_decode_for(model, threads)

    def usable(self) -> bool:
        """Nothing was hooked, patched or replaced since, and no autocast is on."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return False
        if torch.is_autocast_enabled("cpu"):
            return False
        for module, kind in self._classes:
            if type(module) is not kind or module._forward_hooks or module._forward_pre_hooks:
                return False
            if "forward" in module.__dict__:
                return False
        return all(list(now.values()) == before for now, before in self._children)

    def forward(self, ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """[B] token ids at [B] positions -> logits [B, V]; the keys and values of the step go into the cache."""
        if self.native is not None and self.native.ready(context.cache):
            return self.native.forward(ids, positions, context)
        inner = self.inner
        x = functional.embedding(ids, inner.embed_tokens._parameters["weight"])  # [B, hidden]
        cos, sin = inner.rotary_emb(x, positions[None])  # [1, B, dim] each
        half = sin.shape[-1] // 2
        cos = cos[0, :, None]  # [B, 1, dim]
        signed_sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)[:, None]
        for layer in self._layers:
            x = layer.forward(x, cos, signed_sin, context)
        x = _norm(x, inner.norm)
        return functional.linear(x, self.model.lm_head._parameters["weight"])


class _Layer:
    """One decoder layer, its parts looked up once; their weights are read at every call."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention, self.index = attention, int(attention.layer_idx)
        self.norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self.q, self.k, self.v, self.o = (getattr(attention, name)._parameters for name in _LINEARS)
        self.gate, self.up, self.down = (getattr(mlp, name)._parameters for name in _GATED)
        self.head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.heads = attention.q_proj.out_features // attention.head_dim

    def forward(self, x: Tensor, cos: Tensor, signed_sin: Tensor, context: StepContext) -> Tensor:
        rows, dim, heads = x.shape[0], cos.shape[-1], self.heads
        h = _norm(x, self.norms[0])
        query, key, value = _linear(h, self.q), _linear(h, self.k), _linear(h, self.v).view(rows, -1, dim)
        if self.head_norms is None:
            both = torch.cat((query, key), dim=1).view(rows, -1, dim)  # [B, heads + kv_heads, dim]
        else:
            parts = (query.view(rows, -1, dim), key.view(rows, -1, dim))
            both = torch.cat([_norm(p, norm) for p, norm in zip(parts, self.head_norms, strict=True)], dim=1)
        both = torch.addcmul(both * cos, both.roll(dim // 2, -1), signed_sin).transpose(0, 1)
        scale = self.attention.scaling
        out = attend_torch(context, self.index, both[:heads], both[heads:], value.transpose(0, 1), scale, None, None)
        x = _linear(out.reshape(rows, -1), self.o).add_(x)
        h = _norm(x, self.norms[1])
        h = functional.silu(_linear(h, self.gate), inplace=True).mul_(_linear(h, self.up))
        return _linear(h, self.down).add_(x)


def _linear(x: Tensor, parameters: Any) -> Tensor:
    return functional.linear(x, parameters["weight"], parameters["bias"])


def _norm(x: Tensor, module: Any) -> Tensor:
    return torch.rms_norm(x, x.shape[-1:], module._parameters["weight"], module.variance_epsilon)


def lean_decode_for(model: Any, threads: int | None = None) -> LeanDecode | None:
    """The lean path of this model, or None when it is not exactly one of the families, on CPU and in float32."""
    reason = _unusual(model)
    if reason is None:
        lean = LeanDecode(model, threads or torch.get_num_threads())
        if lean.usable():
            return lean
        reason = "hooks, patched modules or autocast"
    logger.debug("decode steps of %s run its modules: %s", type(model).__name__, reason)
    return None


def _unusual(model: Any) -> str | None:
    """Why the model is not taken."""
    name, home = type(model).__name__, type(model).__module__
    family = _FAMILIES.get(name)
    if family is None or home != f"transformers.models.{family}.modeling_{family}":
        return "not one of the plain Llama families"
    for tensor in (*model.parameters(), *model.buffers()):
        if not _plain(tensor):
            return f"{type(tensor).__name__} of {tensor.dtype} on {tensor.device}"
    for module in model.modules():
        kind = type(module)
        known = kind in (nn.Linear, nn.Embedding, nn.ModuleList) or kind.__name__ in _ACTIVATIONS
        if not known and kind.__module__ != home:
            return f"a {kind.__name__} inside"
    inner = model.model
    if set(model._modules) != {"model", "lm_head"} or set(inner._modules) != _INNER_PARTS:
        return "other parts"
    if inner.embed_tokens.max_norm is not None or model.lm_head.bias is not None:
        return "another embedding or head"
    if len(inner.layers) != model.config.num_hidden_layers:
        return "layers left out"
    rotary_dim = 2 * inner.rotary_emb.inv_freq.shape[0]
    reasons = (_unusual_layer(layer, family == "qwen3", rotary_dim) for layer in inner.layers)
    return next((reason for reason in reasons if reason), None)


def _plain(tensor: Tensor) -> bool:
    known = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return known and tensor.device.type == "cpu" and tensor.dtype == torch.float32


def _unusual_layer(layer: Any, head_norms: bool, rotary_dim: int) -> str | None:
    if set(layer._modules) != _LAYER_PARTS or set(layer.mlp._modules) != {*_GATED, "act_fn"}:
        return "another layer"
    attention, activation = layer.self_attn, type(layer.mlp.act_fn).__name__
    if set(attention._modules) != {*_LINEARS, *(("q_norm", "k_norm") if head_norms else ())}:
        return "another attention"
    if attention.head_dim != rotary_dim:
        return "partial rotary embedding"
    if getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)) is not None:
        return "a sliding window"
    return None if activation in _ACTIVATIONS else f"activation {activation}"
