"""Every sampling setting against a plain reference that handles one row at a time in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from atlaslib.engine import Engine, EngineConfig, SamplingParams
from atlaslib.engine.sampling import RowParams, inverse_cdf, mix_seed, sample, shape_logits, token_logprobs, uniforms
from atlaslib.models.zoo import tiny_causal_lm

VOCAB = 70


def reference_distribution(
    logits: np.ndarray[Any, Any], p: SamplingParams, prompt: list[int], reply: list[int]
) -> np.ndarray[Any, Any]:
    """Probabilities of one row, written as the documentation says it."""
    x = logits.astype(np.float64).copy()
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in set(prompt) | set(reply):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(reply):
        x[token] -= p.presence_penalty + p.frequency_penalty * reply.count(token)
    if p.temperature == 0:
        probs = np.exp(x - x.max())
        return probs / probs.sum()
    x = x / p.temperature
    keep = np.ones(len(x), dtype=bool)
    if p.top_k:
        keep &= x >= np.sort(x)[-min(p.top_k, len(x))]
    probs = np.where(keep, np.exp(x - x.max()), 0)
    probs /= probs.sum()
    if p.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        mass = 0.0
        for place in order:
            if mass >= p.top_p:
                keep[place] = False
            mass += probs[place]
    keep &= probs >= p.min_p * probs.max()
    probs = np.where(keep, probs, 0)
    return np.asarray(probs / probs.sum())


def row_params(settings: list[SamplingParams], prompts: list[list[int]], replies: list[list[int]]) -> RowParams:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(s, name) for s in settings], dtype=dtype)

    return RowParams(
        temperatures=column("temperature", torch.float32),
        seeds=torch.arange(len(settings)),
        counters=torch.tensor([len(reply) for reply in replies]),
        plain=False,
        top_ks=column("top_k", torch.int64),
        top_ps=column("top_p", torch.float32),
        min_ps=column("min_p", torch.float32),
        repetition=column("repetition_penalty", torch.float32),
        presence=column("presence_penalty", torch.float32),
        frequency=column("frequency_penalty", torch.float32),
        prompt_tokens=prompts,
        reply_tokens=replies,
        biases=[s.logit_bias for s in settings],
        num_top=5,
    )


SETTINGS = {
    "temperature": SamplingParams(temperature=0.4),
    "hot": SamplingParams(temperature=3.0),
    "greedy": SamplingParams(temperature=0.0, top_k=3),
    "top_k": SamplingParams(top_k=7),
    "top_k_larger_than_vocabulary": SamplingParams(top_k=500),
    "top_p": SamplingParams(top_p=0.6),
    "tiny_top_p": SamplingParams(top_p=1e-6),
    "min_p": SamplingParams(min_p=0.2),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=0.8),
    "bias": SamplingParams(logit_bias={3: 4.0, 9: -100.0}),
    "all": SamplingParams(
        temperature=0.8,
        top_k=30,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias={1: 2.0},
    ),
    "off": SamplingParams(),
}


def test_every_setting_gives_the_reference_distribution_side_by_side_in_one_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    settings = list(SETTINGS.values())
    logits = torch.randn(len(settings), VOCAB, generator=generator) * 3
    prompts = [torch.randint(0, VOCAB, (6,), generator=generator).tolist() for _ in settings]
    replies = [torch.randint(0, VOCAB, (9,), generator=generator).tolist() * 2 for _ in settings]
    params = row_params(settings, prompts, replies)
    ours = torch.softmax(shape_logits(logits, params).double(), -1).numpy()
    sampled = sample(logits, params)
    for row, (name, setting) in enumerate(SETTINGS.items()):
        expected = reference_distribution(logits[row].numpy(), setting, prompts[row], replies[row])
        np.testing.assert_allclose(ours[row], expected, atol=1e-6, err_msg=name)
        token = int(sampled.tokens[row])
        assert expected[token] > 0, name
        assert float(sampled.logprobs[row]) == pytest.approx(math.log(expected[token]), abs=1e-5), name
        if setting.temperature == 0:
            assert token == int(np.argmax(expected))
        plain = torch.log_softmax(logits[row].double() / (setting.temperature or 1.0), -1)[token]
        assert float(sampled.temperature_logprobs[row]) == pytest.approx(float(plain), abs=1e-5), name
        assert float(sampled.raw_logprobs[row]) == pytest.approx(
            float(torch.log_softmax(logits[row].double(), -1)[token]), abs=1e-5
        )
        best = np.argsort(-expected, kind="stable")[:2]
        assert sampled.top_ids is not None
        assert set(best) <= set(sampled.top_ids[row].tolist()) or expected[best[1]] == 0


def test_inverse_cdf_finds_the_place_a_running_sum_would() -> None:
    generator = torch.Generator().manual_seed(1)
    for vocab in (3, 255, 256, 257, 1000):
        weights = torch.rand(40, vocab, generator=generator) ** 4
        weights[:, ::3] = 0
        u = torch.rand(40, generator=generator, dtype=torch.float64)
        running = weights.double().cumsum(-1)
        expected = (running <= u[:, None] * running[:, -1:]).sum(-1)
        found = inverse_cdf(weights, u)
        assert torch.equal(found, expected)
        assert bool((weights.gather(1, found[:, None]) > 0).all())


def test_inverse_cdf_at_the_ends() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 0.0]]).repeat(2, 1)
    assert inverse_cdf(weights, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)).tolist() == [1, 3]


def test_uniforms_are_uniform_and_depend_on_seed_and_counter() -> None:
    seeds = torch.full((20_000,), mix_seed(5, 0))
    numbers = uniforms(seeds, torch.arange(20_000))
    assert float(numbers.min()) >= 0.0
    assert float(numbers.max()) < 1.0
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]) == pytest.approx(0.0, abs=0.03)
    assert len(set(numbers.tolist())) == 20_000
    assert float(uniforms(torch.tensor([mix_seed(5, 1)]), torch.tensor([0]))[0]) != float(numbers[0])


def test_draws_follow_the_distribution() -> None:
    rows = 20_000
    probs = torch.tensor([0.5, 0.3, 0.0, 0.15, 0.05])
    params = RowParams(
        temperatures=torch.ones(rows),
        seeds=torch.full((rows,), 3),
        counters=torch.arange(rows),
        unit_temperature=True,
        any_greedy=False,
    )
    sampled = sample(probs.log().expand(rows, -1), params)
    shares = torch.bincount(sampled.tokens, minlength=5) / rows
    torch.testing.assert_close(shares, probs, atol=0.015, rtol=0)


def test_token_logprobs_equal_log_softmax() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3)) * 5
    tokens = torch.arange(6)
    expected = torch.log_softmax(logits / 0.3, -1)[torch.arange(6), tokens]
    torch.testing.assert_close(token_logprobs(logits, tokens, 0.3), expected, atol=1e-5, rtol=1e-5)


def naive_reply(model: Any, prompt: list[int], setting: SamplingParams, stream: int, count: int) -> list[int]:
    """A sampler of a few lines: whole forward for every token, float64, the documented random number."""
    reply: list[int] = []
    for at in range(count):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + reply])).logits[0, -1].numpy()
        probs = reference_distribution(logits, setting, prompt, reply)
        if setting.temperature == 0:
            reply.append(int(np.argmax(probs)))
            continue
        u = float(uniforms(torch.tensor([stream]), torch.tensor([at]))[0])
        reply.append(int(np.searchsorted(np.cumsum(probs), u * probs.sum(), side="right")))
    return reply


def test_whole_replies_equal_a_naive_sampler_for_every_setting_in_one_batch() -> None:
    model = tiny_causal_lm("llama")
    engine = Engine(model, config=EngineConfig(block_size=4))
    prompt = [5, 9, 14, 9]
    settings = [replace(setting, max_tokens=12, seed=11, ignore_eos=True) for setting in SETTINGS.values()]
    replies = engine.generate([prompt] * len(settings), settings)
    stream = mix_seed(engine.make_request(prompt, settings[0]).seed, 0)
    for name, setting, (reply,) in zip(SETTINGS, settings, replies, strict=True):
        assert reply.token_ids == naive_reply(model, prompt, setting, stream, 12), name


def test_a_seed_gives_the_same_reply_whatever_runs_beside_it() -> None:
    model = tiny_causal_lm("qwen2")
    params = SamplingParams(n=2, max_tokens=16, seed=123, ignore_eos=True)
    alone = Engine(model).generate([[4, 5, 6]], params)[0]
    crowd = [[i + 3] * (i + 1) for i in range(9)]
    beside = Engine(model, config=EngineConfig(max_num_seqs=5, block_size=4)).generate(
        [*crowd, [4, 5, 6]], [*[SamplingParams(max_tokens=9, n=3)] * 9, params]
    )[-1]
    assert [reply.token_ids for reply in beside] == [reply.token_ids for reply in alone]
    assert alone[0].token_ids != alone[1].token_ids


def test_without_a_seed_replies_differ_and_an_engine_seed_repeats_them() -> None:
    model = tiny_causal_lm("llama")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    free = [Engine(model).generate([[4, 5]], params)[0][0].token_ids for _ in range(2)]
    assert free[0] != free[1]
    fixed = [Engine(model, config=EngineConfig(seed=3)).generate([[4, 5]] * 2, params) for _ in range(2)]
    assert [g[0].token_ids for g in fixed[0]] == [g[0].token_ids for g in fixed[1]]
    assert fixed[0][0][0].token_ids != fixed[0][1][0].token_ids
