"""The compiled attention of exact mode (`decode.c`) on CPU: every query by itself, the keys in order."""

from __future__ import annotations

import torch
from torch import Tensor

from atlaslib.engine.cpu import native_decode


def attend(
    query: Tensor,  # [N, rows, dim]
    key: Tensor,  # [N, keys, dim]
    value: Tensor,  # [N, keys, value_dim]
    allowed: Tensor,  # bool, broadcasts to [N, rows, keys]; the keys a row may see follow one another
    scale: float,
    softcap: float | None,
) -> Tensor | None:
    """[N, rows, value_dim]; None when torch has to do it."""
    plain = query.device.type == "cpu" and query.dtype == torch.float32
    library = native_decode.library() if plain else None
    if library is None:
        return None
    (count, rows, dim), (keys, value_dim) = query.shape, value.shape[1:]
    first = allowed.byte().argmax(-1)
    ranges = torch.stack([first, first + allowed.sum(-1)], dim=-1).expand(count, rows, 2).contiguous()
    inputs = (query.contiguous(), key.contiguous(), value.contiguous(), ranges)
    scores, out = torch.empty(keys), torch.empty(count, rows, value_dim)
    places = (tensor.data_ptr() for tensor in (*inputs, scores, out))
    library.atropos_attend(count, rows, keys, dim, value_dim, scale, softcap or 0.0, *places)
    return out
