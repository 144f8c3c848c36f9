"""Every checked architecture: what the engine reports equals the model's own plain forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atlaslib.engine import Engine, EngineConfig, SamplingParams
from atlaslib.errors import ConfigError, UnsupportedModelError
from atlaslib.models.zoo import ARCHITECTURES, tiny_causal_lm


def plain_logprobs(model: Any, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """log-prob of every next token by the model's own forward, [len - 1]."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].float() / temperature
    return torch.log_softmax(logits, -1)[torch.arange(len(tokens) - 1), tokens[1:]]


def largest_difference(
    model: Any, prompts: list[list[int]], replies: list[list[Any]], temperature: float = 1.0
) -> float:
    worst = 0.0
    for prompt, completions in zip(prompts, replies, strict=True):
        for reply in completions:
            expected = plain_logprobs(model, prompt + reply.token_ids, temperature)[len(prompt) - 1 :]
            worst = max(worst, float((expected - torch.tensor(reply.temperature_logprobs)).abs().max()))
    return worst


def some_prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    return [torch.randint(3, 259, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_rollouts_have_the_log_probs_of_the_plain_forward(name: str) -> None:
    model = tiny_causal_lm(name)
    implementation = model.config._attn_implementation
    engine = Engine(model, config=EngineConfig(block_size=8, max_prefill_tokens=24))
    prompts = some_prompts(4)
    replies = engine.generate(prompts, SamplingParams(n=2, max_tokens=16, temperature=0.8, seed=1, ignore_eos=True))
    assert [len(reply.token_ids) for group in replies for reply in group] == [16] * 8
    assert largest_difference(model, prompts, replies, 0.8) < 1e-4
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_score_equals_the_plain_forward(name: str) -> None:
    model = tiny_causal_lm(name)
    engine = Engine(model, config=EngineConfig(block_size=8, max_prefill_tokens=24))
    sequences = some_prompts(4, seed=3)
    for tokens, scores in zip(sequences, engine.score(sequences, temperature=0.7), strict=True):
        assert scores[0] == 0.0
        torch.testing.assert_close(torch.tensor(scores[1:]), plain_logprobs(model, tokens, 0.7), atol=1e-4, rtol=0)


def test_greedy_equals_transformers_generate() -> None:
    model = tiny_causal_lm("qwen3")
    prompt = some_prompts(1)[0]
    reply = Engine(model).generate([prompt], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))[0][0]
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None
    )
    assert reply.token_ids == expected[0, len(prompt) :].tolist()


def test_training_mode_dropout_and_checkpointing_are_left_as_they_were() -> None:
    model = tiny_causal_lm("llama", attention_dropout=0.5)
    model.gradient_checkpointing_enable()
    model.train()
    prompts = some_prompts(2)
    replies = Engine(model).generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True, seed=0))
    assert all(module.training for module in model.modules())
    model.eval()
    assert largest_difference(model, prompts, replies) < 1e-4


def test_a_model_with_lora_adapters_samples_with_them() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        tiny_causal_lm("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.3)
    model.train()
    prompts = some_prompts(3)
    replies = Engine(model).generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True, seed=0))
    model.eval()
    assert largest_difference(model, prompts, replies) < 1e-4
    with model.disable_adapter():
        assert largest_difference(model, prompts, replies) > 1e-2


def test_a_model_the_engine_would_get_wrong_is_refused_by_what_it_computes() -> None:
    model = tiny_causal_lm("llama")
    layer = model.model.layers[1].self_attn
    original = layer.forward

    def with_memory(*args: Any, **kwargs: Any) -> Any:  # looks at the whole input at once, past the cache
        out, weights = original(*args, **kwargs)
        return out + out.cumsum(1), weights

    layer.forward = with_memory
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*paged forward differs from its plain forward"):
        Engine(model)


def test_more_positions_than_the_model_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len=4096 is more than the 512 positions"):
        Engine(tiny_causal_lm("llama"), config=EngineConfig(max_model_len=4096))


def test_encoder_decoder_is_refused_by_name() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedModelError, match=r"T5ForConditionalGeneration.*encoder-decoder"):
        Engine(model)


def test_state_space_model_is_refused_by_name() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=1))
    with pytest.raises(UnsupportedModelError, match=r"MambaForCausalLM.*state-space"):
        Engine(model)


def test_not_a_language_model_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear is not a transformers model"):
        Engine(torch.nn.Linear(2, 2))
