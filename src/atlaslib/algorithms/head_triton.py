# mypy: ignore-errors
# ruff: noqa: N803 (capitals are triton's way to name constants)
"""The bodies of the two head kernels, in triton's dialect; imported only when a GPU build of torch brings triton along."""

import triton.language as tl


def logsumexp_rows(raw, stride, factor, lse, mean, width, BLOCK: tl.constexpr):
    """One program per row: a running maximum, sum and weighted sum over blocks of the vocabulary; ``mean`` is the expected logit."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(factor + row)
    columns = tl.arange(0, BLOCK)
    high = -1.0e30
    total = 0.0
    weighted = 0.0
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        values = tl.load(raw + row * stride + start + columns, mask=inside, other=0.0).to(tl.float32) * scale
        values = tl.where(inside, values, -1.0e30)
        block_high = tl.maximum(high, tl.max(values, 0))
        shrink = tl.exp(high - block_high)
        parts = tl.exp(values - block_high)
        total = total * shrink + tl.sum(parts, 0)
        weighted = weighted * shrink + tl.sum(tl.where(parts > 0.0, parts * values, 0.0), 0)
        high = block_high
    tl.store(lse + row, high + tl.log(total))
    tl.store(mean + row, weighted / total)


def gradient_rows(
    raw,
    stride,
    factor,
    lse,
    targets,
    grads,
    entropy,
    entropy_grads,
    width,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """One program per row, written over the logits: gradient * (one at the target - p), and with ENTROPY - its gradient * p * (log p + entropy)."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(factor + row)
    norm = tl.load(lse + row)
    target = tl.load(targets + row)
    slope = tl.load(grads + row) * scale
    if ENTROPY:
        level = tl.load(entropy + row)
        entropy_slope = tl.load(entropy_grads + row) * scale
    columns = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        place = raw + row * stride + start + columns
        inside = start + columns < width
        log_p = tl.load(place, mask=inside, other=0.0).to(tl.float32) * scale - norm
        p = tl.exp(log_p)
        result = -p * slope
        if ENTROPY:
            result -= tl.where(p > 0.0, entropy_slope * p * (log_p + level), 0.0)
        result = tl.where(start + columns == target, result + slope, result)
        tl.store(place, result.to(raw.dtype.element_ty), mask=inside)
