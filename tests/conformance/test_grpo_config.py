"""Every documented parameter of GRPOConfig: its default, and the effect a user can see."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atlaslib.errors import ConfigError, MissingExtraError
from atlaslib.generation.protocol import Request, SamplingSettings
from atlaslib.models.tiny import tiny_llama
from atlaslib.trainers import GRPOConfig, GRPOTrainer

DOCUMENTED: dict[str, Any] = {
    "model_name_or_path": None, "learning_rate": 1e-6, "num_train_epochs": 3, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0, "warmup_ratio": 0.1, "weight_decay": 0.01, "beta": 0.04, "temperature": 0.9, "num_generations": 8,
    "max_completion_length": 256, "max_prompt_length": 512, "reward_weights": None, "top_k": None, "top_p": 1.0, "min_p": None,
    "repetition_penalty": 1.0, "generation_aggregation_steps": None, "shuffle_generation_inputs": False, "use_vllm": False,
    "use_vllm_server": False, "vllm_device": "auto", "vllm_gpu_memory_utilization": 0.9, "vllm_dtype": "auto", "vllm_max_model_len": None,
    "vllm_host": None, "vllm_port": None, "num_vllm_clients": 1, "offload_untrained_models": False, "ds3_gather_for_generation": True,
    "backprop_accumulation_steps": None, "backprop_accumulation_micro_batch_size": None, "remove_unused_columns": False, "max_probe_tokens": 500,
    "student_diagnostic_template": None, "teacher_adaptive_template": None, "student_with_teaching_template": None,
    "student_baseline_template": None, "logging_steps": 10, "save_steps": 500, "eval_steps": 500, "save_total_limit": 3,
    "load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": True, "report_to": ["wandb"],
}  # fmt: skip
UPSTREAM_ONLY = {
    "model_init_kwargs", "vllm_group_port", "vllm_server_timeout", "vllm_guided_decoding_regex", "use_ray", "ray_share_training_devices",
    "ray_tensor_parallelism", "ray_data_parallelism", "ray_no_memory_duplication", "enforce_eager", "enable_prefix_caching", "vllm_sleep_level",
    "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "unbias_log_probabilities", "activate_debugging_logs",
    "log_completions", "save_completions_probability", "artificial_epochs",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def model(tiny_tokenizer: Any) -> Any:
    return tiny_llama(len(tiny_tokenizer), hidden=32, eos_token_id=tiny_tokenizer.eos_token_id)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., GRPOConfig]:
    def make(**options: Any) -> GRPOConfig:
        settings: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 5, "max_steps": 1,
            "beta": 0.0, "learning_rate": 1e-2, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, **options,
        }  # fmt: skip
        return GRPOConfig(**settings)

    return make


ROWS = [{"prompt": f"ask {letter}", "answer": letter} for letter in "abcdefgh"]


def lengths(completions: list[Any], **_: Any) -> list[float]:
    """Of texts, or of the messages a conversation goes on with."""
    texts = [reply if isinstance(reply, str) else reply[-1]["content"] for reply in completions]
    return [float(len(set(text))) for text in texts]


@pytest.fixture
def train(model: Any, tiny_tokenizer: Any, config: Any) -> Callable[..., GRPOTrainer]:
    def run(reward: Any = lengths, rows: Any = ROWS, go: bool = True, **options: Any) -> GRPOTrainer:
        trainer = GRPOTrainer(model, reward, config(**options), train_dataset=rows, processing_class=tiny_tokenizer)
        if go:
            trainer.train()
        return trainer

    return run


def metrics(trainer: GRPOTrainer) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(trainer.config.output_dir) / "metrics.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------- names and defaults


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_default(name: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    field = fields[name]
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    assert default == DOCUMENTED[name]


def test_every_name_of_the_predecessor_is_accepted() -> None:
    names = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert names >= UPSTREAM_ONLY | set(DOCUMENTED)


def test_every_own_parameter_is_documented() -> None:
    from atlaslib.trainers.grpo_fields import all_parameters

    assert [p.name for p in all_parameters().values() if not p.inherited and len(p.documentation) < 5] == []


def test_the_torch_free_list_is_the_real_one() -> None:
    from atlaslib.trainers.grpo_fields import all_parameters

    assert set(all_parameters()) == {field.name for field in dataclasses.fields(GRPOConfig) if field.init}


# ---------------------------------------------------------------------- what cannot hold as such


def test_best_model_is_inert_without_an_evaluation(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        made = config()
    assert made.load_best_model_at_end is False
    assert sum("load_best_model_at_end" in record.message for record in caplog.records) == 1


def test_best_model_aligns_save_and_eval(config: Any) -> None:
    made = config(eval_strategy="steps", eval_steps=7, save_steps=10)
    assert made.load_best_model_at_end is True
    assert (made.save_strategy.value, made.save_steps) == ("steps", 14)
    assert (made.metric_for_best_model, made.greater_is_better) == ("eval_reward", True)


def test_wandb_falls_back_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    made = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    assert "wandb" not in (made.report_to or [])
    assert sum("wandb is left out" in record.message for record in caplog.records) == 1


def test_wandb_stays_when_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert GRPOConfig(output_dir=str(tmp_path), use_cpu=True).report_to == ["wandb"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_ray": True}, "use_vllm_server"),
        ({"ray_share_training_devices": True}, "Ray"),
        ({"ray_tensor_parallelism": 2}, "Ray"),
        ({"ray_data_parallelism": 2}, "Ray"),
        ({"ray_no_memory_duplication": True}, "Ray"),
        ({"vllm_group_port": 1}, "vllm_weights_dir"),
        ({"loss_type": "grop"}, "grpo"),
        ({"num_generations": 1}, "at least 2"),
        ({"use_vllm_server": True}, "vllm_host and vllm_port"),
        ({"use_vllm_server": True, "vllm_host": "h"}, "vllm_host and vllm_port"),
        ({"use_vllm_server": True, "vllm_host": "h", "vllm_port": 1, "num_vllm_clients": 0}, "num_vllm_clients"),
        ({"use_vllm": True, "use_vllm_server": True}, "choose one"),
        ({"vllm_guided_decoding_regex": "a+"}, "vLLM only"),
        ({"generation_aggregation_steps": 3}, "must divide"),
        ({"backprop_accumulation_steps": 9}, "between 1 and"),
        ({"backprop_accumulation_steps": 2, "backprop_accumulation_micro_batch_size": 3}, "disagree"),
        ({"temperature": 0.0}, "above 0"),
        ({"beta": -1.0}, "negative"),
        ({"deterministic": True, "max_staleness": 1}, "max_staleness=0"),
        ({"sync_ref_model": True}, "beta"),
        ({"overlong_cache_length": 9}, "max_completion_length"),
        ({"max_staleness": 1, "sampler": "transformers"}, "sampler='engine'"),
        ({"auto_find_batch_size": True}, "backprop_accumulation_steps"),
        ({"scale_rewards": "yes"}, "group"),
        ({"trainable_layers": 0}, "at least 1"),
        ({"policy_server_port": 0, "sampler": "transformers"}, "engine"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_cannot_work_says_why(options: dict[str, Any], message: str, config: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)


# ---------------------------------------------------------------------- optimisation


def test_warmup_ratio_ramps_the_learning_rate(train: Any) -> None:
    trainer = train(
        max_steps=10, warmup_ratio=0.4, lr_scheduler_type="constant_with_warmup", logging_steps=1, learning_rate=1.0e-3
    )
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4] + [1e-3] * 7, rel=1e-6) or rates == pytest.approx(
        [0.0, 2.5e-4, 5e-4, 7.5e-4] + [1e-3] * 6, rel=1e-6
    )
    assert trainer.config.get_warmup_steps(10) == 4


def test_warmup_steps_win(config: Any) -> None:
    assert config(warmup_steps=3, warmup_ratio=0.5).get_warmup_steps(100) == 3


def test_weight_decay_and_clipping_reach_the_optimizer(train: Any) -> None:
    trainer = train(weight_decay=0.25, max_grad_norm=1e-6, optim="sgd")
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.25, 0.0}
    assert metrics(trainer)[0]["train/grad_norm"] > 1e-6


@pytest.mark.parametrize(("epochs", "steps"), [(1, 4), (3, 12)])
def test_epochs_count_passes_over_the_prompts(epochs: int, steps: int, train: Any) -> None:
    trainer = train(num_train_epochs=epochs, max_steps=-1, go=False)
    values = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    assert values[-1] == steps


def test_artificial_epochs_lengthen_an_epoch(train: Any) -> None:
    trainer = train(artificial_epochs=3, go=False)
    assert len(trainer.get_train_dataloader()) == 12


# ---------------------------------------------------------------------- algorithm


def test_beta_zero_needs_no_reference(train: Any) -> None:
    trainer = train(beta=0.0)
    assert trainer.reference is None
    assert "kl" not in metrics(trainer)[0]


def test_beta_holds_the_policy_near_the_reference(train: Any, model: Any, tmp_path: Path) -> None:
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def divergence(beta: float) -> float:
        model.load_state_dict(start)
        options = {"optim": "sgd", "learning_rate": 2.0, "max_grad_norm": 0.0, "max_steps": 8}
        return metrics(train(beta=beta, output_dir=str(tmp_path / str(beta)), **options))[-1]["kl"]

    assert divergence(2.0) < 0.7 * divergence(1e-6)


def test_sync_ref_model_moves_the_reference(train: Any, model: Any) -> None:
    before = next(model.parameters()).detach().clone()
    trainer = train(beta=0.1, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.75)
    after = next(model.parameters()).detach()
    torch.testing.assert_close(next(trainer.reference.parameters()), 0.25 * before + 0.75 * after)


def test_num_generations_is_the_group(train: Any) -> None:
    seen: list[list[str]] = []

    def watch(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        seen.append(prompts)
        return [0.0] * len(prompts)

    train(watch, num_generations=2)
    assert len(seen[0]) == 8
    assert [seen[0].count(prompt) for prompt in dict.fromkeys(seen[0])] == [2, 2, 2, 2]
    with pytest.raises(ConfigError, match="must be at least 2 and divide"):
        train(num_generations=3)


def test_num_generations_none_is_one_group(train: Any) -> None:
    assert train(num_generations=None, go=False).sizes.num_generations == 8


def test_lengths_are_bounded_and_the_trained_prompt_is_the_sampled_one(train: Any, tiny_tokenizer: Any) -> None:
    trainer = train(
        rows=[{"prompt": "x" * 50 + str(n)} for n in range(4)], max_prompt_length=6, max_completion_length=3
    )
    for sample in trainer.step_samples:
        prompt = [token for token, trained in zip(sample.token_ids, sample.loss_mask, strict=True) if not trained]
        assert len(prompt) == 6
        assert tiny_tokenizer.decode(prompt).startswith("xxxxx")
        assert 1 <= sum(sample.loss_mask) <= 3


def test_reward_weights(train: Any) -> None:
    def ones(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    def twos(completions: list[str], **_: Any) -> list[float]:
        return [2.0] * len(completions)

    trainer = train([ones, twos], reward_weights=[0.5, 10.0])
    assert metrics(trainer)[0]["reward"] == pytest.approx(20.5)
    with pytest.raises(ConfigError, match="reward_weights has 1 entries for 2"):
        train([ones, twos], reward_weights=[1.0])


def test_extra_columns_reach_reward_functions(train: Any) -> None:
    seen: dict[str, Any] = {}

    def watch(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        seen.update(columns)
        return [0.0] * len(prompts)

    train(watch)
    assert set(seen["answer"]) <= set("abcdefgh")
    seen.clear()
    train(watch, remove_unused_columns=True)
    assert "answer" not in seen


def test_temperature_matches_between_sampler_and_trainer(train: Any, tmp_path: Path) -> None:
    for temperature in (0.5, 1.7):
        line = metrics(train(temperature=temperature, output_dir=str(tmp_path / str(temperature))))[-1]
        assert line["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    line = metrics(train(temperature=0.5, unbias_log_probabilities=False, output_dir=str(tmp_path / "raw")))[-1]
    assert line["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("scale", "expected"), [("group", 0.866), ("none", 1.5), ("batch", 0.935)])
def test_scale_rewards(scale: str, expected: float, train: Any) -> None:
    def fixed(completions: list[str], **_: Any) -> list[float]:
        return [0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0]

    trainer = train(fixed, scale_rewards=scale)
    top = max(max(sample.advantages) for sample in trainer.step_samples)
    spread = {"group": 1.2910, "none": 1.0, "batch": 1.1952}[scale]
    assert top == pytest.approx(1.5 / spread, rel=2e-3)


def test_overlong_shaping_lowers_long_rewards(train: Any) -> None:
    def zeros(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    trainer = train(zeros, overlong_cache_length=5, max_completion_length=5)
    rewards = {sample.num_trained_tokens: sample.reward for sample in trainer.step_samples}
    assert rewards[5] == -1.0
    assert all(reward == pytest.approx(-length / 5) for length, reward in rewards.items())


# ---------------------------------------------------------------------- sampling, in every backend that runs here


def rigged(vocab: int, tokenizer: Any) -> Any:
    """A model whose next token has probabilities 0.5, 0.3, 0.15, 0.05 on ids 10..13, whatever came before."""
    model = tiny_llama(vocab, hidden=32, eos_token_id=tokenizer.eos_token_id)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, 0] = -30.0
        scale = float(model.model(input_ids=torch.tensor([[1]])).last_hidden_state[0, 0, 0])
        for token, probability in zip(range(10, 14), (0.5, 0.3, 0.15, 0.05), strict=True):
            model.lm_head.weight[token, 0] = torch.tensor(probability).log() / scale
    return model


@pytest.fixture(params=["engine", "transformers"])
def draw(request: pytest.FixtureRequest, tiny_tokenizer: Any) -> Callable[..., list[int]]:
    model = rigged(len(tiny_tokenizer), tiny_tokenizer)
    if request.param == "engine":
        from atlaslib.engine import Engine
        from atlaslib.generation.engine_sampler import EngineSampler

        sampler: Any = EngineSampler(Engine(model, tiny_tokenizer))
    else:
        from atlaslib.generation.transformers_sampler import TransformersSampler

        sampler = TransformersSampler(model, pad_id=0)

    def sample(**options: Any) -> list[int]:
        settings = SamplingSettings(**{"max_tokens": 40, "temperature": 1.0, **options})
        completions = sampler.generate([Request(prompt_ids=[1, 2, 3], n=4, seed=7)], settings)[0]
        return [token for completion in completions for token in completion.token_ids]

    return sample


def test_plain_sampling_draws_all_four(draw: Any) -> None:
    assert set(draw()) == {10, 11, 12, 13}


def test_top_k(draw: Any) -> None:
    assert set(draw(top_k=2)) == {10, 11}


def test_top_p(draw: Any) -> None:
    assert set(draw(top_p=0.9)) == {10, 11, 12}


def test_min_p(draw: Any) -> None:
    assert set(draw(min_p=0.5)) == {10, 11}


def test_repetition_penalty(draw: Any) -> None:
    plain, penalised = draw(max_tokens=4), draw(max_tokens=4, repetition_penalty=50.0)
    assert len(set(penalised[:4])) == 4
    assert len(plain) == len(penalised) == 16


def test_low_temperature_is_nearly_greedy(draw: Any) -> None:
    assert set(draw(temperature=0.05)) == {10}


def test_vllm_missing_names_the_extra(train: Any) -> None:
    with pytest.raises(MissingExtraError, match=r"atropos-atlas\[vllm\]"):
        train(use_vllm=True)


# ---------------------------------------------------------------------- generation rounds and memory


@pytest.mark.parametrize(("aggregation", "calls"), [(1, 4), (2, 2), (None, 1)])
def test_generation_rounds_per_step(aggregation: int | None, calls: int, train: Any) -> None:
    sizes: list[int] = []

    def watch(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        sizes.append(len(prompts))
        return [0.0] * len(prompts)

    train(watch, per_device_train_batch_size=4, gradient_accumulation_steps=4, generation_aggregation_steps=aggregation)
    assert sizes == [16 // calls] * calls


def peak_saved_bytes(trainer: GRPOTrainer) -> int:
    """The most bytes autograd keeps for a backward pass at any time of a training step."""
    held: dict[int, int] = {}
    peak = 0

    def pack(tensor: torch.Tensor) -> Any:
        nonlocal peak
        box = _Box(tensor, held)
        held[id(box)] = tensor.numel() * tensor.element_size()
        peak = max(peak, sum(held.values()))
        return box

    class _Box:
        def __init__(self, tensor: torch.Tensor, book: dict[int, int]) -> None:
            self.tensor, self._book = tensor, book

        def __del__(self) -> None:
            self._book.pop(id(self), None)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        trainer.train()
    return peak


def test_chunked_backward_needs_less_memory(train: Any, tmp_path: Path) -> None:
    whole = peak_saved_bytes(train(go=False, packing="padded", output_dir=str(tmp_path / "a")))
    quarters = peak_saved_bytes(
        train(go=False, packing="padded", backprop_accumulation_steps=4, output_dir=str(tmp_path / "b"))
    )
    by_size = peak_saved_bytes(
        train(go=False, packing="padded", backprop_accumulation_micro_batch_size=2, output_dir=str(tmp_path / "c"))
    )
    assert quarters < 0.5 * whole
    assert by_size < 0.5 * whole


def test_offloaded_reference_is_on_the_device_only_during_its_use(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = train(beta=0.1, offload_untrained_models=True, go=False)
    moves: list[str] = []
    original = trainer.reference.to
    monkeypatch.setattr(trainer.reference, "to", lambda place: (moves.append(str(place)), original(place))[1])
    trainer.train()
    assert moves == ["cpu", "cpu"]


def test_shuffled_inputs_reach_the_sampler_in_another_order(train: Any) -> None:
    trainer = train(shuffle_generation_inputs=True, go=False, per_device_train_batch_size=32)
    orders: list[list[list[int]]] = []
    sampler = trainer.sampler
    original = sampler.generate

    def watch(requests: list[Request], settings: SamplingSettings) -> Any:
        orders.append([request.prompt_ids for request in requests])
        return original(requests, settings)

    sampler.generate = watch  # type: ignore[method-assign]
    trainer.train()
    sent = orders[0]
    kept = list(dict.fromkeys(tuple(sample.token_ids[: len(sent[0])]) for sample in trainer.step_samples))
    assert sorted(map(tuple, sent)) == sorted(kept)
    assert list(map(tuple, sent)) != kept


def test_model_init_kwargs_reach_the_model(tmp_path: Path, tiny_tokenizer: Any, config: Any) -> None:
    from atlaslib.models.tiny import tiny_model_folder

    folder = tiny_model_folder(tmp_path / "model", vocab_size=len(tiny_tokenizer), hidden=32)
    made = config(
        model_name_or_path=str(folder), model_init_kwargs={"dtype": "float64", "attn_implementation": "eager"}
    )
    trainer = GRPOTrainer(made, lengths, train_dataset=ROWS)
    assert next(trainer.model.parameters()).dtype == torch.float64
    assert trainer.model.config._attn_implementation == "eager"
    with pytest.raises(ConfigError, match="not a torch dtype"):
        GRPOTrainer(
            config(model_name_or_path=str(folder), model_init_kwargs={"dtype": "flaot"}), lengths, train_dataset=ROWS
        )
    with pytest.raises(ConfigError, match="handed a model object"):
        GRPOTrainer(trainer.model, lengths, made, train_dataset=ROWS, processing_class=tiny_tokenizer)


def test_dropout_is_switched_off(train: Any, model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    train(go=False, disable_dropout=False)
    assert model.model.layers[0].self_attn.attention_dropout == 0.5
    train(go=False)
    assert model.model.layers[0].self_attn.attention_dropout == 0.0


def test_completions_and_phases_are_logged(train: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="atlaslib"):
        train(log_completions=True, logging_steps=1, activate_debugging_logs=True)
    messages = [record.message for record in caplog.records]
    assert sum(message.startswith("step 0, reward") for message in messages) == 8
    assert any(message.startswith("backward took") and "GiB" in message for message in messages)


def test_completions_table_goes_to_wandb(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    sent: list[dict[str, Any]] = []
    module = types.SimpleNamespace(
        run=types.SimpleNamespace(log=sent.append), Table=lambda columns, data: (columns, data)
    )
    monkeypatch.setitem(__import__("sys").modules, "wandb", module)
    train(log_completions=True, logging_steps=1)
    columns, data = sent[0]["completions"]
    assert columns == ["step", "prompt", "completion", "reward"]
    assert len(data) == 8


def test_min_completion_length(train: Any) -> None:
    trainer = train(min_completion_length=5, max_completion_length=5)
    assert {sample.num_trained_tokens for sample in trainer.step_samples} == {5}


def test_num_generations_eval(model: Any, tiny_tokenizer: Any, config: Any) -> None:
    seen: list[int] = []

    def watch(completions: list[str], **_: Any) -> list[float]:
        seen.append(len(completions))
        return [1.0] * len(completions)

    made = config(num_generations_eval=3)
    trainer = GRPOTrainer(
        model, watch, made, train_dataset=ROWS, eval_dataset=ROWS[:2], processing_class=tiny_tokenizer
    )
    assert trainer.evaluate()["eval_reward"] == 1.0
    assert seen == [6]


def test_chat_template_kwargs_reach_the_template(train: Any, tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mark }}"
    rows = [{"prompt": [{"role": "user", "content": f"q{n}"}]} for n in range(4)]
    trainer = train(rows=rows, chat_template_kwargs={"mark": "!"})
    assert trainer.step_samples
    assert all("!" in tiny_tokenizer.decode(sample.token_ids[:3]) for sample in trainer.step_samples)


def test_engine_kwargs_reach_the_engine(train: Any) -> None:
    trainer = train(engine_kwargs={"max_num_seqs": 3}, go=False)
    trainer.sampler_host.sync(0)
    assert trainer.sampler_host.engine.config.max_num_seqs == 3


def test_metrics_file_can_be_named_or_left_out(train: Any, tmp_path: Path) -> None:
    train(metrics_file="numbers.jsonl", output_dir=str(tmp_path / "a"))
    assert (tmp_path / "a" / "numbers.jsonl").is_file()
    train(metrics_file=None, output_dir=str(tmp_path / "b"))
    assert not list((tmp_path / "b").glob("*.jsonl"))


def test_packing_is_refused_where_attention_is_not_plain(model: Any) -> None:
    from atlaslib.trainers.batch_sizes import blank_sample, choose_layout

    samples = [blank_sample(0), blank_sample(0)]
    assert choose_layout("packed", samples, model) == "packed"
    model.config.attn_logit_softcapping = 30.0
    assert choose_layout("auto", samples, model) == "padded"
    with pytest.raises(ConfigError, match="plain causal attention"):
        choose_layout("packed", samples, model)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_blocks_give_the_same_numbers(model: Any) -> None:
    from atlaslib.trainers.compiled import CompiledModules

    ids = torch.tensor([[1, 2, 3, 4]])
    plain = model(ids).logits
    with CompiledModules(backend="eager")(model):
        assert "forward" in model.model.norm.__dict__
        torch.testing.assert_close(model(ids).logits, plain)
    assert "forward" not in model.model.norm.__dict__


@pytest.mark.parametrize("option", [{"torch_compile": True}, {"compile_modules": True, "gradient_checkpointing": True}])
def test_compiling_what_is_shared_is_refused(option: dict[str, Any], config: Any) -> None:
    with pytest.raises(ConfigError, match="compile_modules"):
        config(**option)


def test_loss_parameters_reach_the_loss(config: Any) -> None:
    from atlaslib.trainers.choices import estimator_of, loss_options, scale_of

    made = config(
        loss_type="dapo", epsilon=0.1, epsilon_high=0.3, delta=4.0, kl_estimator="k2", entropy_coef=0.01, importance_correction="tis",
        importance_correction_cap=3.0, importance_correction_level="sequence", distill_coef=0.5,
    )  # fmt: skip
    options = loss_options(made)
    assert (options.loss_type, options.epsilon, options.upper, options.delta, options.kl_estimator) == (
        "dapo",
        0.1,
        0.3,
        4.0,
        "k2",
    )
    assert (options.entropy_coef, options.importance_correction, options.importance_cap, options.importance_level) == (
        0.01,
        "tis",
        3.0,
        "sequence",
    )
    assert (options.distill_coef, options.max_completion_length) == (0.5, 5)
    assert (loss_options(config(loss_type="dapo")).upper, loss_options(config(loss_type="cispo")).upper) == (0.28, 4.0)
    assert [estimator_of(config(loss_type=kind)) for kind in ("grpo", "rloo", "reinforce++")] == [
        "group",
        "rloo",
        "batch",
    ]
    assert [scale_of(config(loss_type=kind)) for kind in ("grpo", "dr_grpo")] == ["group", "none"]


def test_samples_without_advantage_are_not_computed(train: Any, model: Any, tmp_path: Path) -> None:
    def half(completions: list[str], **_: Any) -> list[float]:
        return [0.0, 1.0, 0.0, 1.0] + [1.0] * 4

    start = {name: value.clone() for name, value in model.state_dict().items()}
    weights = []
    for skip in (True, False):
        model.load_state_dict(start)
        trainer = train(half, skip_zero_advantages=skip, packing="padded", output_dir=str(tmp_path / str(skip)))
        line = metrics(trainer)[0]
        assert line["train/skipped_share"] == (0.5 if skip else 0.0)
        assert line["train/num_samples"] == 8
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("gather", [True, False])
def test_zero3_gathers_weights_for_generation_or_not(gather: bool, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from atlaslib.generation.replica import ReplicaSampler
    from atlaslib.generation.transformers_sampler import TransformersSampler
    from atlaslib.trainers import samplers

    monkeypatch.setattr(samplers, "is_zero3", lambda trainer: True)
    trainer = train(ds3_gather_for_generation=gather, go=False)
    assert isinstance(trainer.sampler, ReplicaSampler if gather else TransformersSampler)
    if gather:
        with torch.no_grad():
            next(trainer.model.parameters()).add_(1.0)
        trainer.sampler_host.sync(1)
        copied = next(trainer.sampler_host.engine.model.parameters())
        assert copied is not next(trainer.model.parameters())
        assert torch.equal(copied, next(trainer.model.parameters()))
        assert trainer.sampler_host.engine.version == 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainable_layers_trains_the_top_and_builds_no_graph_below(checkpointing: bool, train: Any, model: Any) -> None:
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    outputs: list[bool] = []
    handle = model.model.layers[0].register_forward_hook(
        lambda module, args, output: (
            outputs.append((output[0] if isinstance(output, tuple) else output).requires_grad)
            if torch.is_grad_enabled()
            else None
        )
    )
    trainer = train(trainable_layers=1, warmup_ratio=0.0, gradient_checkpointing=checkpointing)
    handle.remove()
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    top = {name for name, _ in model.named_parameters() if name.startswith(("model.layers.1.", "model.norm."))}
    assert changed == top
    assert outputs
    assert checkpointing or not any(
        outputs
    )  # with checkpointing transformers wants gradients of the embeddings in any case
    optimized = {id(value) for group in trainer.optimizer.param_groups for value in group["params"]}
    assert optimized == {id(value) for name, value in model.named_parameters() if name in top}


def test_trainable_layers_has_the_gradients_of_full_training(tiny_tokenizer: Any, config: Any) -> None:
    gradients = []
    for layers in (None, 1):
        model = tiny_llama(len(tiny_tokenizer), hidden=32, eos_token_id=tiny_tokenizer.eos_token_id)
        options = {"trainable_layers": layers, "deterministic": True, "learning_rate": 0.0, "max_grad_norm": 1e9}
        trainer = GRPOTrainer(model, lengths, config(**options), train_dataset=ROWS, processing_class=tiny_tokenizer)
        found: dict[str, torch.Tensor] = {}
        for name, value in model.named_parameters():
            if value.requires_grad:
                value.register_post_accumulate_grad_hook(
                    lambda v, name=name, found=found: found.update({name: v.grad.clone()})
                )
        trainer.train()
        gradients.append(found)
    whole, top = gradients
    assert set(top) < set(whole)
    assert all(torch.allclose(top[name], whole[name], atol=1e-6) and top[name].abs().sum() > 0 for name in top)


def test_trainable_layers_beyond_the_model_or_with_an_adapter_say_so(model: Any, train: Any) -> None:
    from peft import LoraConfig

    from atlaslib.trainers.model_setup import train_last_layers, with_adapter

    with pytest.raises(ConfigError, match="trainable_layers is 3; LlamaForCausalLM has 2 layers"):
        train(trainable_layers=3, go=False)
    adapted = with_adapter(model, LoraConfig(target_modules=["q_proj"]), GRPOConfig("unused", report_to=[]))
    with pytest.raises(ConfigError, match="layers_to_transform"):
        train_last_layers(adapted, 1)
