"""Fewer, larger kernels inside the engine's own forward on CUDA: norm, rotary embedding, gated activation, projections.

The model's modules stay as they are. Within `FusedModules.active` some of them answer with a fused kernel, only for the
thread that runs an engine step, and only where the kernel was seen to give the module's own result at start.

Projections of one input (q, k, v; gate, up) become one matrix product. For that their weights are laid next to each
other in memory: the parameters remain the same objects with the same values, only their storage is a shared one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from atlaslib.engine import attention, kernels

logger = logging.getLogger(__name__)
_ROPE = "apply_rotary_pos_emb"
_MERGE_BELOW = 1 << 25  # elements; larger products fill the device by themselves and run slower together


class MergedLinears:
    """Several linear layers of the same input as one product; the first call computes it, the others take their part."""

    def __init__(self, linears: list[Any]) -> None:
        self.linears = linears
        self.sizes = [linear.out_features for linear in linears]
        self.weight = _share_storage([linear.weight for linear in linears])
        self.bias = _share_storage([linear.bias for linear in linears]) if linears[0].bias is not None else None
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    @staticmethod
    def possible(linears: list[Any]) -> bool:
        """Plain layers (no adapters) of one input size and type, all with or all without bias."""
        first = linears[0]
        return all(
            type(linear) is torch.nn.Linear
            and (linear.in_features, linear.weight.dtype) == (first.in_features, first.weight.dtype)
            and (linear.bias is None) == (first.bias is None)
            and linear.weight.numel() < _MERGE_BELOW
            for linear in linears
        )

    def together(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def forwards(self) -> list[tuple[Any, Callable[..., Any]]]:
        return [(linear, self._forward(index, linear)) for index, linear in enumerate(self.linears)]

    def _forward(self, index: int, linear: Any) -> Callable[..., Any]:
        def forward(x: Tensor) -> Tensor:
            if attention.current() is None:
                return functional.linear(x, linear.weight, linear.bias)
            if index == 0:
                self._input, self._parts = x, torch.split(self.together(x), self.sizes, dim=-1)
            elif self._input is not x:
                return functional.linear(x, linear.weight, linear.bias)
            part = self._parts[index]
            if index == len(self.sizes) - 1:
                self._input, self._parts = None, ()
            return part

        return forward


def _share_storage(parameters: list[Any]) -> Tensor:
    """One tensor that holds all of them in order; each parameter's data becomes a view of it."""
    whole = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        end = start + parameter.shape[0]
        parameter.data = whole[start:end]
        start = end
    return whole


class FusedModules:
    """Which modules of `model` can be replaced for a forward, found once."""

    def __init__(self, model: Any, *, merge: bool = True) -> None:
        self._forwards: list[tuple[Any, Callable[..., Any]]] = []
        self._ropes: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        verdicts: dict[type, bool] = {}
        with torch.no_grad():
            for module in list(model.modules()):
                kind = type(module)
                if kind.__name__.endswith("RMSNorm"):
                    self._note(module, _norm_forward(module), verdicts)
                elif _is_gated_mlp(module):
                    self._note(module, _mlp_forward(module, merge), verdicts)
                elif kind.__name__.endswith("Attention"):
                    self._note_attention(module, merge)
        names = sorted(kind.__name__ for kind, good in verdicts.items() if good)
        logger.info("fused kernels for %s and %d rotary functions", ", ".join(names) or "no module", len(self._ropes))

    def _note(self, module: Any, forward: Callable[..., Any], verdicts: dict[type, bool]) -> None:
        if type(module) not in verdicts:
            verdicts[type(module)] = _agrees(module, forward)
        if verdicts[type(module)]:
            self._forwards.append((module, forward))

    def _note_attention(self, module: Any, merge: bool) -> None:
        owner = sys.modules.get(type(module).__module__)
        if hasattr(owner, _ROPE) and owner not in self._ropes:
            self._note_rope(owner, module)
        linears = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
        if merge and MergedLinears.possible(linears):
            self._forwards += MergedLinears(linears).forwards()

    def _note_rope(self, owner: Any, module: Any) -> None:
        original = getattr(owner, _ROPE)
        dim = int(getattr(module, "head_dim", 0))
        parameter = next(module.parameters())
        if not dim or not _rope_agrees(original, dim, parameter):
            return

        def fused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
            if attention.current() is None or args or kwargs or cos.shape[-1] != q.shape[-1]:
                return original(q, k, cos, sin, *args, **kwargs)
            return kernels.rope(q, k, cos, sin)

        self._ropes[owner] = (original, fused)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The replacements hold inside this block."""
        for module, forward in self._forwards:
            module.__dict__["forward"] = forward
        for owner, (_, fused) in self._ropes.items():
            setattr(owner, _ROPE, fused)
        try:
            yield
        finally:
            for owner, (original, _) in self._ropes.items():
                setattr(owner, _ROPE, original)
            for module, _ in self._forwards:
                module.__dict__.pop("forward", None)


def _norm_forward(module: Any) -> Callable[..., Any]:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))

    def forward(x: Tensor) -> Any:
        if attention.current() is None or eps is None:
            return type(module).forward(module, x)
        return kernels.rms_norm(x, module.weight, eps)

    return forward


def _is_gated_mlp(module: Any) -> bool:
    has_parts = all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
    return has_parts and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _mlp_forward(module: Any, merge: bool) -> Callable[..., Any]:
    linears = [module.gate_proj, module.up_proj]
    merged = MergedLinears(linears) if merge and MergedLinears.possible(linears) else None

    def forward(x: Tensor) -> Any:
        if attention.current() is None:
            return type(module).forward(module, x)
        gate, up = (
            torch.split(merged.together(x), merged.sizes, dim=-1)
            if merged
            else (module.gate_proj(x), module.up_proj(x))
        )
        return module.down_proj(kernels.silu_mul(gate, up))

    return forward


def _agrees(module: Any, fused: Callable[..., Any]) -> bool:
    """Does the fused forward give the module's own result, up to the last bits?"""
    parameter = next(module.parameters())
    norm = getattr(module, "weight", None)
    width = norm.shape[0] if norm is not None else module.gate_proj.in_features
    x = torch.randn(1, 5, width, device=parameter.device, dtype=parameter.dtype)
    with attention.running(attention.StepContext(cache=attention.KVCache([], [], 1), slots=x)):
        ours = fused(x)
    return _close(ours, type(module).forward(module, x))


def _rope_agrees(original: Callable[..., Any], dim: int, parameter: Tensor) -> bool:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=parameter.device, dtype=parameter.dtype)

    q, k = random(1, 5, 3, dim).transpose(1, 2), random(1, 5, 2, dim).transpose(1, 2)
    cos, sin = random(1, 5, dim), random(1, 5, dim)
    return all(_close(a, b) for a, b in zip(kernels.rope(q, k, cos, sin), original(q, k, cos, sin), strict=True))


def _close(ours: Tensor, theirs: Tensor) -> bool:
    tolerance = 1e-5 if ours.dtype == torch.float32 else 2e-2
    return ours.dtype == theirs.dtype and bool(torch.allclose(ours, theirs, atol=tolerance, rtol=tolerance))
