"""Memory of queued groups: pieces do not overlap, memory is used again, and no more than the spare is kept."""

from __future__ import annotations

import os

from atroposlib.api import slabs as module
from atroposlib.api.slabs import SLAB_BYTES, Slabs, Window


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


def test_what_a_window_keeps_stays_where_it_is_and_the_rest_is_used_again() -> None:
    slabs = Slabs()
    window = Window(slabs, 1000)
    window.view[:5] = b"first"
    kept = [window.keep(1, 5)]  # copied: the first window is ordinary memory
    assert slabs._mappings
    for number in range(3):
        window.view[:200] = bytes([number]) * 200
        place = window.view[100:200]
        kept.append(window.keep(100, 200))
        place[0] = 99  # the very same bytes
    assert [bytes(piece) for piece in kept] == [b"irst", *(bytes([99]) + bytes([n]) * 99 for n in range(3))]
    assert slabs._used == 64 + 3 * 256 + 1024  # the copy, three times 200 bytes, the window of now


def test_a_window_is_not_the_end_once_something_else_was_taken() -> None:
    slabs = Slabs()
    window = Window(slabs, 1000)
    window.keep(0, 1)
    other = slabs.take(500)
    other[:] = b"o" * 500
    window.view[:300] = b"w" * 300
    kept = window.keep(0, 300)
    window.view[:300] = b"x" * 300
    assert (bytes(kept), bytes(other)) == (b"w" * 300, b"o" * 500)


def test_a_window_moves_to_the_next_mapping() -> None:
    slabs = Slabs()
    window = Window(slabs, SLAB_BYTES // 8)
    kept = []
    for number in range(40):
        window.view[:] = bytes([number]) * (SLAB_BYTES // 8)
        kept.append(window.keep(0, SLAB_BYTES // 8))
    assert [(piece[0], piece[-1]) for piece in kept] == [(number, number) for number in range(40)]
    assert len(slabs._mappings) == 6
