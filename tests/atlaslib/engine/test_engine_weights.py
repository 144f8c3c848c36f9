"""Living weights: versions, drain and in-flight updates, and no token from half-written weights."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from atlaslib.engine import Engine, EngineConfig, EngineThread, SamplingParams
from atlaslib.errors import EngineInputError
from atlaslib.models.zoo import tiny_causal_lm


def scale_weights(model: Any, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def logprobs_of(model: Any, prompt: list[int], reply: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(reply)[:, None])[:, 0]


def test_an_optimizer_step_is_the_next_version_of_the_same_module() -> None:
    model = tiny_causal_lm("llama")
    engine = Engine(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    prompt = [5, 6, 7, 8]
    for version in range(3):
        assert engine.version == version
        reply = engine.generate([prompt], SamplingParams(max_tokens=6, seed=1, ignore_eos=True))[0][0]
        assert reply.versions == [version] * 6
        assert reply.policy_versions == [version]
        torch.testing.assert_close(
            torch.tensor(reply.logprobs), logprobs_of(model, prompt, reply.token_ids), atol=1e-4, rtol=0
        )
        model(input_ids=torch.tensor([prompt]), labels=torch.tensor([prompt])).loss.backward()
        with engine.updating():
            optimizer.step()
        optimizer.zero_grad()


def test_the_prefix_cache_does_not_survive_an_update() -> None:
    model = tiny_causal_lm("llama")
    engine = Engine(model, config=EngineConfig(block_size=4))
    prompt = list(range(5, 30))
    engine.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True))
    with engine.updating():
        scale_weights(model, 1.2)
    reply = engine.generate([prompt], SamplingParams(max_tokens=6, ignore_eos=True))[0][0]
    torch.testing.assert_close(
        torch.tensor(reply.logprobs), logprobs_of(model, prompt, reply.token_ids), atol=1e-4, rtol=0
    )


def run_some(engine: Engine, steps: int, params: SamplingParams, prompt: list[int]) -> Any:
    request = engine.make_request(prompt, params)
    engine.enqueue(request)
    for _ in range(steps):
        engine.step()
    return request


def finish(engine: Engine, request: Any) -> Any:
    while not request.future.done():
        engine.step()
    return request.future.result()[0]


PROMPT = [9, 4, 17]
PARAMS = SamplingParams(max_tokens=10, seed=2, ignore_eos=True)


def test_drain_lets_running_replies_end_first_and_holds_waiting_ones_back() -> None:
    model = tiny_causal_lm("llama")
    engine = Engine(model, config=EngineConfig(update_mode="drain", max_num_seqs=1))
    running = run_some(engine, 3, PARAMS, PROMPT)
    waiting = engine.make_request([8, 8], PARAMS)
    engine.enqueue(waiting)
    with engine.updating():
        assert running.future.done()
        assert not waiting.future.done()
        scale_weights(model, 1.1)
    assert running.future.result()[0].versions == [0] * 10
    assert finish(engine, waiting).versions == [1] * 10


@pytest.mark.parametrize("cached_keys", ["keep", "recompute"])
def test_in_flight_replies_continue_on_new_weights_with_marked_tokens(cached_keys: str) -> None:
    model = tiny_causal_lm("llama")
    engine = Engine(model, config=EngineConfig(update_mode="in_flight", cached_keys=cached_keys, block_size=4))
    request = run_some(engine, 4, PARAMS, PROMPT)
    old = [parameter.detach().clone() for parameter in model.parameters()]
    with engine.updating():
        assert not request.future.done()
        scale_weights(model, 1.3)
    reply = finish(engine, request)
    assert reply.versions == [0] * 4 + [1] * 6
    assert reply.policy_versions == [0, 1]
    new = logprobs_of(model, PROMPT, reply.token_ids)[4:]
    gap = float((torch.tensor(reply.logprobs[4:]) - new).abs().max())
    if cached_keys == "recompute":
        assert gap < 1e-4  # the later tokens come from the new weights alone
    else:
        assert gap > 1e-4  # they look back at keys of the old ones
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), old, strict=True):
            parameter.copy_(value)
    torch.testing.assert_close(
        torch.tensor(reply.logprobs[:4]), logprobs_of(model, PROMPT, reply.token_ids)[:4], atol=1e-4, rtol=0
    )


def test_kept_keys_of_old_weights_never_serve_a_new_prompt() -> None:
    model = tiny_causal_lm("llama")
    engine = Engine(model, config=EngineConfig(update_mode="in_flight", block_size=4))
    prompt = list(range(5, 22))
    request = run_some(engine, 3, PARAMS, prompt)
    with engine.updating():
        scale_weights(model, 1.3)
    finish(engine, request)
    reply = engine.generate([prompt], PARAMS)[0][0]
    torch.testing.assert_close(
        torch.tensor(reply.logprobs), logprobs_of(model, prompt, reply.token_ids), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("mode", ["drain", "in_flight"])
def test_no_step_runs_while_the_weights_are_being_written(mode: str) -> None:
    model = tiny_causal_lm("llama")
    engine = Engine(model, config=EngineConfig(update_mode=mode, max_num_seqs=4))
    thread = EngineThread(engine).start()
    seen: list[bool] = []
    writing = threading.Event()
    original = model.forward
    model.forward = lambda *args, **kwargs: (seen.append(writing.is_set()), original(*args, **kwargs))[1]
    futures = [thread.submit([5 + i], SamplingParams(max_tokens=40, ignore_eos=True)) for i in range(12)]
    for _ in range(3):
        time.sleep(0.03)
        with engine.updating():
            writing.set()
            scale_weights(model, 0.99)
            time.sleep(0.03)
            writing.clear()
    versions = [future.result(timeout=60)[0].versions for future in futures]
    thread.stop()
    assert seen
    assert not any(seen)
    assert engine.version == 3
    assert all(v == sorted(v) for v in versions)
    if mode == "drain":
        assert all(len(set(v)) == 1 for v in versions)


def test_exclusive_keeps_other_threads_out_and_lets_its_own_sample() -> None:
    engine = Engine(tiny_causal_lm("llama"))
    thread = EngineThread(engine).start()
    future = thread.submit([5], SamplingParams(max_tokens=400, ignore_eos=True))

    def claim() -> None:
        with engine.exclusive():
            pass

    waiting = threading.Thread(target=claim)
    with engine.exclusive():
        before = engine.num_tokens
        waiting.start()  # another claim must not block the thread that holds the model
        time.sleep(0.05)
        assert engine.num_tokens == before
        assert len(engine.score([[5, 6, 7]])[0]) == 3
        assert not future.done()
    waiting.join(timeout=10)
    assert not waiting.is_alive()
    thread.stop()
    assert future.done()


def test_a_failed_update_still_counts_and_leaves_the_engine_usable() -> None:
    engine = Engine(tiny_causal_lm("llama"))

    def broken_update() -> None:
        with engine.updating():
            raise RuntimeError("optimizer broke")

    with pytest.raises(RuntimeError, match="optimizer broke"):
        broken_update()
    assert engine.version == 1
    assert len(engine.generate([[5]], SamplingParams(max_tokens=2, ignore_eos=True))[0][0].token_ids) == 2


def test_sampling_inside_an_update_is_refused() -> None:
    engine = Engine(tiny_causal_lm("llama"))
    with engine.updating(), pytest.raises(EngineInputError, match="inside updating"):
        engine.generate([[5]], SamplingParams(max_tokens=1))


def test_attach_another_model() -> None:
    engine = Engine(tiny_causal_lm("llama"))
    other = tiny_causal_lm("qwen3", seed=3)
    engine.attach(other)
    reply = engine.generate([PROMPT], PARAMS)[0][0]
    torch.testing.assert_close(
        torch.tensor(reply.logprobs), logprobs_of(other, PROMPT, reply.token_ids), atol=1e-4, rtol=0
    )


def test_a_trainers_forward_in_another_thread_keeps_its_own_attention() -> None:
    """While a step is inside the model, another thread's padded forward must see its mask and give its own numbers."""
    model = tiny_causal_lm("llama")
    engine = Engine(model)
    ids = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
    found: list[torch.Tensor] = []

    def forward_elsewhere() -> None:
        with torch.no_grad():
            found.append(model(input_ids=ids, attention_mask=mask).logits)

    layer = model.model.layers[0]
    original = layer.forward

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and not found:
            other = threading.Thread(target=forward_elsewhere)
            other.start()
            other.join()
        return original(*args, **kwargs)

    layer.forward = interrupted
    engine.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))
    torch.testing.assert_close(found[0][1], expected[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[0][0, 2:], expected[0, 2:], atol=1e-5, rtol=0)


def test_a_drain_ends_preempted_replies_that_wait_behind_new_ones() -> None:
    """A sample that found no room when its prompt was read goes to the front of the queue, before preempted ones."""
    model = tiny_causal_lm("llama")
    engine = Engine(model, config=EngineConfig(block_size=4))
    started, fresh = (
        engine.make_request([5, 6, token], SamplingParams(max_tokens=8, ignore_eos=True)) for token in (7, 8)
    )
    engine.enqueue(started)
    for _ in range(3):
        engine.step()
    engine.scheduler.preempt(started.sequences[0])
    engine.scheduler.waiting.appendleft(fresh.sequences[0])
    with engine.updating():
        assert started.future.done()
        assert not fresh.future.done()
        scale_weights(model, 1.2)
    while not fresh.future.done():
        assert engine.step()
    assert started.future.result()[0].versions == [0] * 8
    assert fresh.future.result()[0].versions == [1] * 8
