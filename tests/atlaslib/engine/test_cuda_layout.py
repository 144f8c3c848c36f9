"""The arrays of CUDA prefill steps and the sizes that are captured."""

from __future__ import annotations

import numpy as np
import torch

from atlaslib.engine.attention import Span
from atlaslib.engine.config import EngineConfig
from atlaslib.engine.cuda.layout import batch_buckets, captured_sizes, laid_out, prefill_buckets, tiles_of
from atlaslib.engine.memory import captured_tokens
from atlaslib.models.tiny import tiny_llama

NO_BLOCKS = np.zeros(0, dtype=np.int64)


def test_buckets_grow_in_steps_and_end_at_the_limit() -> None:
    assert batch_buckets(5) == [1, 2, 4, 5]
    assert batch_buckets(40) == [1, 2, 4, 8, 16, 32, 40]
    assert batch_buckets(600)[-4:] == [256, 384, 512, 600]
    assert prefill_buckets(1100) == [64, 128, 256, 384, 512, 768, 1024]
    assert prefill_buckets(0) == []
    assert len(prefill_buckets(8192)) == 35
    assert prefill_buckets(16384)[-3:] == [14336, 15360, 16384]


def test_a_captured_size_has_room_for_prompts_of_32_tokens_each() -> None:
    assert captured_sizes(64, 128) == (64, 32, 32)
    assert captured_sizes(2048, 128) == (2048, 16 + 64, 64)
    assert captured_sizes(16384, 128) == (16384, 128 + 256, 256)


def test_tiles_cut_every_span_and_the_longest_come_first() -> None:
    spans = [Span(0, 3, 0, 7, NO_BLOCKS), Span(3, 10, 20, 2, NO_BLOCKS)]
    assert tiles_of(spans, 4).tolist() == [[11, 2, 28, 2], [7, 4, 24, 2], [3, 4, 20, 2], [0, 3, 0, 7]]


def test_what_a_captured_prefill_has_no_tokens_for_touches_nothing() -> None:
    packed = np.array([[5, 6, 7], [0, 1, 2], [32, 33, 34]])
    tiles, keep = np.array([[0, 3, 0, 1]]), np.array([2])
    reading = laid_out(packed, tiles, keep, (5, 3, 2))
    ids, positions, slots = reading[:15].reshape(3, 5).tolist()
    assert (ids, positions, slots) == ([5, 6, 7, 0, 0], [0, 1, 2, 0, 0], [32, 33, 34, -1, -1])
    assert reading[15:27].reshape(3, 4).tolist() == [[0, 3, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert reading[27:].tolist() == [2, 0]
    assert laid_out(packed, tiles, keep, (3, 1, 1)).tolist() == [*packed.reshape(-1), 0, 3, 0, 1, 2]


def test_no_more_prompt_tokens_are_captured_than_can_come_or_pay() -> None:
    model = tiny_llama()
    assert captured_tokens(model, EngineConfig(), 512) == 16384
    assert captured_tokens(model, EngineConfig(max_num_seqs=4), 512) == 2048
    assert captured_tokens(model, EngineConfig(max_prefill_tokens=100), 512) == 100
    assert captured_tokens(model, EngineConfig(exact=True), 512) == 0
    assert captured_tokens(model, EngineConfig(cuda_graphs=False), 512) == 0
    with torch.device("meta"):
        large = torch.nn.Linear(100_000, 76_000)  # 7.6 billion parameters
    assert captured_tokens(large, EngineConfig(), 4096) == 1644
