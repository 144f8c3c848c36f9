"""Decoder layers compiled for the update, without touching what the sampler runs.

The embedded engine and the trainer run the same modules; the compiled forwards are in place only during the trainer's own passes.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

logger = logging.getLogger(__name__)


class CompiledModules:
    """Swaps compiled forwards in for the length of a block; a model that cannot be compiled runs as it is."""

    def __init__(self, *, backend: Any = "inductor") -> None:
        self._backend = backend
        self._compiled: dict[type, Callable[..., Any]] = {}
        self._found: weakref.WeakKeyDictionary[Any, tuple[list[Any], list[Any]]] = weakref.WeakKeyDictionary()
        self.works = True

    @contextlib.contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """The decoder layers and norms of ``model`` run compiled inside this block."""
        if model not in self._found:
            checkpointed = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
            self._found[model] = list(_blocks(model)), checkpointed
        blocks, checkpointed = self._found[model]
        # gradient checkpointing runs forwards again outside this block; they must be the same ones
        active = self.works and not any(module.gradient_checkpointing for module in checkpointed)
        swapped = [module for module in blocks if "forward" not in module.__dict__] if active else []
        for module in swapped:
            module.forward = self._forward_of(type(module)).__get__(module)
        try:
            yield
        finally:
            for module in swapped:
                module.__dict__.pop("forward", None)

    def _forward_of(self, kind: type) -> Callable[..., Any]:
        """One compiled function serves all layers of a model, first for the sizes it sees, from the second sizes on for any."""
        if kind not in self._compiled:
            plain: Callable[..., Any] = kind.forward  # type: ignore[attr-defined]
            compiled = torch.compile(plain, backend=self._backend)

            def forward(*args: Any, **kwargs: Any) -> Any:
                if not self.works:
                    return plain(*args, **kwargs)
                try:
                    return compiled(*args, **kwargs)
                except torch._dynamo.exc.TorchDynamoException as error:
                    logger.warning("%s is not compiled for the update: %r", kind.__name__, error)
                    self.works = False
                    return plain(*args, **kwargs)

            self._compiled[kind] = forward
        return self._compiled[kind]


def _blocks(module: Any) -> Iterator[Any]:
    """The outermost modules below ``module`` that can be compiled whole."""
    for child in module.children():
        if _can_compile(child):
            yield child
        else:
            yield from _blocks(child)


def _can_compile(module: Any) -> bool:
    """A norm, or a decoder layer or MLP made of plain linear layers and norms: no adapters, quantised weights or routed experts inside."""
    name = type(module).__name__
    if _is_norm(module):
        return True
    if not name.endswith(("DecoderLayer", "MLP")):
        return False
    if any(hasattr(part, "base_layer") for part in module.modules()):
        return False
    holders = (part for part in module.modules() if next(part.parameters(recurse=False), None) is not None)
    return all(type(part) is torch.nn.Linear or _is_norm(part) for part in holders)


def _is_norm(module: Any) -> bool:
    return type(module).__name__.endswith("RMSNorm") or type(module) is torch.nn.LayerNorm
