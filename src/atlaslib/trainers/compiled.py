"""Norms and feed-forward blocks compiled for the update, without touching what the sampler runs.

The embedded engine and the trainer run the same modules; the compiled forwards are in place only during the trainer's own passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


class CompiledModules:
    """Swaps compiled forwards in for the length of a block."""

    def __init__(self, *, backend: str = "inductor") -> None:
        self._backend = backend
        self._compiled: dict[type, Callable[..., Any]] = {}

    @contextlib.contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """The norms and MLPs of ``model`` run compiled inside this block."""
        swapped = []
        for module in model.modules():
            if _is_pointwise_block(module) and "forward" not in module.__dict__:
                kind = type(module)
                if kind not in self._compiled:
                    self._compiled[kind] = torch.compile(kind.forward, dynamic=True, backend=self._backend)
                module.forward = self._compiled[kind].__get__(module)
                swapped.append(module)
        try:
            yield
        finally:
            for module in swapped:
                module.__dict__.pop("forward", None)


def _is_pointwise_block(module: Any) -> bool:
    """A norm, or a plain MLP made of linear layers and an activation (no adapters inside)."""
    name = type(module).__name__
    if name.endswith("RMSNorm"):
        return True
    plain = all(
        type(child) is torch.nn.Linear or not list(child.parameters(recurse=False)) for child in module.children()
    )
    return name.endswith("MLP") and plain
