"""The lean decode path on CPU: the same numbers as the modules, the weights of the moment, and when it steps aside."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from atlaslib.engine import Engine, EngineConfig, SamplingParams
from atlaslib.engine.cpu import native_decode, native_sampling
from atlaslib.engine.cpu.lean_decode import LeanDecode
from atlaslib.models.zoo import tiny_causal_lm

PROMPTS = [[5, 9, 200, 31], [7], list(range(20, 57))]
PARAMS = SamplingParams(n=2, max_tokens=20, seed=3, ignore_eos=True)


@pytest.fixture
def lean_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Batch size of every step the lean path ran."""
    steps: list[int] = []
    original = LeanDecode.forward

    def counted(self: LeanDecode, ids: torch.Tensor, *args: Any) -> torch.Tensor:
        steps.append(len(ids))
        return original(self, ids, *args)

    monkeypatch.setattr(LeanDecode, "forward", counted)
    return steps


def replies(engine: Engine) -> list[Any]:
    return [reply for group in engine.generate(PROMPTS, PARAMS) for reply in group]


def plain_logprobs(model: Any, engine_replies: list[Any]) -> list[torch.Tensor]:
    """Of the replies to PROMPTS, by the model's own forward."""
    found = []
    for index, reply in enumerate(engine_replies):
        prompt = PROMPTS[index // 2]
        whole = prompt + reply.token_ids
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([whole])).logits[0]
        rows = torch.log_softmax(logits, -1)[torch.arange(len(whole) - 1), whole[1:]]
        found.append(rows[len(prompt) - 1 :])
    return found


def assert_true(model: Any, engine_replies: list[Any]) -> None:
    for expected, reply in zip(plain_logprobs(model, engine_replies), engine_replies, strict=True):
        torch.testing.assert_close(torch.tensor(reply.raw_logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        ("smollm2", {}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("mistral", {}),
    ],
)
def test_equals_the_modules(name: str, overrides: dict[str, Any], lean_steps: list[int]) -> None:
    model = tiny_causal_lm(name, **overrides)
    engine = Engine(model, config=EngineConfig(block_size=8))
    assert engine.runner.lean is not None
    lean_steps.clear()
    lean = replies(engine)
    assert lean_steps == [6] * 19  # the first token comes from the prefill
    engine.runner.lean = None
    modules = replies(engine)
    assert len(lean_steps) == 19
    for ours, theirs in zip(lean, modules, strict=True):
        assert ours.token_ids == theirs.token_ids
        torch.testing.assert_close(
            torch.tensor(ours.raw_logprobs), torch.tensor(theirs.raw_logprobs), atol=1e-5, rtol=0
        )
    assert_true(model, lean)


def test_sees_weight_updates_in_place_and_by_new_tensors(lean_steps: list[int]) -> None:
    model = tiny_causal_lm("qwen3")
    engine = Engine(model)
    before = replies(engine)
    with engine.updating(), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        model.model.layers[1].mlp.up_proj.weight.data = torch.randn(160, 64) * 0.2
        model.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(torch.randn(128, 64) * 0.2)
    lean_steps.clear()
    after = replies(engine)
    assert len(lean_steps) == 19
    assert [reply.token_ids for reply in after] != [reply.token_ids for reply in before]
    assert_true(model, after)


def test_a_hook_is_run_while_it_is_there(lean_steps: list[int]) -> None:
    model = tiny_causal_lm("llama")
    engine = Engine(model)
    lean_steps.clear()
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * 0.5)
    hooked = replies(engine)
    assert lean_steps == []
    assert_true(model, hooked)
    handle.remove()
    assert_true(model, replies(engine))
    assert len(lean_steps) == 19


def test_adapters_put_in_later_are_used(lean_steps: list[int]) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_causal_lm("llama")
    engine = Engine(model)
    lean_steps.clear()
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.3)
    engine.runner.weights_changed()
    assert_true(model, replies(engine))
    assert lean_steps == []


def test_a_model_with_adapters_runs_its_modules() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_causal_lm("llama"), LoraConfig(r=4, target_modules=["q_proj"]))
    assert Engine(model).runner.lean is None
    assert Engine(model.get_base_model()).runner.lean is None


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("mistral_window", {}), ("gemma2", {}), ("gemma3", {}), ("llama", {"hidden_act": "gelu"})],
)
def test_other_forms_run_their_modules(name: str, overrides: dict[str, Any]) -> None:
    assert Engine(tiny_causal_lm(name, **overrides)).runner.lean is None


def test_exact_mode_and_other_dtypes_run_the_modules() -> None:
    assert Engine(tiny_causal_lm("llama"), config=EngineConfig(exact=True)).runner.lean is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine = Engine(tiny_causal_lm("llama"), config=EngineConfig(check_model=False))
    assert engine.runner.lean is None


def test_the_start_up_check_drops_a_lean_path_that_differs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = LeanDecode.forward
    monkeypatch.setattr(LeanDecode, "forward", lambda self, *args: original(self, *args) * 1.01)
    model = tiny_causal_lm("llama")
    with caplog.at_level(logging.DEBUG, logger="atlaslib.engine.support"):
        engine = Engine(model)
    assert engine.runner.lean is None
    assert "decode steps of LlamaForCausalLM run its modules: the lean path differs by" in caplog.text
    assert_true(model, replies(engine))


def test_torch_calls_do_the_work_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_causal_lm("qwen3")
    compiled = Engine(model)
    assert compiled.runner.lean is not None
    assert compiled.runner.lean.native is not None
    native_decode.library.cache_clear()
    monkeypatch.setenv("ATROPOS_NATIVE", "0")
    try:
        plain = Engine(model)
        assert plain.runner.lean is not None
        assert plain.runner.lean.native is None
        theirs = replies(plain)
    finally:
        native_decode.library.cache_clear()
    monkeypatch.undo()
    ours = replies(compiled)
    assert [reply.token_ids for reply in ours] == [reply.token_ids for reply in theirs]
    assert_true(model, ours)
    assert_true(model, theirs)


@pytest.mark.parametrize("rows", [1, 3, 16, 37])
def test_rows_are_shared_among_threads(rows: int) -> None:
    model = tiny_causal_lm("llama")
    engines = [Engine(model, config=EngineConfig(num_threads=threads)) for threads in (1, 3)]
    prompts = [[5 + row, 9, 7] for row in range(rows)]
    one, three = (engine.generate(prompts, SamplingParams(max_tokens=6, seed=1)) for engine in engines)
    assert [group[0].token_ids for group in one] == [group[0].token_ids for group in three]
    assert [group[0].logprobs for group in one] == [group[0].logprobs for group in three]


def test_a_weight_of_another_form_is_not_given_to_the_compiled_step() -> None:
    model = tiny_causal_lm("llama")
    engine = Engine(model)
    replies(engine)
    lean = engine.runner.lean
    assert lean is not None
    assert lean.native is not None
    assert lean.native.ready(engine.runner.cache)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    assert not lean.native.ready(engine.runner.cache)
    assert_true(model, replies(engine))


def test_compiled_sampling_follows_the_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 300).repeat(20_000, 1) * 2
    temperatures = torch.full((20_000,), 0.7)
    result = native_sampling.sample_rows(logits, temperatures, torch.arange(20_000) * 7919, torch.zeros(20_000).long())
    assert result is not None
    tokens, logprobs, raw = result
    wanted = torch.log_softmax(logits[0].double() / 0.7, -1)
    torch.testing.assert_close(logprobs.double(), wanted[tokens], atol=1e-5, rtol=0)
    torch.testing.assert_close(raw.double(), torch.log_softmax(logits[0].double(), -1)[tokens], atol=1e-5, rtol=0)
    share = torch.bincount(tokens, minlength=300) / 20_000
    spread = (wanted.exp() * (1 - wanted.exp()) / 20_000).sqrt()
    assert ((share - wanted.exp()).abs() < 5 * spread + 1e-4).all()


def test_compiled_sampling_at_the_edges() -> None:
    logits = torch.full((3, 600), -torch.inf)
    logits[0, 511], logits[1, 3], logits[1, 9], logits[2, 599] = 1.0, 2.0, 5.0, -3.0
    zeros = torch.zeros(3).long()
    result = native_sampling.sample_rows(logits, torch.tensor([1.0, 0.0, 0.3]), zeros + 5, zeros)
    assert result is not None
    assert result[0].tolist() == [511, 9, 599]
    torch.testing.assert_close(result[1], torch.tensor([0.0, -0.0485874, 0.0]), atol=1e-5, rtol=0)
    assert native_sampling.sample_rows(logits.double(), torch.ones(3), zeros, zeros) is None


def test_a_masked_token_is_never_drawn() -> None:
    logits = torch.zeros(4000, 8)
    logits[:, [2, 5, 7]] = -torch.inf
    result = native_sampling.sample_rows(logits, torch.ones(4000), torch.arange(4000), torch.zeros(4000).long())
    assert result is not None
    assert set(result[0].tolist()) == {0, 1, 3, 4, 6}
