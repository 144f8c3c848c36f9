"""Full garbage collections wait until the replies are there."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from atlaslib.engine import Engine, EngineConfig, SamplingParams
from atlaslib.engine.garbage import full_collections_later
from atlaslib.models.zoo import tiny_causal_lm


@pytest.fixture
def eager_collector() -> Iterator[list[int]]:
    """A collector that would run in full all the time; the list gets the generation of every collection."""
    before, seen = gc.get_threshold(), list[int]()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    gc.set_threshold(20, 1, 1)
    yield seen
    gc.set_threshold(*before)
    gc.callbacks.remove(note)


def test_no_full_collection_while_replies_are_sampled(eager_collector: list[int]) -> None:
    model = tiny_causal_lm("llama")
    engine = Engine(model, config=EngineConfig(max_num_seqs=8, num_blocks=60, check_model=False))
    eager_collector.clear()
    engine.generate([[3, 4, 5], [6, 7]], SamplingParams(n=4, max_tokens=20))
    engine.score([[3, 4, 5]])
    assert eager_collector
    assert 2 not in eager_collector
    assert gc.get_threshold() == (20, 1, 1)


def test_the_last_block_to_end_gives_the_threshold_back(eager_collector: list[int]) -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with full_collections_later():
            entered.set()
            leave.wait(10)

    @full_collections_later()
    def fails() -> None:
        thread.start()
        assert entered.wait(10)
        raise ValueError("from inside")

    thread = threading.Thread(target=other)
    with pytest.raises(ValueError, match="from inside"):
        fails()
    assert gc.get_threshold()[:2] == (20, 1)
    assert gc.get_threshold()[2] > 1_000_000
    leave.set()
    thread.join(10)
    assert gc.get_threshold() == (20, 1, 1)
