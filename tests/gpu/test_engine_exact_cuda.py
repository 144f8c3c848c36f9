"""Exact mode on CUDA: the engine's log-probs equal the trainer's exact pass to the last bit, in float32 and bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
NAMES = ["llama", "smollm2", "qwen2", "qwen3", "mistral", "mistral_window", "gemma2", "gemma3"]


def trainer_logprobs(model: Any, sequences: list[list[int]], temperature: float) -> torch.Tensor:
    """One right-padded batch through exact_forward, as a trainer does it; [B, T - 1]."""
    from atlaslib.engine.exact import exact_forward, exact_token_logprobs

    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64, device=DEVICE)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(sequences):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
    with exact_forward(model), torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    return exact_token_logprobs(logits.flatten(0, 1), ids[:, 1:].flatten(), temperature).view(len(sequences), -1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engine_and_trainer_agree_to_the_last_bit(name: str, dtype: torch.dtype) -> None:
    from atlaslib.engine import Engine, EngineConfig, SamplingParams
    from atlaslib.models.zoo import tiny_causal_lm

    model = tiny_causal_lm(name).to(DEVICE, dtype)
    config = EngineConfig(max_prefill_tokens=20, max_num_seqs=7, num_blocks=200, exact=True)
    engine = Engine(model, config=config)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 259, (length,), generator=generator).tolist() for length in (1, 17, 40)]
    replies = engine.generate(prompts, SamplingParams(n=2, max_tokens=14, temperature=0.7, seed=2, ignore_eos=True))
    pairs = [(prompt, reply) for prompt, group in zip(prompts, replies, strict=True) for reply in group]
    exact = trainer_logprobs(model, [prompt + reply.token_ids for prompt, reply in pairs], 0.7)
    for row, (prompt, reply) in enumerate(pairs):
        assert reply.temperature_logprobs == exact[row, len(prompt) - 1 : len(prompt) + 13].tolist()
        assert reply.logprobs == reply.temperature_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_company(dtype: torch.dtype) -> None:
    from atlaslib.engine.exact import exact_linear, last_sum, tiled

    for rows, width, out in ((1, 64, 192), (33, 48, 17), (70, 896, 1152), (300, 3584, 512)):
        x = torch.randn(400, width, device=DEVICE, dtype=dtype)
        weight = torch.randn(out, width, device=DEVICE, dtype=dtype)
        whole = exact_linear(x, weight)
        assert torch.equal(exact_linear(x[5 : 5 + rows], weight), whole[5 : 5 + rows])
        expected = x.double() @ weight.double().t()
        assert float((whole.double() - expected).norm() / expected.norm()) < (1e-5 if dtype == torch.float32 else 1e-2)
        assert torch.equal(last_sum(x[7:9]), last_sum(x)[7:9])
        assert torch.equal(tiled(torch.exp, x[7:8]), tiled(torch.exp, x)[7:8])


def test_gradients_are_those_of_the_plain_forward() -> None:
    from atlaslib.engine.exact import exact_forward
    from atlaslib.models.zoo import tiny_causal_lm

    model = tiny_causal_lm("qwen3").to(DEVICE)
    ids = torch.randint(3, 259, (2, 37), device=DEVICE)
    gradients = []
    for exact in (False, True):
        model.zero_grad()
        if exact:
            with exact_forward(model):
                logits = model(input_ids=ids).logits
        else:
            logits = model(input_ids=ids).logits
        torch.log_softmax(logits, -1).square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-4, rtol=1e-3, msg=name)
