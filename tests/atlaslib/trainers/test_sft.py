"""Supervised warm start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atlaslib.errors import ConfigError
from atlaslib.models.tiny import tiny_llama
from atlaslib.trainers.grpo_config import GRPOConfig
from atlaslib.trainers.sft import SFTTrainer, completion_text

ROWS = [{"prompt": f"{letter}=", "completion": letter * 2} for letter in "abcd"]


def config(folder: Path, **changes: Any) -> GRPOConfig:
    values: dict[str, Any] = {
        "beta": 0.0,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "learning_rate": 3e-3,
        "report_to": "none",
        "save_strategy": "no",
    }
    return GRPOConfig(
        output_dir=str(folder), **{**values, "use_cpu": True, "max_steps": 120, "warmup_ratio": 0.0, **changes}
    )


def test_learns_given_answers_and_when_to_stop(tmp_path: Path, tiny_tokenizer: Any) -> None:
    model = tiny_llama()
    trainer = SFTTrainer(
        model, args=config(tmp_path), train_dataset=ROWS, eval_dataset=ROWS, processing_class=tiny_tokenizer
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert before > 5.0
    assert after < 0.3
    ids = tiny_tokenizer("c=", return_tensors="pt")
    made = model.generate(**ids, max_new_tokens=5, do_sample=False)[0, 2:].tolist()
    assert made[:3] == [*tiny_tokenizer("cc")["input_ids"], tiny_tokenizer.eos_token_id]


def test_loss_is_plain_cross_entropy(tmp_path: Path, tiny_tokenizer: Any) -> None:
    import torch

    model = tiny_llama()
    trainer = SFTTrainer(
        model, args=config(tmp_path), train_dataset=ROWS, eval_dataset=ROWS, processing_class=tiny_tokenizer
    )
    losses = []
    for row in ROWS:
        prompt, answer = (
            tiny_tokenizer(row["prompt"])["input_ids"],
            [*tiny_tokenizer(row["completion"])["input_ids"], 2],
        )
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0].double(), -1)
        losses += [-float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(answer)]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_reference_has_no_part(tmp_path: Path, tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"beta is 0\.04"):
        SFTTrainer(tiny_llama(), args=config(tmp_path, beta=0.04), train_dataset=ROWS, processing_class=tiny_tokenizer)


def test_completion_forms() -> None:
    assert completion_text({"completion": [{"role": "assistant", "content": "x"}]}) == "x"
    with pytest.raises(ConfigError, match="give text"):
        completion_text({"completion": 3})


def test_the_best_model_is_the_one_with_the_lowest_loss(tmp_path: Path, tiny_tokenizer: Any) -> None:
    args = config(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
    trainer = SFTTrainer(
        tiny_llama(), args=args, train_dataset=ROWS, eval_dataset=ROWS, processing_class=tiny_tokenizer
    )
    trainer.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert losses[3] == min(losses.values())
    assert str(trainer.state.best_model_checkpoint).endswith("checkpoint-3")


def test_nothing_is_sampled_so_no_sampler_is_made(tmp_path: Path, tiny_tokenizer: Any) -> None:
    trainer = SFTTrainer(
        tiny_llama(),
        args=config(tmp_path, max_steps=1),
        train_dataset=ROWS,
        eval_dataset=ROWS,
        processing_class=tiny_tokenizer,
    )
    trainer.train()
    trainer.evaluate()
    assert trainer.sampler_host.engine is None


def test_evaluation_runs_without_dropout(tmp_path: Path, tiny_tokenizer: Any) -> None:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    args = config(tmp_path, max_steps=1, disable_dropout=False)
    trainer = SFTTrainer(model, args=args, train_dataset=ROWS, eval_dataset=ROWS, processing_class=tiny_tokenizer)
    model.train()
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]
    assert model.training
