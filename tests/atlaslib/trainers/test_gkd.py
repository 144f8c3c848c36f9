"""On-policy distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from atlaslib.errors import ConfigError
from atlaslib.models.tiny import tiny_llama
from atlaslib.trainers.gkd import GKDTrainer
from atlaslib.trainers.grpo_config import GRPOConfig

PROMPTS = [{"prompt": f"{a}{b}"} for a in "abcd" for b in "efgh"]


def config(folder: Path, **changes: Any) -> GRPOConfig:
    values: dict[str, Any] = {
        "beta": 0.0,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "temperature": 1.0,
        "learning_rate": 3e-3,
    }
    values |= {
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "max_completion_length": 8,
        "warmup_ratio": 0.0,
        "max_steps": 40,
    }
    return GRPOConfig(output_dir=str(folder), **{**values, **changes})


def make(folder: Path, tokenizer: Any, **changes: Any) -> GKDTrainer:
    options = {"teacher_model": sharp_teacher(), "mix": 0.5, "top_k": 16} | {
        k: changes.pop(k) for k in ("teacher_model", "mix", "top_k") if k in changes
    }
    return GKDTrainer(tiny_llama(seed=2), config(folder, **changes), PROMPTS, processing_class=tokenizer, **options)


def sharp_teacher() -> Any:
    """A teacher with clear preferences: a random model with a louder head."""
    teacher = tiny_llama(seed=1)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(6.0)
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


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
def test_the_gap_to_the_teacher_shrinks(tmp_path: Path, tiny_tokenizer: Any, mix: float) -> None:
    rewards: list[float] = []
    for seed in (0, 1, 2):
        trainer = make(tmp_path / str(seed), tiny_tokenizer, mix=mix, seed=seed)
        before = trainer.evaluate(PROMPTS)["eval_reward"]
        trainer.train()
        rewards.append(trainer.evaluate(PROMPTS)["eval_reward"] - before)
    assert min(rewards) > 0.25, rewards


def test_other_vocabulary_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="the teacher has 100 token ids and the student 259"):
        make(tmp_path, tiny_tokenizer, teacher_model=tiny_llama(100))


def test_bad_settings_are_named(tmp_path: Path, tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="mix is 2"):
        make(tmp_path, tiny_tokenizer, mix=2)
    with pytest.raises(ConfigError, match="top_k is 0"):
        make(tmp_path, tiny_tokenizer, top_k=0)
