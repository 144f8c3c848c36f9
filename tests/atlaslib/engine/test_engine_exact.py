"""Exact mode: the engine's log-probs equal the trainer's exact pass to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atlaslib.engine import Engine, EngineConfig, SamplingParams
from atlaslib.engine.cpu import native_attention
from atlaslib.engine.exact import exact_attention, exact_forward, exact_linear, exact_token_logprobs, last_sum, tiled
from atlaslib.errors import ConfigError
from atlaslib.models.tiny import tiny_llama
from atlaslib.models.zoo import ARCHITECTURES, tiny_causal_lm


def trainer_logprobs(model: Any, sequences: list[list[int]], temperature: float) -> torch.Tensor:
    """One right-padded batch through exact_forward, as a trainer does it; [B, T - 1]."""
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(sequences):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
    with exact_forward(model):
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    flat = exact_token_logprobs(logits.flatten(0, 1), ids[:, 1:].flatten(), temperature)
    return flat.view(len(sequences), -1)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_engine_and_trainer_agree_to_the_last_bit(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(native_attention, "attend", lambda *_: None)
    model = tiny_causal_lm(name)
    engine = Engine(model, config=EngineConfig(block_size=8, max_prefill_tokens=20, max_num_seqs=7, exact=True))
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 259, (length,), generator=generator).tolist() for length in (1, 17, 40)]
    replies = engine.generate(prompts, SamplingParams(n=2, max_tokens=14, temperature=0.7, seed=2, ignore_eos=True))
    pairs = [(prompt, reply) for prompt, group in zip(prompts, replies, strict=True) for reply in group]
    implementation = model.config._attn_implementation
    exact = trainer_logprobs(model, [prompt + reply.token_ids for prompt, reply in pairs], 0.7)
    assert model.config._attn_implementation == implementation
    for row, (prompt, reply) in enumerate(pairs):
        assert reply.temperature_logprobs == exact[row, len(prompt) - 1 : len(prompt) + 13].tolist()
        assert reply.logprobs == reply.temperature_logprobs


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_compiled_attention_is_the_same_function(softcap: float | None) -> None:
    if native_attention.native_decode.library() is None:
        pytest.skip("no C compiler")
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(3, n, d, generator=generator) for n, d in ((5, 24), (70, 24), (70, 17)))
    places = torch.arange(70)
    for allowed in (
        (places < 37).expand(1, 1, 70),
        (places <= torch.tensor([2, 9, 31, 64, 69])[:, None])[None],
        ((places < 60) & (places >= torch.tensor([0, 1, 33])[:, None]))[:, None],
    ):
        got = exact_attention(query, key, value, allowed, 0.3, softcap)
        scores = torch.einsum("nrd,nkd->nrk", query.double(), key.double()) * 0.3
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), -1)
        torch.testing.assert_close(got.double(), weights @ value.double(), atol=2e-6, rtol=1e-5)
        alone = exact_attention(query[1:2, 2:3], key[1:2], value[1:2], allowed.expand(3, 5, 70)[1:2, 2:3], 0.3, softcap)
        assert torch.equal(alone[0, 0], got[1, 2])


def test_every_head_with_its_own_keys_and_prompts_of_whole_tiles() -> None:
    model = tiny_llama(259, heads=4, kv_heads=4)
    engine = Engine(model, config=EngineConfig(exact=True))
    prompts = [list(range(5, 5 + length)) for length in (16, 48, 7)]
    replies = [group[0].token_ids for group in engine.generate(prompts, SamplingParams(max_tokens=5, ignore_eos=True))]
    sequences = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
    exact = trainer_logprobs(model, sequences, 1.0)
    for row, sequence in enumerate(sequences):
        assert engine.score([sequence])[0][1:] == exact[row, : len(sequence) - 1].tolist()


def test_exact_replies_do_not_depend_on_the_batch() -> None:
    model = tiny_causal_lm("llama")
    params = SamplingParams(max_tokens=24, seed=9, ignore_eos=True)
    prompts = [[7, 8, 9, 10 + i] * (i + 1) for i in range(6)]
    engine = Engine(model, config=EngineConfig(exact=True, max_num_seqs=6))
    together = [group[0] for group in engine.generate(prompts, params)]
    alone = [engine.generate([prompt], params)[0][0] for prompt in prompts]
    assert [reply.token_ids for reply in together] == [reply.token_ids for reply in alone]
    assert [reply.logprobs for reply in together] == [reply.logprobs for reply in alone]


def test_exact_forward_is_the_same_function_as_the_plain_one_with_the_same_gradients() -> None:
    model = tiny_causal_lm("qwen3")
    ids = torch.randint(3, 259, (2, 37), generator=torch.Generator().manual_seed(0))
    results = []
    for exact in (False, True):
        model.zero_grad()
        if exact:
            with exact_forward(model):
                logits = model(input_ids=ids).logits
        else:
            logits = model(input_ids=ids).logits
        torch.log_softmax(logits, -1).square().mean().backward()
        results.append((logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-4, rtol=1e-4)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("rows", [1, 3, 31, 32, 33, 70])
@pytest.mark.parametrize(("width", "out"), [(64, 192), (48, 17), (576, 1536)])
def test_linear_rows_do_not_depend_on_company(rows: int, width: int, out: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(80, width, generator=generator), torch.randn(out, width, generator=generator)
    whole = exact_linear(x, weight)
    assert torch.equal(exact_linear(x[5 : 5 + rows], weight), whole[5 : 5 + rows])
    torch.testing.assert_close(whole, x @ weight.t(), atol=1e-3, rtol=1e-4)


def test_elementwise_and_sums_do_not_depend_on_place() -> None:
    x = torch.randn(301, 259, generator=torch.Generator().manual_seed(1)) * 4
    for function in (torch.exp, torch.tanh, torch.nn.functional.silu, torch.cos):
        whole = tiled(function, x)
        for start, end in ((0, 1), (7, 8), (3, 100), (200, 301)):
            assert torch.equal(tiled(function, x[start:end]), whole[start:end])
    sums = last_sum(x)
    assert all(torch.equal(last_sum(x[row : row + 1]), sums[row : row + 1]) for row in range(0, 301, 13))


def test_attention_equals_the_naive_one_and_ignores_later_keys() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(3, 70, 16, generator=generator) for _ in range(3))
    allowed = torch.tril(torch.ones(70, 70, dtype=torch.bool))[None]
    whole = exact_attention(q, k, v, allowed, 0.25, None)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=0.25)
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
    for row in (0, 15, 33, 69):
        one = exact_attention(
            q[:, row : row + 1],
            k[:, : row + 1],
            v[:, : row + 1],
            torch.ones(1, 1, row + 1, dtype=torch.bool),
            0.25,
            None,
        )
        assert torch.equal(one[:, 0], whole[:, row])


def test_left_padding_is_refused() -> None:
    model = tiny_causal_lm("llama")
    ids = torch.randint(3, 259, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with exact_forward(model), pytest.raises(ConfigError, match="right padding"):
        model(input_ids=ids, attention_mask=mask)
