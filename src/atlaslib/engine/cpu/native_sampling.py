"""The compiled choice of tokens (`decode.c`) for plain rows on CPU: temperature or greedy, nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from atlaslib.engine.cpu import native_decode


def sample_rows(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, counters: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Token ids, log-probs at the temperature, log-probs at temperature 1, [R] each; None when torch has to do it."""
    rows, vocab = logits.shape
    plain = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous()
    library = native_decode.library() if plain else None
    if library is None:
        return None
    tokens = torch.empty(rows, dtype=torch.int64)
    logprobs, raw = torch.empty(rows), torch.empty(rows)
    weights, chunks = torch.empty(vocab), torch.empty(vocab // 256 + 1, dtype=torch.float64)
    columns = (logits, temperatures.contiguous(), seeds.contiguous(), counters.contiguous())
    results = (tokens, logprobs, raw, weights, chunks)
    library.atropos_sample(rows, vocab, *(tensor.data_ptr() for tensor in (*columns, *results)))
    return tokens, logprobs, raw
