"""Triton kernels for the language-model head on CUDA: log-sum-exp with the entropy, and the gradient, in one pass over the logits each.

They are used where triton is there and their first results agree with plain torch; otherwise the torch code does the same work.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)
CHECKED_ROWS = 4
_state: dict[str, bool] = {}


def usable(raw: torch.Tensor) -> bool:
    """CUDA, triton installed, and not found wanting before."""
    if raw.device.type != "cuda" or raw.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    return _state.get("works", True) and importlib.util.find_spec("triton") is not None


def row_logsumexp(raw: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """[c] logsumexp(raw * factor) and [c] entropy of softmax(raw * factor) of each row, float32; None when the kernels cannot be used."""
    try:
        lse, mean = _launch_forward(raw, factor)
        if "works" not in _state:
            logits = raw[:CHECKED_ROWS].float() * factor[:CHECKED_ROWS, None]
            expected = torch.logsumexp(logits, dim=-1)
            _note(torch.allclose(lse[:CHECKED_ROWS], expected, rtol=1e-4, atol=1e-3), "log-sum-exp")
            expected = torch.linalg.vecdot(torch.softmax(logits, dim=-1), logits)
            _note(torch.allclose(mean[:CHECKED_ROWS], expected, rtol=1e-3, atol=1e-3), "expected logit")
    except Exception as error:  # a compiler that is missing or too new must not end a run: torch does the same
        _give_up(repr(error))
    return (lse, lse - mean) if _state.get("works") else None


def gradient_in_place(
    raw: torch.Tensor,
    factor: torch.Tensor,
    lse: torch.Tensor,
    targets: torch.Tensor,
    grads: torch.Tensor,
    entropy: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor | None:
    """d loss / d raw for logprob gradients ``grads`` [c] at ``targets`` [c], written over ``raw``; None: use torch, ``raw`` is intact.

    ``entropy``: its value and gradient, [c] each, when the loss depends on it.
    """
    try:
        if "gradient" not in _state:
            rows = slice(0, CHECKED_ROWS)
            got = _launch_backward(raw[rows].clone(), factor[rows], lse[rows], targets[rows], grads[rows], None)
            p = torch.exp(raw[rows].float() * factor[rows, None] - lse[rows, None])
            expected = (p * -grads[rows, None]).scatter_add(1, targets[rows, None], grads[rows, None]) * factor[
                rows, None
            ]
            scale = float(expected.abs().max()) or 1.0
            _state["gradient"] = torch.allclose(got.float(), expected, rtol=2e-2, atol=1e-2 * scale)
            _note(_state["gradient"], "gradient")
        if not _state.get("works"):
            return None
        return _launch_backward(raw, factor, lse, targets, grads, entropy)
    except Exception as error:  # as above
        _give_up(repr(error))
        return None


def _note(agrees: bool, what: str) -> None:
    if not agrees:
        _give_up(f"its {what} differs from torch's")
    else:
        _state.setdefault("works", True)


def _give_up(reason: str) -> None:
    logger.warning("the fused head kernels are not used: %s", reason)
    _state["works"] = False


def _launch_forward(raw: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.empty(raw.shape[0], dtype=torch.float32, device=raw.device)
    mean = torch.empty_like(lse)
    _kernels()[0][(raw.shape[0],)](
        raw, raw.stride(0), factor.float().contiguous(), lse, mean, raw.shape[1], BLOCK=4096, num_warps=8
    )
    return lse, mean


def _launch_backward(
    raw: torch.Tensor,
    factor: torch.Tensor,
    lse: torch.Tensor,
    targets: torch.Tensor,
    grads: torch.Tensor,
    entropy: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    value, grad_value = entropy or (lse, lse)  # not read without an entropy
    _kernels()[1][(raw.shape[0],)](
        raw,
        raw.stride(0),
        factor.float().contiguous(),
        lse.float().contiguous(),
        targets.contiguous(),
        grads.float().contiguous(),
        value.float().contiguous(),
        grad_value.float().contiguous(),
        raw.shape[1],
        BLOCK=4096,
        ENTROPY=entropy is not None,
        num_warps=8,
    )
    return raw


@cache
def _kernels() -> tuple[Any, Any]:
    """Compiled late: triton is only there with a GPU build of torch."""
    triton: Any = importlib.import_module("triton")
    module: Any = importlib.import_module("atlaslib.algorithms.head_triton")
    return triton.jit(module.logsumexp_rows), triton.jit(module.gradient_rows)
