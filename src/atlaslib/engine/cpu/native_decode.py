"""The compiled decode step (`decode.c`) over the weights of a :class:`~atlaslib.engine.cpu.lean_decode.LeanDecode` model.

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
_NUM_ENDS = 4  # tensors that belong to no layer
_CHANGING_ROTARY = ("dynamic", "longrope")  # frequencies depend on the length of the context
_MIN_ROWS = 4  # a thread takes at least so many rows, a tile of decode.c


class _Shape(ctypes.Structure):
    """`Shape` of decode.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "dim", "inner", "vocab")),
        *((name, ctypes.c_int64) for name in ("block_size", "table_width")),
        *((name, ctypes.c_double) for name in ("eps", "scale", "rotary_scaling")),
    ]


class NativeDecode:
    """One token per row; see the module text."""

    def __init__(self, model: Any, functions: ctypes.CDLL, threads: int) -> None:
        inner, self.threads = model.model, threads
        self.shape = _shape_of(model)
        self._tensors = [entry for layer in inner.layers for entry in _layer_tensors(layer)]  # (where, name) each
        self._tensors += [(inner.embed_tokens._parameters, "weight"), (inner.rotary_emb._buffers, "inv_freq")]
        self._tensors += [(inner.norm._parameters, "weight"), (model.lm_head._parameters, "weight")]
        self._sizes = [None if (t := where[name]) is None else t.shape for where, name in self._tensors]
        self._addresses: list[int] = []  # of `_tensors` and the cache, when last looked up
        self._layers = self._ends = np.zeros(0, dtype=np.int64)  # `Layer` of every layer, and `Ends`, of decode.c
        self._step = functions.atropos_decode
        self._pool = ThreadPoolExecutor(max_workers=max(1, threads - 1), thread_name_prefix="decode")  # starts none yet

    @property
    def uniform(self) -> bool:
        """Whether all layers have the form of the first."""
        count = (len(self._sizes) - _NUM_ENDS) // self.shape.layers
        return len({tuple(self._sizes[layer * count :][:count]) for layer in range(self.shape.layers)}) == 1

    def forward(self, ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """[B] token ids at [B] positions -> logits [B, V], after :meth:`ready`; all of them int64."""
        assert context.tables is not None
        shape, tables = self.shape, context.tables.to(torch.int32).contiguous()
        shape.block_size, shape.table_width = context.cache.block_size, tables.shape[1]
        logits = torch.empty(ids.shape[0], shape.vocab)
        wide = max((shape.heads + 2 * shape.kv_heads) * shape.dim, shape.inner)
        a_row, a_thread = 2 * shape.hidden + shape.dim + 2 * wide, shape.heads * shape.table_width * shape.block_size
        common = (ctypes.addressof(shape), self._layers.ctypes.data, self._ends.ctypes.data)
        calls, kept = [], []
        for start, end in self._shares(ids.shape[0]):
            scratch = torch.empty((end - start) * a_row + a_thread)
            places = [t.data_ptr() + start * t.stride(0) * t.element_size() for t in (ids, positions, tables)]
            out = logits.data_ptr() + start * shape.vocab * logits.element_size()
            calls.append((*common, end - start, *places, scratch.data_ptr(), out))
            kept.append(scratch)  # until C is done with it
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
        tensors = [where[name] for where, name in self._tensors]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (*tensors, *cache.keys, *cache.values)]
        if addresses == self._addresses:
            return True
        if not all(_as_described(*pair) for pair in zip(tensors, self._sizes, strict=True)):
            return False
        self._addresses, places = addresses, np.array(addresses)
        weights, caches = places[: len(tensors) - _NUM_ENDS], places[len(tensors) :].reshape(2, -1)
        self._layers = np.ascontiguousarray(np.concatenate([weights.reshape(len(cache.keys), -1), caches.T], axis=1))
        self._ends = places[len(tensors) - _NUM_ENDS : len(tensors)].copy()
        return True


def _shape_of(model: Any) -> _Shape:
    inner, first = model.model, model.model.layers[0]
    attention, mlp = first.self_attn, first.mlp
    return _Shape(
        layers=len(inner.layers),
        hidden=mlp.gate_proj.in_features,
        heads=attention.q_proj.out_features // attention.head_dim,
        kv_heads=attention.k_proj.out_features // attention.head_dim,
        dim=attention.head_dim,
        inner=mlp.gate_proj.out_features,
        vocab=model.lm_head.out_features,
        eps=first.input_layernorm.variance_epsilon,
        scale=attention.scaling,
        rotary_scaling=inner.rotary_emb.attention_scaling,
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None where they cannot be had."""
    found = native.load(_SOURCE, *_vector_flags())
    if found is not None:
        pointer, whole = ctypes.c_void_p, ctypes.c_int64
        found.atropos_decode.restype = found.atropos_sample.restype = found.atropos_attend.restype = None
        found.atropos_decode.argtypes = [*[pointer] * 3, whole, *[pointer] * 5]
        found.atropos_sample.argtypes = [whole, whole, *[pointer] * 9]
        found.atropos_attend.argtypes = [*[whole] * 5, ctypes.c_float, ctypes.c_float, *[pointer] * 6]
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
    if model.model.rotary_emb.rope_type in _CHANGING_ROTARY:
        return None
    decode = NativeDecode(model, found, threads)
    norms = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    return decode if decode.uniform and {norm.variance_epsilon for norm in norms} == {decode.shape.eps} else None


def _vector_flags() -> tuple[str, ...]:
    """What the compiler may use beyond the least of this kind of processor."""
    if platform.machine() != "x86_64":
        return ()
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return ()
    return ("-mavx2", "-mfma") if {"avx2", "fma"} <= words else ()


def _layer_tensors(layer: Any) -> list[tuple[dict[str, Any], str]]:
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
