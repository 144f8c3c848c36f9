"""GRPOTrainer in process: it learns, and the parts of a step do what they say."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from metric_lines import read_metrics

from atlaslib.errors import CheckpointError, ConfigError
from atlaslib.generation.replica import whole_copy
from atlaslib.trainers import GRPOConfig, GRPOTrainer, run_state
from atroposlib.errors import RewardComputationError


def rise(metrics: list[dict[str, float]]) -> float:
    rewards = [line["reward"] for line in metrics]
    return statistics.fmean(rewards[-3:]) - statistics.fmean(rewards[:3])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns_in_process(
    seed: int, small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any, letters: Any
) -> None:
    config = make_config(max_steps=30, seed=seed, logging_steps=100)
    GRPOTrainer(small_model(seed), letters, config, train_dataset=rows, processing_class=tiny_tokenizer).train()
    assert rise(read_metrics(config.output_dir)) > 0.3


def parameters(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_first_step_is_exactly_on_policy(
    small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any, letters: Any
) -> None:
    config = make_config(temperature=0.7, max_steps=1, beta=0.04)
    GRPOTrainer(small_model(), letters, config, train_dataset=rows, processing_class=tiny_tokenizer).train()
    (line,) = read_metrics(config.output_dir)
    assert line["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert line["policy/mismatch_abs"] < 1e-5
    assert line["kl"] == pytest.approx(0.0, abs=1e-8)
    assert line["rollout/staleness_max"] == 0.0
    for name in (
        "time/sampling_s",
        "time/scoring_s",
        "time/forward_s",
        "time/backward_s",
        "time/update_s",
        "time/step_s",
        "train/tokens_per_s",
        "train/loss",
        "train/grad_norm",
        "policy/entropy",
        "completion_length",
        "reward_std",
        "rewards/letter_share",
    ):
        assert name in line, name


def test_config_as_the_only_argument(
    tmp_path: Path, tiny_tokenizer: Any, make_config: Any, rows: Any, letters: Any
) -> None:
    from atlaslib.models.tiny import tiny_model_folder

    folder = tiny_model_folder(tmp_path / "model", vocab_size=len(tiny_tokenizer), hidden=32)
    config = make_config(model_name_or_path=str(folder), max_steps=1)
    trainer = GRPOTrainer(config, letters, train_dataset=rows)
    trainer.train()
    assert trainer.processing_class.eos_token_id == tiny_tokenizer.eos_token_id
    assert len(read_metrics(config.output_dir)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "nothing to train on"),
        ({"train_dataset": [{"prompt": "a"}]}, "no reward"),
    ],
)
def test_missing_parts_are_named(
    arguments: Any, message: str, small_model: Any, make_config: Any, tiny_tokenizer: Any
) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOTrainer(small_model(), args=make_config(), processing_class=tiny_tokenizer, **arguments)


def test_no_model_anywhere_is_a_clear_error(make_config: Any) -> None:
    with pytest.raises(ConfigError, match="model_name_or_path"):
        GRPOTrainer(make_config())


def test_a_failing_reward_sets_samples_aside(
    small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any
) -> None:
    def fragile(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        if "say a:" in prompts:
            raise RuntimeError("cannot grade this one")
        return [float(len(text)) for text in completions]

    config = make_config(max_steps=1, per_device_train_batch_size=64, num_generations=8)
    GRPOTrainer(small_model(), fragile, config, train_dataset=rows, processing_class=tiny_tokenizer).train()
    (line,) = read_metrics(config.output_dir)
    assert line["rewards/fragile_failed"] == 8.0
    assert line["rollout/num_set_aside"] == 8.0
    assert line["train/num_samples"] == 56.0


@pytest.mark.parametrize("prompts", [1, 8])
def test_a_reward_that_never_works_ends_the_run(
    prompts: int, small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any
) -> None:
    def broken(completions: list[str], **_: Any) -> list[float]:
        raise RuntimeError("cannot grade anything")

    config = make_config(max_steps=1, per_device_train_batch_size=2 * prompts, num_generations=2)
    trainer = GRPOTrainer(small_model(), broken, config, train_dataset=rows, processing_class=tiny_tokenizer)
    with pytest.raises(RewardComputationError, match=r"'broken' failed on every completion .*cannot grade anything"):
        trainer.train()


def test_a_checkpoint_of_a_run_with_fsdp_needs_it(
    small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any, letters: Any, tmp_path: Path
) -> None:
    (tmp_path / "trainer_state.json").write_text("{}")
    run_state.check_fsdp(str(tmp_path), enabled=False)
    with pytest.raises(CheckpointError, match="written without FSDP and this run is with it; go on as it began"):
        run_state.check_fsdp(str(tmp_path), enabled=True)
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    run_state.check_fsdp(str(tmp_path), enabled=True)
    trainer = GRPOTrainer(small_model(), letters, make_config(), train_dataset=rows, processing_class=tiny_tokenizer)
    with pytest.raises(CheckpointError, match="written with FSDP and this run is without it"):
        trainer.train(resume_from_checkpoint=str(tmp_path))


def test_an_output_dir_that_cannot_be_made(
    small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any, letters: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    config = make_config(output_dir=str(tmp_path / "file" / "out"))
    with pytest.raises(ConfigError, match="output_dir: the folder"):
        GRPOTrainer(small_model(), letters, config, train_dataset=rows, processing_class=tiny_tokenizer)


def test_truncated_completions_can_be_masked(
    small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any, letters: Any
) -> None:
    config = make_config(max_steps=1, mask_truncated_completions=True, max_completion_length=3)
    model = small_model()
    before = parameters(model)
    GRPOTrainer(model, letters, config, train_dataset=rows, processing_class=tiny_tokenizer).train()
    (line,) = read_metrics(config.output_dir)
    assert line["completions/truncated_share"] > 0.5
    assert line["train/num_trained_tokens"] < 0.5 * 16 * 3
    assert before.shape == parameters(model).shape


@pytest.mark.parametrize("from_copy", [False, True], ids=["own weights", "copy of a sharded policy"])
def test_sampling_ahead_stays_within_the_bound(
    from_copy: bool, small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any, letters: Any
) -> None:
    config = make_config(max_steps=8, max_staleness=2)
    trainer = GRPOTrainer(small_model(), letters, config, train_dataset=rows, processing_class=tiny_tokenizer)
    if from_copy:
        trainer.sampler_host._replica = whole_copy(trainer.model)  # as with FSDP
    trainer.train()
    staleness = [line["rollout/staleness_max"] for line in read_metrics(config.output_dir)]
    assert staleness[0] == 0.0
    assert max(staleness) in {1.0, 2.0}
    assert all(line["rollout/num_refused_stale"] == 0 for line in read_metrics(config.output_dir))


def test_several_iterations_use_one_generation(
    small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any
) -> None:
    calls: list[int] = []

    def counted(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(completions))
        return [float(len(set(text))) for text in completions]

    config = make_config(max_steps=6, num_iterations=3)
    GRPOTrainer(small_model(), counted, config, train_dataset=rows, processing_class=tiny_tokenizer).train()
    assert calls == [16, 16]
    ratios = [line["policy/ratio_mean"] for line in read_metrics(config.output_dir)]
    assert ratios[0] == pytest.approx(1.0, abs=1e-5)
    assert ratios[2] != pytest.approx(1.0, abs=1e-5)
    assert ratios[3] == pytest.approx(1.0, abs=1e-5)


def test_dynamic_sampling_refills_groups_that_differ(
    small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any
) -> None:
    def only_some(completions: list[str], letter: list[str], **_: Any) -> list[float]:
        return [
            float(len(text)) * 0 + (i % 2 if name in "abcd" else 1.0)
            for i, (text, name) in enumerate(zip(completions, letter, strict=True))
        ]

    config = make_config(max_steps=2, dynamic_sampling=True, per_device_train_batch_size=16, num_generations=4)
    GRPOTrainer(small_model(), only_some, config, train_dataset=rows, processing_class=tiny_tokenizer).train()
    lines = read_metrics(config.output_dir)
    assert all(line["rollout/zero_variance_share"] == 0.0 for line in lines)
    assert all(line["train/num_samples"] == 16 for line in lines)
    assert max(line.get("rollout/dynamic_rounds", 0) for line in lines) >= 1


def test_dynamic_sampling_gives_up_after_so_many_refills(
    small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any
) -> None:
    calls: list[int] = []

    def all_alike(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(completions))
        return [1.0] * len(completions)

    config = make_config(max_steps=1, dynamic_sampling=True, dynamic_sampling_max_rounds=3)
    GRPOTrainer(small_model(), all_alike, config, train_dataset=rows, processing_class=tiny_tokenizer).train()
    assert calls == [16] * (1 + 3)
    assert read_metrics(config.output_dir)[0]["rollout/dynamic_rounds"] == 3


def test_evaluation_reports_the_reward_and_the_best_model_is_loaded(
    small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any, letters: Any
) -> None:
    config = make_config(
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
    )
    trainer = GRPOTrainer(
        small_model(), letters, config, train_dataset=rows, eval_dataset=rows[:4], processing_class=tiny_tokenizer
    )
    trainer.train()
    rewards = {entry["step"]: entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry}
    assert sorted(rewards) == [1, 2, 3, 4]
    best = max(rewards, key=lambda step: (rewards[step], -step))
    assert trainer.state.best_model_checkpoint is not None
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert trainer.evaluate()["eval_reward"] == pytest.approx(rewards[best])


def test_lora_uses_the_base_as_reference(
    small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any, letters: Any
) -> None:
    from peft import LoraConfig

    config = make_config(max_steps=3, beta=0.1)
    model = small_model()
    before = parameters(model)
    peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model, letters, config, train_dataset=rows, processing_class=tiny_tokenizer, peft_config=peft_config
    )
    assert trainer.reference is None
    trainer.train()
    lines = read_metrics(config.output_dir)
    assert lines[0]["kl"] == pytest.approx(0.0, abs=1e-8)
    assert lines[-1]["kl"] > 1e-7
    base = torch.cat([p.detach().flatten() for name, p in trainer.model.named_parameters() if "lora" not in name])
    assert torch.equal(base, before)


def test_a_reference_that_cannot_move_is_an_error(small_model: Any, make_config: Any, tiny_tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="sync_ref_model=True with an adapter"):
        GRPOTrainer(
            small_model(),
            args=make_config(beta=0.1, sync_ref_model=True),
            processing_class=tiny_tokenizer,
            peft_config=adapter,
        )


def test_gradient_checkpointing_gives_the_same_update(
    small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any, letters: Any, tmp_path: Path
) -> None:
    results = []
    for checkpointing in (False, True):
        model = small_model()
        config = make_config(
            max_steps=2, gradient_checkpointing=checkpointing, output_dir=str(tmp_path / str(checkpointing))
        )
        GRPOTrainer(model, letters, config, train_dataset=rows, processing_class=tiny_tokenizer).train()
        results.append(parameters(model))
    # Adam divides by the size of a gradient: the rounding of one that is nearly 0 shows, a hundredth of a step at most
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-4)


def test_stored_completions(small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any, letters: Any) -> None:
    import csv

    config = make_config(max_steps=1, save_completions_probability=1.0)
    for _ in range(2):  # a step that is done again is stored once
        GRPOTrainer(small_model(), letters, config, train_dataset=rows, processing_class=tiny_tokenizer).train()
    with (Path(config.output_dir) / "stored_completions" / "0.csv").open(newline="") as file:
        stored = list(csv.DictReader(file))
    assert len(stored) == 16
    assert set(stored[0]) == {"step", "prompt", "completion", "reward"}


def test_the_default_config_names_a_folder() -> None:
    from atlaslib.trainers.choices import default_config

    assert isinstance(default_config("org/name"), GRPOConfig)
    assert default_config("org/name").output_dir == "name-GRPO"


def test_gradients_are_exchanged_and_the_optimizer_steps_only_after_the_last_piece(
    small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any, letters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        max_steps=1, per_device_train_batch_size=8, gradient_accumulation_steps=2, backprop_accumulation_steps=4
    )
    trainer = GRPOTrainer(small_model(), letters, config, train_dataset=rows, processing_class=tiny_tokenizer)
    backward, boundaries = trainer.accelerator.backward, []

    def noted(loss: Any, **kwargs: Any) -> None:
        boundaries.append(trainer.accelerator.sync_gradients)
        backward(loss, **kwargs)

    monkeypatch.setattr(trainer.accelerator, "backward", noted)
    trainer.train()
    assert boundaries == [False] * 7 + [True]


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo"])
def test_pieces_of_a_backward_pass_give_the_gradients_of_the_whole(
    loss_type: str, small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any, letters: Any
) -> None:
    weights = []
    for pieces in (None, 4):
        config = make_config(
            max_steps=1, loss_type=loss_type, backprop_accumulation_steps=pieces, optim="sgd", max_grad_norm=0.0
        )
        model = small_model()
        GRPOTrainer(model, letters, config, train_dataset=rows, processing_class=tiny_tokenizer).train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-6)
    assert (
        float((weights[0] - torch.cat([p.detach().flatten() for p in small_model().parameters()])).abs().max()) > 1e-4
    )
