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


def length_of(sizes: Sizes) -> int:
    return 3 * sizes[0] + 4 * sizes[1] + sizes[2]


def parts_of(reading: Any, sizes: Sizes) -> tuple[Any, Any, Any]:
    """Views of its parts, an array's or a tensor's: [3, T], [tiles, 4], [rows to keep]."""
    rows, tiles, kept = sizes
    end = 3 * rows + 4 * tiles
    return reading[: 3 * rows].reshape(3, rows), reading[3 * rows : end].reshape(tiles, 4), reading[end : end + kept]


def laid_out(packed: Array, tiles: Array, keep: Array, sizes: Sizes) -> Array:
    """`reading` of these sizes; what is left over is rows without a place in the cache, empty tiles and row 0."""
    reading = np.zeros(length_of(sizes), dtype=np.int64)
    tokens, all_tiles, kept = parts_of(reading, sizes)
    tokens[:, : packed.shape[1]] = packed
    tokens[2, packed.shape[1] :] = -1
    all_tiles[: len(tiles)] = tiles
    kept[: len(keep)] = keep
    return reading
