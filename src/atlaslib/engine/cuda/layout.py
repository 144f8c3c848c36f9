"""What the CUDA runner sends to the device and which sizes it captures; numpy only.

`reading`, the input of a prefill step, is one int64 array: token ids, positions and cache slots, [T] each, then tiles
[tiles, 4] as `paged_attention.paged_prefill` reads them (first row, rows, position of the first, slot), then the rows whose logits are wanted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atlaslib.engine.attention import Span

Array = np.ndarray[Any, Any]
Sizes = tuple[int, int, int]  # of `reading`: tokens, tiles, rows to keep


def batch_buckets(largest: int) -> list[int]:
    """1, 2, 4, 8, 16, then steps of 16 to 128, 32 to 256 and 128 beyond; the largest is `largest` itself."""
    sizes = [1, 2, 4, 8, *range(16, 129, 16), *range(160, 257, 32), *range(384, max(largest, 256) + 1, 128)]
    return [size for size in sizes if size < largest] + [largest]


def prefill_buckets(limit: int) -> list[int]:
    """64, 128, 256, then steps of 128 to 512, of 256 to 8192 and of 1024 beyond."""
    sizes = (64, 128, 256, 384, *range(512, 8192, 256), *range(8192, limit + 1, 1024))
    return [size for size in sizes if size <= limit]


def captured_sizes(bucket: int, tile_rows: int) -> Sizes:
    """What a captured prefill of so many tokens has room for."""
    prompts = min(max(32, bucket // 32), 256)
    return bucket, bucket // tile_rows + prompts, prompts


def tiles_of(spans: list[Span], rows: int) -> Array:
    """The queries of each span in tiles of at most `rows`; those with the most keys first, so that none ends late."""
    tiles = [
        (span.row + done, min(rows, span.count - done), span.start + done, span.slot)
        for span in spans
        for done in range(0, span.count, rows)
    ]
    array = np.array(tiles, dtype=np.int64)
    return array[np.argsort(-array[:, 2], kind="stable")]


def laid_out(packed: Array, tiles: Array, keep: Array, sizes: Sizes) -> Array:
    """`reading` of these sizes; what is left over is rows without a place in the cache, empty tiles and row 0."""
    rows, num_tiles, kept = sizes
    reading = np.zeros(3 * rows + 4 * num_tiles + kept, dtype=np.int64)
    tokens = reading[: 3 * rows].reshape(3, rows)
    tokens[:, : packed.shape[1]] = packed
    tokens[2, packed.shape[1] :] = -1
    reading[3 * rows :][: tiles.size] = tiles.reshape(-1)
    reading[3 * rows + 4 * num_tiles :][: len(keep)] = keep
    return reading
