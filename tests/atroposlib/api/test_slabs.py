"""Memory of queued groups: pieces do not overlap, memory is used again, and no more than the spare is kept."""

from __future__ import annotations

import os

from atroposlib.api import slabs as module
from atroposlib.api.slabs import SLAB_BYTES, Slabs


def test_pieces_lie_apart_and_keep_what_is_written() -> None:
    slabs = Slabs()
    written = [os.urandom(size) for size in (1, 63, 64, 65, 100_000, SLAB_BYTES // 4, SLAB_BYTES // 4 + 1, 0, 7)] * 5
    pieces = []
    for data in written:
        piece = slabs.take(len(data))
        piece[:] = data
        pieces.append(piece)
    assert [bytes(piece) for piece in pieces] == written


def test_join_puts_parts_together() -> None:
    assert bytes(Slabs().join([b"ab", memoryview(b"cde"), b"", bytearray(b"f")])) == b"abcdef"


def test_a_mapping_is_used_again_only_when_its_last_piece_is_gone() -> None:
    slabs = Slabs()
    half = SLAB_BYTES // 4
    first = [slabs.take(half) for _ in range(4)]  # one mapping
    first[3][:] = b"x" * half
    second = [slabs.take(half) for _ in range(4)]
    assert len(slabs._mappings) == 2
    kept = first[3][10:20]  # a piece of a piece counts too
    del first
    third = [slabs.take(half) for _ in range(4)]
    assert len(slabs._mappings) == 3
    assert bytes(kept) == b"x" * 10
    del kept, second
    fourth = [slabs.take(half) for _ in range(8)]
    assert len(slabs._mappings) == 3
    assert len(third) + len(fourth) == 12


def test_what_is_empty_goes_back_but_for_the_spare(monkeypatch) -> None:
    monkeypatch.setattr(module, "SPARE_BYTES", 2 * SLAB_BYTES)
    slabs = Slabs()
    pieces = [slabs.take(SLAB_BYTES // 4) for _ in range(4 * 6)]
    slabs.trim()
    assert len(slabs._mappings) == 6
    del pieces[:20]
    slabs.trim()
    assert len(slabs._mappings) == 3  # two spare, one in use
