"""The compiled decode step (`decode.c`) over the weights of a :class:`~atlaslib.engine.lean_decode.LeanDecode` model.

Addresses of the weights are read anew at every step, so an optimizer step or a replaced tensor is seen at once. Rows of a step
are shared among threads: each calls into C, which needs no Python lock, with its own rows.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlaslib.engine.attention import KVCache, StepContext
from atroposlib import native

_SOURCE = Path(__file__).with_name("decode.c")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_FORM = (torch.float32, "cpu")
_MIN_ROWS = 8  # below twice as many, handing rows to another thread costs more than it saves


class NativeDecode:
    """One token per row; see the module text."""

    def __init__(self, model: Any, functions: ctypes.CDLL, threads: int) -> None:
        self.model, self.inner, self.threads = model, model.model, threads
        first = self.inner.layers[0]
        attention, mlp = first.self_attn, first.mlp
        self.hidden, self.inner_size = mlp.gate_proj.in_features, mlp.gate_proj.out_features
        self.dim, self.vocab = attention.head_dim, model.lm_head.out_features
        self.heads = attention.q_proj.out_features // self.dim
        self.kv_heads = attention.k_proj.out_features // self.dim
        self.scale, self.eps = float(attention.scaling), float(first.input_layernorm.variance_epsilon)
        self._parameters = [entry for layer in self.inner.layers for entry in _layer_parameters(layer)]
        self._parameters += [(self.inner.norm._parameters, "weight"), (model.lm_head._parameters, "weight")]
        self._shapes = [None if (t := owner[name]) is None else t.shape for owner, name in self._parameters]
        self._addresses: list[int] = []  # of `_parameters` and the cache, when last looked up
        self._layers: np.ndarray[Any, Any] = np.zeros((0, 0), dtype=np.int64)  # the C side's table of layers
        self._ends: list[int] = []  # addresses of the last norm and the head
        self._step = functions.atropos_decode
        self._pool = ThreadPoolExecutor(max_workers=max(1, threads - 1), thread_name_prefix="decode")  # starts none yet

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Embeddings [B, hidden], rotary tables [B, dim] -> logits [B, V], after :meth:`ready`; x is used up."""
        assert context.tables is not None
        rows, cache = x.shape[0], context.cache
        tables = context.tables.to(torch.int32).contiguous()
        layers, (norm, head) = self._layers, self._ends
        shape = np.array(
            [
                *(len(self.inner.layers), self.hidden, self.heads, self.kv_heads, self.dim),
                *(self.inner_size, self.vocab, cache.block_size, tables.shape[1]),
            ]
        )
        logits, kept = torch.empty(rows, self.vocab), [tables]  # alive until C is done
        cos, sin, longest = cos.contiguous(), sin.contiguous(), tables.shape[1] * cache.block_size
        wide = max((self.heads + 2 * self.kv_heads) * self.dim, self.inner_size)

        calls = []
        for start, end in self._shares(rows):
            scratch = torch.empty((end - start) * (self.hidden + 2 * wide) + self.heads * longest)
            places = [t.data_ptr() + start * t.stride(0) * t.element_size() for t in (x, cos, sin, tables, positions)]
            out = logits.data_ptr() + start * self.vocab * logits.element_size()
            numbers = (self.eps, self.scale, scratch.data_ptr(), out)
            calls.append((shape.ctypes.data, layers.ctypes.data, norm, head, end - start, *places, *numbers))
            kept.append(scratch)
        others = [self._pool.submit(self._step, *call) for call in calls[1:]]
        self._step(*calls[0])
        for other in others:
            other.result()
        return logits

    def _shares(self, rows: int) -> list[tuple[int, int]]:
        """Rows [start, end) of each thread that has enough to do."""
        parts = max(1, min(self.threads, rows // _MIN_ROWS))
        return [(rows * part // parts, rows * (part + 1) // parts) for part in range(parts)]

    def ready(self, cache: KVCache) -> bool:
        """Look up where the weights are now. False when one is no longer a whole float32 tensor of its old shape on the CPU."""
        tensors = [owner[name] for owner, name in self._parameters]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (*tensors, *cache.keys, *cache.values)]
        if addresses == self._addresses:
            return True
        if not all(_as_described(*pair) for pair in zip(tensors, self._shapes, strict=True)):
            return False
        self._addresses, count = addresses, len(cache.keys)
        weights, self._ends = addresses[: -2 * count - 2], addresses[-2 * count - 2 : -2 * count]
        parts = [np.array(weights).reshape(count, -1), np.array(addresses[-2 * count :]).reshape(2, count).T]
        self._layers = np.ascontiguousarray(np.concatenate(parts, axis=1))
        return True


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None where they cannot be had."""
    found = native.load(_SOURCE, *_vector_flags())
    if found is not None:
        pointer, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        found.atropos_decode.restype = found.atropos_sample.restype = None
        found.atropos_decode.argtypes = [*[pointer] * 4, whole, *[pointer] * 5, real, real, pointer, pointer]
        found.atropos_sample.argtypes = [whole, whole, *[pointer] * 9]
    return found


def _as_described(tensor: Tensor | None, shape: torch.Size | None) -> bool:
    if tensor is None or shape is None:
        return tensor is None and shape is None
    return tensor.shape == shape and tensor.is_contiguous() and (tensor.dtype, tensor.device.type) == _FORM


def native_decode_for(model: Any, threads: int) -> NativeDecode | None:
    """The compiled step of a model that `lean_decode_for` takes; None where it cannot be compiled or the layers differ in form."""
    found = library()
    if found is None:
        return None
    decode = NativeDecode(model, found, threads)
    per_layer = (len(decode._shapes) - 2) // len(model.model.layers)
    forms = {tuple(decode._shapes[i : i + per_layer]) for i in range(0, len(decode._shapes) - 2, per_layer)}
    norms = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    same = len(forms) == 1 and {float(norm.variance_epsilon) for norm in norms} == {decode.eps}
    return decode if same else None


def _vector_flags() -> tuple[str, ...]:
    """What the compiler may use beyond the least of this kind of processor."""
    if platform.machine() != "x86_64":
        return ()
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return ()
    return ("-mavx2", "-mfma") if {"avx2", "fma"} <= words else ()


def _layer_parameters(layer: Any) -> list[tuple[dict[str, Any], str]]:
    """(where, name) of every weight of a layer, in the order of `Layer` in decode.c without the cache."""
    attention, mlp = layer.self_attn, layer.mlp

    def both(module: Any) -> list[tuple[dict[str, Any], str]]:
        return [(module._parameters, "weight"), (module._parameters, "bias")]

    def head_norm(name: str) -> tuple[dict[str, Any], str]:
        module = getattr(attention, name, None)
        return ({"weight": None} if module is None else module._parameters, "weight")

    first, second = (getattr(layer, name)._parameters for name in _NORMS)
    return [
        (first, "weight"),
        *(pair for name in ("q_proj", "k_proj", "v_proj", "o_proj") for pair in both(getattr(attention, name))),
        head_norm("q_norm"),
        head_norm("k_norm"),
        (second, "weight"),
        *(pair for name in ("gate_proj", "up_proj", "down_proj") for pair in both(getattr(mlp, name))),
    ]
