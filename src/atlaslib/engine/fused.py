"""Fewer, larger kernels inside the engine's own forward on CUDA: norm, rotary embedding and gated activation.

The model's modules stay as they are. Within :func:`fused_forward` some of them answer with a fused kernel, only for the
thread that runs an engine step, and only where the kernel was seen to give the module's own result at start.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from atlaslib.engine import attention, kernels

logger = logging.getLogger(__name__)
_ROPE = "apply_rotary_pos_emb"


class FusedModules:
    """Which modules of `model` can be replaced for a forward, found once."""

    def __init__(self, model: Any) -> None:
        self._forwards: list[tuple[Any, Callable[..., Any]]] = []
        self._ropes: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        verdicts: dict[type, bool] = {}
        with torch.no_grad():
            for module in model.modules():
                kind = type(module)
                build = _norm_forward if kind.__name__.endswith("RMSNorm") else _mlp_forward if _is_gated_mlp(module) else None
                if build is not None:
                    if kind not in verdicts:
                        verdicts[kind] = _agrees(module, build(module))
                    if verdicts[kind]:
                        self._forwards.append((module, build(module)))
                owner = sys.modules.get(kind.__module__)
                if kind.__name__.endswith("Attention") and hasattr(owner, _ROPE) and owner not in self._ropes:
                    self._note_rope(owner, module)
        names = sorted(kind.__name__ for kind, good in verdicts.items() if good)
        logger.info("fused kernels for %s and %d rotary functions", ", ".join(names) or "no module", len(self._ropes))

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


def _mlp_forward(module: Any) -> Callable[..., Any]:
    def forward(x: Tensor) -> Any:
        if attention.current() is None:
            return type(module).forward(module, x)
        return module.down_proj(kernels.silu_mul(module.gate_proj(x), module.up_proj(x)))

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
