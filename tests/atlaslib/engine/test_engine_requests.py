"""What a request may ask for: stops, log-probs, streaming, abort; and what is refused, by name."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from atlaslib.engine import Completion, Engine, EngineConfig, EngineThread, SamplingParams
from atlaslib.engine.text import TextStream
from atlaslib.errors import EngineInputError, EngineStoppedError
from atlaslib.models.zoo import tiny_causal_lm


@pytest.fixture
def engine(tiny_tokenizer: Any) -> Engine:
    return Engine(tiny_causal_lm("llama", vocab_size=len(tiny_tokenizer), eos_token_id=None), tiny_tokenizer)


def one(engine: Engine, prompt: list[int], **settings: Any) -> Completion:
    return engine.generate([prompt], SamplingParams(seed=settings.pop("seed", 1), **settings))[0][0]


PROMPT = [10, 20, 30]


def test_a_stop_token_ends_the_reply_and_is_part_of_it(engine: Engine) -> None:
    free = one(engine, PROMPT, max_tokens=20, ignore_eos=True)
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    cut = one(engine, PROMPT, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    assert cut.token_ids == free.token_ids[: first + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == engine.tokenizer.decode(free.token_ids[:first], skip_special_tokens=True)
    late = one(engine, PROMPT, max_tokens=20, ignore_eos=True, stop_token_ids=free.token_ids[:20], min_tokens=5)
    assert late.token_ids == free.token_ids[:5]


def test_eos_of_the_tokenizer_ends_a_reply_unless_ignored(engine: Engine) -> None:
    eos = engine.tokenizer.eos_token_id
    bias = {eos: 100.0}
    assert one(engine, PROMPT, max_tokens=5, logit_bias=bias).token_ids == [eos]
    ignored = one(engine, PROMPT, max_tokens=5, logit_bias=bias, ignore_eos=True)
    assert ignored.token_ids == [eos] * 5
    assert ignored.finish_reason == "length"


def test_a_stop_string_ends_the_reply_and_is_cut_from_the_text(engine: Engine) -> None:
    free = one(engine, PROMPT, max_tokens=30, ignore_eos=True)
    assert free.text is not None
    stop = free.text[6:9]
    at = free.text.index(stop)
    cut = one(engine, PROMPT, max_tokens=30, ignore_eos=True, stop=[stop])
    assert cut.text == free.text[:at]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    assert stop in engine.tokenizer.decode(cut.token_ids)
    kept = one(engine, PROMPT, max_tokens=30, ignore_eos=True, stop=[stop], include_stop_str_in_output=True)
    assert kept.text == free.text[: at + len(stop)]
    late = one(engine, PROMPT, max_tokens=30, ignore_eos=True, stop=[stop], min_tokens=28)
    assert len(late.token_ids) >= 28


def test_streamed_parts_add_up_to_the_completion(engine: Engine) -> None:
    parts: dict[int, list[Completion]] = {0: [], 1: []}
    params = SamplingParams(n=2, max_tokens=15, seed=3, ignore_eos=True, stop=["zzzz"], logprobs=2)
    request = engine.make_request(PROMPT, params, on_tokens=lambda index, part: parts[index].append(part))
    engine.enqueue(request)
    while not request.future.done():
        engine.step()
    for index, whole in enumerate(request.future.result()):
        assert [token for part in parts[index] for token in part.token_ids] == whole.token_ids
        assert [value for part in parts[index] for value in part.logprobs] == whole.logprobs
        assert "".join(part.text or "" for part in parts[index]) == whole.text
        assert [part.finish_reason for part in parts[index]] == [None] * (len(parts[index]) - 1) + ["length"]
        assert len(parts[index]) == 15
        assert whole.top_logprobs is not None
        assert [len(top) for top in whole.top_logprobs] == [2] * 15


def test_a_callback_that_fails_does_not_disturb_others(engine: Engine) -> None:
    def broken(index: int, part: Completion) -> None:
        raise RuntimeError("client went away")

    request = engine.make_request(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True), on_tokens=broken)
    engine.enqueue(request)
    other = one(engine, PROMPT, max_tokens=5, ignore_eos=True)
    assert len(other.token_ids) == 5
    while not request.future.done():
        engine.step()
    assert len(request.future.result()[0].token_ids) == 5


def test_text_stream_holds_back_half_characters_and_possible_stops() -> None:
    class Bytes:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    text = TextStream(Bytes(), stops=["END"])
    taken = []
    for byte in "aé EN€EEND tail".encode():
        stopped = text.push([byte])
        taken.append(text.take(final=stopped is not None))
        if stopped:
            break
    assert "".join(taken) == "aé EN€E"
    assert text.text == "aé EN€E"
    assert text.stop == "END"
    assert all("\ufffd" not in part for part in taken)
    cut = TextStream(Bytes(), stops=[])
    cut.push([0x61])
    cut.push([0xC3])
    assert cut.take(final=True) == "a\ufffd"


def test_top_and_prompt_log_probs(engine: Engine) -> None:
    reply = one(engine, PROMPT, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2, temperature=0.5)
    tokens = PROMPT + reply.token_ids
    with torch.no_grad():
        logits = engine.model(input_ids=torch.tensor([tokens])).logits[0]
    sampling, raw = torch.log_softmax(logits / 0.5, -1), torch.log_softmax(logits, -1)
    assert reply.top_logprobs is not None
    assert reply.prompt_logprobs is not None
    assert reply.prompt_top_logprobs is not None
    for at, top in enumerate(reply.top_logprobs):
        values, ids = sampling[2 + at].topk(3)
        assert list(top) == ids.tolist()
        torch.testing.assert_close(torch.tensor(list(top.values())), values, atol=1e-4, rtol=0)
        assert reply.raw_logprobs[at] == pytest.approx(float(raw[2 + at, reply.token_ids[at]]), abs=1e-4)
    assert reply.prompt_logprobs[0] == 0.0
    assert reply.prompt_logprobs[1:] == pytest.approx([float(raw[i, PROMPT[i + 1]]) for i in range(2)], abs=1e-4)
    assert [list(top) for top in reply.prompt_top_logprobs[1:]] == [raw[i].topk(2).indices.tolist() for i in range(2)]


def test_a_token_has_one_log_prob_by_itself_and_among_the_likeliest(engine: Engine) -> None:
    for temperature in (0.0, 0.01):
        reply = one(engine, PROMPT, max_tokens=8, ignore_eos=True, logprobs=2, temperature=temperature, seed=1)
        assert reply.top_logprobs is not None
        among = [top[token] for top, token in zip(reply.top_logprobs, reply.token_ids, strict=True)]
        assert among == reply.temperature_logprobs  # to the last bit


def test_max_tokens_zero_reads_the_prompt_only(engine: Engine) -> None:
    reply = one(engine, PROMPT, max_tokens=0, prompt_logprobs=0)
    assert reply.token_ids == []
    assert reply.finish_reason == "length"
    assert reply.prompt_logprobs is not None
    assert len(reply.prompt_logprobs) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature must be a number between 0 and 100, got -1"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"top_p": 0.0}, "top_p must be larger than 0"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n must be a whole number between 1 and 1024, got 0"),
        ({"n": True}, "n must be"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens=9 is larger than max_tokens=3"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 1e9}, "presence_penalty"),
        ({"frequency_penalty": "x"}, "frequency_penalty"),
        ({"stop": [""]}, "stop must hold non-empty strings"),
        ({"stop": 5}, "stop must be a string or a list of strings, got 5"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias of token 5 must be a number"),
        ({"seed": 1.5}, "seed"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_impossible_sampling_values_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineInputError, match=message):
        SamplingParams(**settings)


def test_one_stop_string_and_no_top_k_may_be_written_the_short_way() -> None:
    assert SamplingParams(stop="x", top_k=-1) == SamplingParams(stop=["x"])  # type: ignore[arg-type]


def test_impossible_prompts_are_named(engine: Engine) -> None:
    vocab = engine.runner.vocab_size
    for prompt, message in (
        ([], "the prompt is empty"),
        ([1, vocab], f"prompt: token id {vocab} is outside 0..{vocab - 1}"),
        ([-3], "prompt: token id -3"),
        ([5] * 512, "the prompt has 512 tokens, but prompt and reply together may have max_model_len=512"),
    ):
        with pytest.raises(EngineInputError, match=message):
            engine.generate([prompt])
    with pytest.raises(EngineInputError, match="stop_token_ids: token id 9999"):
        one(engine, PROMPT, stop_token_ids=[9999])
    with pytest.raises(EngineInputError, match="logit_bias: token id -1"):
        one(engine, PROMPT, logit_bias={-1: 1.0})
    with pytest.raises(EngineInputError, match="2 prompts but 1 sampling parameters"):
        engine.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(EngineInputError, match="stop strings need a tokenizer"):
        Engine(engine.model).generate([[1]], SamplingParams(stop=["x"]))


def test_thread_serves_many_callers(engine: Engine) -> None:
    expected = [one(engine, [5 + i], max_tokens=6, ignore_eos=True).token_ids for i in range(6)]
    thread = EngineThread(engine).start()
    results: dict[int, list[int]] = {}

    def call(i: int) -> None:
        results[i] = (
            thread.submit([5 + i], SamplingParams(max_tokens=6, seed=1, ignore_eos=True))
            .result(timeout=30)[0]
            .token_ids
        )

    callers = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [results[i] for i in range(6)] == expected
    scores = thread.submit_score([5, 6, 7]).result(timeout=30)[0].prompt_logprobs
    assert scores is not None
    assert scores == pytest.approx(engine.score([[5, 6, 7]])[0], abs=1e-5)
    with pytest.raises(EngineInputError, match="the prompt is empty"):
        thread.submit([])
    thread.stop()
    assert not thread.alive
    with pytest.raises(EngineStoppedError):
        thread.submit([5])


def test_a_cancelled_future_frees_its_slot(tiny_tokenizer: Any) -> None:
    model = tiny_causal_lm("llama", vocab_size=len(tiny_tokenizer), eos_token_id=None)
    engine = Engine(model, tiny_tokenizer, EngineConfig(max_num_seqs=1))
    thread = EngineThread(engine)
    started = threading.Event()
    endless = thread.submit(
        PROMPT, SamplingParams(max_tokens=500, ignore_eos=True), on_tokens=lambda i, p: started.set()
    )
    queued = thread.submit(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    thread.start()
    assert started.wait(timeout=30)
    endless.cancel()
    assert len(queued.result(timeout=30)[0].token_ids) == 3
    thread.stop()
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert engine.stats()["running"] == 0


def test_stop_fails_what_is_still_open(engine: Engine) -> None:
    thread = EngineThread(engine).start()
    future = thread.submit(PROMPT, SamplingParams(max_tokens=500, ignore_eos=True))
    thread.stop()
    with pytest.raises(EngineStoppedError, match="stopped before the request was done"):
        future.result(timeout=5)


def test_a_failing_step_fails_every_open_request_with_its_reason(engine: Engine) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    engine.runner.prefill = broken  # type: ignore[method-assign]
    thread = EngineThread(engine).start()
    future = thread.submit(PROMPT)
    with pytest.raises(RuntimeError, match="out of memory"):
        future.result(timeout=30)
    with pytest.raises(EngineStoppedError, match="out of memory"):
        thread.submit(PROMPT)
    thread.stop()


def test_abort_returns_what_was_sampled(engine: Engine) -> None:
    request = engine.make_request(PROMPT, SamplingParams(n=2, max_tokens=50, ignore_eos=True))
    engine.enqueue(request)
    for _ in range(5):
        engine.step()
    engine.cancel(request)
    engine.step()
    replies = request.future.result(timeout=1)
    assert [reply.finish_reason for reply in replies] == ["abort", "abort"]
    assert [len(reply.token_ids) for reply in replies] == [5, 5]
    assert engine.blocks.num_free == engine.blocks.num_blocks
