"""On-policy distillation."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from small_config import small_config

from atlaslib.errors import ConfigError
from atlaslib.models.tiny import tiny_llama
from atlaslib.trainers.gkd import GKDTrainer
from atlaslib.trainers.grpo_config import GRPOConfig
from atlaslib.trainers.sft import SFTTrainer
from atroposlib.testing.tiny_tokenizer import build_tiny_tokenizer

PROMPTS = [{"prompt": f"{letter}="} for letter in "abcd"]


def config(folder: Path, **changes: Any) -> GRPOConfig:
    return small_config(folder, **{"max_completion_length": 4, "max_steps": 40, **changes})


def make(folder: Path, tokenizer: Any, **changes: Any) -> GKDTrainer:
    options = {"teacher_model": sharp_teacher(), "mix": 0.5, "top_k": 16} | {
        k: changes.pop(k) for k in ("teacher_model", "mix", "top_k") if k in changes
    }
    return GKDTrainer(tiny_llama(seed=2), config(folder, **changes), PROMPTS, processing_class=tokenizer, **options)


@functools.cache
def sharp_teacher() -> Any:
    """A teacher that knows something: it doubles the letter before the sign and stops."""
    teacher = tiny_llama(seed=1)
    rows = [{"prompt": row["prompt"], "completion": row["prompt"][0] * 2} for row in PROMPTS]
    with tempfile.TemporaryDirectory() as folder:
        args = config(Path(folder), max_steps=80, per_device_train_batch_size=4, learning_rate=5e-3)
        SFTTrainer(teacher, args=args, train_dataset=rows, processing_class=build_tiny_tokenizer()).train()
    return teacher


def test_teacher_scores_the_very_tokens_of_the_student(tmp_path: Path, tiny_tokenizer: Any) -> None:
    trainer = make(tmp_path, tiny_tokenizer)
    made = trainer.rollout(PROMPTS[:2], group_ids=["a", "b"], positions=[0, 1], seed=3, num_generations=2)
    trainer.score(made)
    for rollout in made:
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(trainer.teacher(ids).logits[0].double(), -1)
        start = len(rollout.prompt_ids) - 1
        expected = [float(logprobs[start + i, token]) for i, token in enumerate(rollout.completion_ids)]
        assert rollout.sampler_logprobs is not None
        gaps = [theirs - own for theirs, own in zip(expected, rollout.sampler_logprobs, strict=True)]
        assert rollout.extra["teacher_gaps"] == pytest.approx(gaps, abs=1e-4)
        assert rollout.reward == pytest.approx(sum(gaps) / len(gaps), abs=1e-4)
        assert rollout.extra["teacher_candidates"][0] == logprobs[start].topk(16).indices.tolist()


def learned(folder: Path, tokenizer: Any, *, mix: float, seed: int) -> tuple[float, float]:
    """Minus the reverse KL per token, before and after."""
    trainer = make(folder, tokenizer, mix=mix, seed=seed, max_steps=80)
    before = trainer.evaluate(PROMPTS * 4)["eval_reward"]
    trainer.train()
    return before, trainer.evaluate(PROMPTS * 4)["eval_reward"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_student_becomes_the_teacher(tmp_path: Path, tiny_tokenizer: Any, seed: int) -> None:
    before, after = learned(tmp_path, tiny_tokenizer, mix=0.5, seed=seed)
    assert before < -3.0
    assert after > before + 3.5


def test_forward_kl_alone_learns_too(tmp_path: Path, tiny_tokenizer: Any) -> None:
    before, after = learned(tmp_path, tiny_tokenizer, mix=0.0, seed=0)
    assert after > before + 3.0


def test_other_vocabulary_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="the teacher has 100 token ids and the student 259"):
        make(tmp_path, tiny_tokenizer, teacher_model=tiny_llama(100))


def test_bad_settings_are_named(tmp_path: Path, tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="mix is 2"):
        make(tmp_path, tiny_tokenizer, mix=2)
    with pytest.raises(ConfigError, match="top_k is 0"):
        make(tmp_path, tiny_tokenizer, top_k=0)
