"""Blocks, prefix sharing, forks, chunked prefill, queueing and preemption: nothing lost, nothing leaked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from atlaslib.engine import Engine, EngineConfig, SamplingParams
from atlaslib.engine.block_manager import ROOT, BlockManager
from atlaslib.errors import ConfigError, EngineMemoryError
from atlaslib.models.zoo import tiny_causal_lm


def test_blocks_are_handed_out_once_and_come_back() -> None:
    blocks = BlockManager(4, 2)
    taken = [blocks.allocate() for _ in range(4)]
    assert sorted(taken) == [0, 1, 2, 3]
    assert blocks.num_free == 0
    blocks.release(taken[:2])
    assert blocks.num_free == 2
    assert sorted([blocks.allocate(), blocks.allocate()]) == sorted(taken[:2])


def test_a_shared_block_is_free_when_its_last_user_leaves() -> None:
    blocks = BlockManager(2, 2)
    block = blocks.allocate()
    blocks.share(block)
    blocks.release([block])
    assert blocks.users(block) == 1
    assert blocks.num_free == 1
    blocks.release([block])
    assert blocks.num_free == 2


def ids(tokens: list[int]) -> np.ndarray[Any, Any]:
    return np.array(tokens, dtype=np.int64)


def test_prefix_tree_finds_whole_blocks_with_the_same_beginning_only() -> None:
    blocks = BlockManager(6, 2)
    first, second = blocks.allocate(), blocks.allocate()
    node = blocks.remember(first, ROOT, ids([1, 2]))
    blocks.remember(second, node, ids([3, 4]))
    assert blocks.find_prefix(ids([1, 2, 3, 4, 5]), limit=5)[0] == [first, second]
    assert blocks.find_prefix(ids([1, 2, 3, 4]), limit=3)[0] == [first]  # the last token must be run
    assert blocks.find_prefix(ids([9, 2, 3, 4, 5]), limit=5)[0] == []
    assert blocks.find_prefix(ids([3, 4, 5]), limit=3)[0] == []  # same tokens, other beginning
    blocks.release([first, second])
    assert blocks.find_prefix(ids([1, 2, 3, 4, 5]), limit=5)[0] == [first, second]  # findable until handed out again
    taken = [blocks.allocate() for _ in range(5)]
    assert taken[-1] == second  # the end of a sequence goes before its beginning
    assert blocks.find_prefix(ids([1, 2, 3, 4, 5]), limit=5)[0] == [first]
    blocks.forget_all()
    assert blocks.find_prefix(ids([1, 2, 3, 4, 5]), limit=5)[0] == []


def replies_of(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [reply.token_ids for group in engine.generate(prompts, params) for reply in group]


PROMPTS = [[3 + i, 7, 20 + i, 5] * (1 + i) for i in range(5)]
PARAMS = SamplingParams(n=3, max_tokens=20, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return replies_of(Engine(tiny_causal_lm("llama")), PROMPTS, PARAMS)


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(block_size=1),
        EngineConfig(block_size=3, max_prefill_tokens=1),
        EngineConfig(block_size=8, max_prefill_tokens=7),
        EngineConfig(max_num_seqs=1),
        EngineConfig(max_num_seqs=4, prefix_cache=False),
        EngineConfig(block_size=4, num_blocks=12, max_model_len=48),
        EngineConfig(block_size=4, num_blocks=21, max_num_seqs=6),
    ],
    ids=["block of one", "chunks of one", "chunks", "one slot", "no prefix cache", "tiny cache", "small cache"],
)
def test_replies_do_not_depend_on_blocks_chunks_slots_or_preemption(
    config: EngineConfig, expected: list[list[int]]
) -> None:
    engine = Engine(tiny_causal_lm("llama"), config=config)
    assert replies_of(engine, PROMPTS, PARAMS) == expected
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == stats["prefilling"] == 0
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert all(users == 0 for users in engine.blocks._users)
    if config.num_blocks is not None:
        assert stats["preemptions"] > 0


def test_preemption_keeps_log_probs_and_versions(expected: list[list[int]]) -> None:
    model = tiny_causal_lm("llama")
    roomy = Engine(model).generate(PROMPTS, PARAMS)
    tight = Engine(model, config=EngineConfig(block_size=4, num_blocks=14)).generate(PROMPTS, PARAMS)
    for group, other in zip(roomy, tight, strict=True):
        for a, b in zip(group, other, strict=True):
            torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-4, rtol=0)
            assert len(b.versions) == 20


def test_the_samples_of_a_group_read_the_prompt_once() -> None:
    engine = Engine(tiny_causal_lm("llama"), config=EngineConfig(check_model=False))
    read: list[int] = []
    original = engine.runner.prefill
    engine.runner.prefill = lambda plan, table: (
        read.append(sum(c.end - c.start for c in plan.chunks)),
        original(plan, table),
    )[1]  # type: ignore[method-assign,func-returns-value]
    prompt = list(range(10, 60))
    engine.generate([prompt], SamplingParams(n=8, max_tokens=4, ignore_eos=True))
    assert sum(read) == 50
    engine.generate([[*prompt, 3, 4]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert sum(read) == 50 + 4  # 48 of 52 tokens were in the prefix cache


def test_separate_requests_with_the_same_beginning_read_it_once() -> None:
    engine = Engine(tiny_causal_lm("llama"), config=EngineConfig(check_model=False, block_size=8))
    read: list[int] = []
    original = engine.runner.prefill
    engine.runner.prefill = lambda plan, table: (
        read.append(sum(c.end - c.start for c in plan.chunks)),
        original(plan, table),
    )[1]  # type: ignore[method-assign,func-returns-value]
    system = list(range(10, 50))
    prompts = [[*system, 100 + i] for i in range(6)] + [system] * 3 + [[7, 8, 9]]
    replies = engine.generate(prompts, SamplingParams(max_tokens=5, seed=1, ignore_eos=True))
    assert (
        sum(read) == 41 + 5 * 1 + 3 * 8 + 3
    )  # the last token of a prompt is always run, so `system` reads its last block
    alone = Engine(engine.model, config=EngineConfig(prefix_cache=False))
    for prompt, group in zip(prompts, replies, strict=True):
        expected = alone.generate([prompt], SamplingParams(max_tokens=5, seed=1, ignore_eos=True))[0][0]
        assert group[0].token_ids == expected.token_ids


def test_scoring_keeps_the_logits_of_a_bounded_number_of_tokens() -> None:
    model = tiny_causal_lm("llama")
    engine = Engine(model, config=EngineConfig(check_model=False))
    whole = engine.score([[5 + i for i in range(60)], [7] * 50])
    engine.scheduler.max_scored_tokens = 16
    widest: list[int] = []
    original = engine.runner.forward
    engine.runner.forward = lambda ids, positions, context, keep: (
        widest.append(len(keep)),
        original(ids, positions, context, keep),
    )[1]  # type: ignore[method-assign,func-returns-value]
    for a, b in zip(whole, engine.score([[5 + i for i in range(60)], [7] * 50]), strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    assert max(widest) == 16


def test_next_turn_finds_the_reply_in_the_cache() -> None:
    engine = Engine(tiny_causal_lm("llama"), config=EngineConfig(block_size=4))
    prompt = list(range(10, 22))
    reply = engine.generate([prompt], SamplingParams(max_tokens=9, ignore_eos=True))[0][0]
    before = engine.blocks.hits
    turn = [*prompt, *reply.token_ids, 30, 31]
    again = engine.generate([turn], SamplingParams(max_tokens=5, seed=1, ignore_eos=True))[0][0]
    assert engine.blocks.hits - before == 20  # five whole blocks of 21 - 1 computed tokens
    fresh = Engine(engine.model, config=EngineConfig(prefix_cache=False))
    assert (
        fresh.generate([turn], SamplingParams(max_tokens=5, seed=1, ignore_eos=True))[0][0].token_ids == again.token_ids
    )


def test_requests_join_and_leave_at_every_step() -> None:
    engine = Engine(tiny_causal_lm("llama"), config=EngineConfig(max_num_seqs=4))
    requests = [engine.make_request([3 + i], SamplingParams(max_tokens=i + 1, ignore_eos=True)) for i in range(8)]
    for request in requests:
        engine.enqueue(request)
    done_after: dict[int, int] = {}
    for step in range(100):
        if not engine.step():
            break
        for index, request in enumerate(requests):
            if request.future.done():
                done_after.setdefault(index, step)
    assert len(done_after) == 8
    assert [done_after[i] for i in range(4)] == sorted(done_after[i] for i in range(4))
    assert done_after[4] < done_after[3] + 6  # a waiting one took the place of a finished one


def test_a_long_prompt_does_not_stall_running_replies() -> None:
    engine = Engine(tiny_causal_lm("llama"), config=EngineConfig(max_prefill_tokens=8))
    short = engine.make_request([5, 6], SamplingParams(max_tokens=6, ignore_eos=True))
    long = engine.make_request(list(range(3, 203)), SamplingParams(max_tokens=1, ignore_eos=True))
    engine.enqueue(short)
    engine.step()
    engine.enqueue(long)
    while not short.future.done():
        engine.step()
    assert not long.future.done()
    while not long.future.done():
        engine.step()
    assert len(long.future.result()[0].token_ids) == 1


def test_a_cache_without_room_says_so() -> None:
    with pytest.raises(
        EngineMemoryError, match=r"not even one cache block of 16 KiB fits into 5000 B|not even one cache block"
    ):
        Engine(tiny_causal_lm("llama"), config=EngineConfig(cpu_cache_bytes=5000))


def test_more_blocks_than_the_machine_has_memory_says_how_many_fit() -> None:
    with pytest.raises(EngineMemoryError, match=r"num_blocks=1000000000 needs .* GiB.*at most num_blocks=\d+ fits"):
        Engine(tiny_causal_lm("llama"), config=EngineConfig(num_blocks=10**9))


def test_a_very_short_max_model_len() -> None:
    engine = Engine(tiny_causal_lm("llama"), config=EngineConfig(max_model_len=2))
    assert len(engine.generate([[5]], SamplingParams(max_tokens=9, ignore_eos=True))[0][0].token_ids) == 1


def test_max_model_len_shrinks_to_what_the_cache_holds() -> None:
    engine = Engine(tiny_causal_lm("llama"), config=EngineConfig(block_size=4, num_blocks=10))
    assert engine.max_model_len == 40
    reply = engine.generate([[5] * 30], SamplingParams(max_tokens=100, ignore_eos=True))[0][0]
    assert len(reply.token_ids) == 10
    assert reply.finish_reason == "length"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("block_size", -1),
        ("memory_fraction", 1.5),
        ("update_mode", "drian"),
        ("cached_keys", "x"),
        ("num_blocks", 2.5),
        ("cpu_cache_bytes", "2g"),
        ("exact", "no"),
        ("seed", -1),
    ],
)
def test_impossible_settings_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [0, 3])
def test_steps_that_run_ahead_change_nothing(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: results are written down late, and several decode steps are in flight when a prefill is launched."""
    from atlaslib.engine.model_runner import ModelRunner

    model = tiny_causal_lm("llama")
    prompts = [[3 + i, 8, 20 + i] * (1 + i % 4) for i in range(20)]
    stops = list(range(100, 130))
    params = [SamplingParams(n=1 + i % 2, max_tokens=3 + 2 * i, seed=i, stop_token_ids=stops) for i in range(20)]
    config = EngineConfig(max_num_seqs=8, num_blocks=60, exact=True, check_model=False)
    plain = Engine(model, config=config).generate(prompts, params)
    monkeypatch.setattr(ModelRunner, "runs_ahead", True)
    monkeypatch.setattr(ModelRunner, "decode_ahead", lambda self, batch: ahead)
    monkeypatch.setattr(ModelRunner, "admit_share", 4)
    engine = Engine(model, config=config)
    most = 0
    decode_step = engine.runner.decode_step

    def counted(*args: Any) -> Any:
        nonlocal most
        most = max(most, len(engine._in_flight))
        return decode_step(*args)

    monkeypatch.setattr(engine.runner, "decode_step", counted)
    replies = engine.generate(prompts, params)
    for before, after in zip(plain, replies, strict=True):
        assert [reply.token_ids for reply in before] == [reply.token_ids for reply in after]
        assert [reply.logprobs for reply in before] == [reply.logprobs for reply in after]
    assert {reply.finish_reason for group in replies for reply in group} == {"stop", "length"}
    # the first tokens of the prefill before and the step after it, those ahead of a prefill, and the first tokens it sampled
    assert most == 2 + ahead + 1
    assert engine.stats()["running"] == 0
    assert engine.stats()["cache_used"] == 0.0
