# mypy: ignore-errors
"""The bodies of the two head kernels, in triton's dialect; imported only when a GPU build of torch brings triton along."""

import triton.language as tl


def logsumexp_rows(raw, stride, factor, lse, width, BLOCK: tl.constexpr):  # noqa: N803 (triton's way to name constants)
    """One program per row: a running maximum and sum over blocks of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(factor + row)
    columns = tl.arange(0, BLOCK)
    high = -1.0e30
    total = 0.0
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        values = tl.load(raw + row * stride + start + columns, mask=inside, other=0.0).to(tl.float32) * scale
        values = tl.where(inside, values, -1.0e30)
        block_high = tl.maximum(high, tl.max(values, 0))
        total = total * tl.exp(high - block_high) + tl.sum(tl.exp(values - block_high), 0)
        high = block_high
    tl.store(lse + row, high + tl.log(total))


def gradient_rows(raw, stride, factor, lse, targets, grads, width, BLOCK: tl.constexpr):  # noqa: N803
    """One program per row: (one at the target - probability) * gradient * factor, written over the logits."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(factor + row)
    norm = tl.load(lse + row)
    target = tl.load(targets + row)
    slope = tl.load(grads + row) * scale
    columns = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        place = raw + row * stride + start + columns
        inside = start + columns < width
        values = tl.load(place, mask=inside, other=0.0).to(tl.float32) * scale
        result = -tl.exp(values - norm) * slope
        result = tl.where(start + columns == target, result + slope, result)
        tl.store(place, result.to(raw.dtype.element_ty), mask=inside)
