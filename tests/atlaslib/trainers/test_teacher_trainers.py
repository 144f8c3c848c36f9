"""The teacher trainer, with a real tiny student and a real tiny teacher on the embedded engine."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_config import small_config

from atlaslib.errors import ConfigError, UnsupportedModelError
from atlaslib.generation.students import StudentReply
from atlaslib.models.tiny import tiny_llama
from atlaslib.trainers.grpo_config import GRPOConfig
from atlaslib.trainers.samplers import CACHE_SHARE
from atlaslib.trainers.sft import SFTTrainer
from atlaslib.trainers.teacher_trainers import TeacherGRPOTrainer
from atlaslib.trainers.teaching_round import teaching_metrics, wilson_interval
from atroposlib.testing.tiny_tokenizer import build_tiny_tokenizer

LETTERS = "abcd"
ROWS = [{"prompt": letter, "ground_truth": letter} for letter in LETTERS]
TEMPLATES = {
    "student_baseline_template": "{question}?",
    "student_diagnostic_template": "{question}!",
    "teacher_adaptive_template": "{question}{approach}",
    "student_with_teaching_template": "{teaching}=",
}


def config(folder: Path, **changes: Any) -> GRPOConfig:
    return small_config(folder, **{"max_completion_length": 8, "max_steps": 2, **TEMPLATES, **changes})


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def supervised(rows: list[dict[str, Any]], *, seed: int, steps: int) -> Any:
    model = tiny_llama(seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        args = config(
            Path(folder),
            max_steps=steps,
            per_device_train_batch_size=len(rows),
            num_generations=len(rows),
            learning_rate=5e-3,
        )
        SFTTrainer(model, args=args, train_dataset=rows, processing_class=build_tiny_tokenizer()).train()
    return model


@functools.cache
def student() -> Any:
    """A student that repeats the letter it is taught, and knows nothing without teaching."""
    rows = [{"prompt": chat(f"{letter}="), "completion": f"#### {letter}"} for letter in LETTERS]
    rows += [{"prompt": chat(f"{letter}?"), "completion": "#### z"} for letter in LETTERS]
    rows += [{"prompt": chat(f"{letter}!"), "completion": "p"} for letter in LETTERS]
    return supervised(rows, seed=5, steps=220)


@functools.cache
def untrained_teacher() -> Any:
    """A teacher after a warm start: it names some letter, the right one a little more often than the others."""
    pairs = [(question, answer) for question in LETTERS for answer in [*LETTERS, question]]
    return supervised(
        [{"prompt": chat(f"{question}p"), "completion": answer} for question, answer in pairs], seed=6, steps=200
    )


def copy_of(model: Any) -> Any:
    made = tiny_llama()
    made.load_state_dict(model.state_dict())
    return made


class ScriptedStudent:
    """A fake student: answers from what it is asked and remembers it."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def answer(self, chats: Sequence[list[dict[str, str]]], settings: Any, *, seed: int) -> list[StudentReply]:
        self.asked.append([messages[-1]["content"] for messages in chats])
        return [
            StudentReply(text=f"#### {messages[-1]['content'][0]}", num_tokens=settings.max_tokens)
            for messages in chats
        ]


def make(folder: Path, **changes: Any) -> TeacherGRPOTrainer:
    options = {
        name: changes.pop(name)
        for name in list(changes)
        if name in {"student_model", "reward_funcs", "train_dataset", "logging_prob"}
    }
    options.setdefault("train_dataset", ROWS)
    return TeacherGRPOTrainer(
        tiny_llama(), args=config(folder, **changes), processing_class=build_tiny_tokenizer(), **options
    )


def rollouts(trainer: TeacherGRPOTrainer, rows: list[dict[str, Any]], n: int = 2) -> Any:
    return trainer.rollout(
        rows, group_ids=[str(i) for i in range(len(rows))], positions=list(range(len(rows))), seed=1, num_generations=n
    )


def test_baseline_and_probe_are_asked_once_per_prompt(tmp_path: Path) -> None:
    asked = ScriptedStudent()
    rollouts(make(tmp_path, student_model=asked), ROWS[:2], n=3)
    assert asked.asked[:2] == [["a?", "b?"], ["a!", "b!"]]
    assert len(asked.asked[2]) == 6


def test_a_student_answers_the_same_whichever_process_asks(tmp_path: Path) -> None:
    trainer = make(tmp_path, student_model=tiny_llama(seed=3), max_probe_tokens=8)

    def texts(first: int, last: int) -> list[tuple[str, str, str]]:
        made = trainer.rollout(
            ROWS[first:last],
            group_ids=["g"] * (last - first),
            positions=range(first, last),
            seed=1,
            num_generations=2,
        )
        columns = ("baseline_responses", "student_approaches", "student_responses")
        return [tuple(rollout.extra[name] for name in columns) for rollout in made]

    whole = texts(0, 4)
    assert texts(0, 2) + texts(2, 4) == whole


def test_a_student_that_takes_only_a_seed_gets_another_one_in_each_process(tmp_path: Path) -> None:
    seeds: list[int] = []

    class SeedStudent(ScriptedStudent):
        def answer(self, chats: Sequence[list[dict[str, str]]], settings: Any, *, seed: int) -> list[StudentReply]:
            seeds.append(seed)
            return super().answer(chats, settings, seed=seed)

    trainer = make(tmp_path, student_model=SeedStudent())
    for first in (0, 2):
        trainer.rollout(
            ROWS[first : first + 2],
            group_ids=["g"] * 2,
            positions=[first, first + 1],
            seed=1,
            num_generations=2,
        )
    assert len(set(seeds)) == 6


def test_teacher_is_trained_on_exactly_what_it_was_sampled_with(tmp_path: Path) -> None:
    trainer = make(tmp_path, student_model=ScriptedStudent())
    made = rollouts(trainer, ROWS[:1])
    tokenizer = trainer.processing_class
    shown = tokenizer.apply_chat_template(chat("a#### a"), tokenize=False, add_generation_prompt=True)
    for rollout in made:
        assert tokenizer.decode(rollout.prompt_ids) == shown
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(trainer.model(ids).logits[0], -1)
        start = len(rollout.prompt_ids) - 1
        expected = [float(logprobs[start + i, token]) for i, token in enumerate(rollout.completion_ids)]
        assert rollout.sampler_logprobs == pytest.approx(expected, abs=1e-4)


def test_rewards_see_every_role_and_its_length(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def reward(**columns: Any) -> list[float]:
        seen.update(columns)
        return [0.0] * len(columns["completions"])

    trainer = make(tmp_path, student_model=ScriptedStudent(), reward_funcs=reward, max_probe_tokens=5)
    made = rollouts(trainer, [{"prompt": "a", "ground_truth": "a", "validation": "v"}], n=2)
    trainer.score(made)
    assert seen["questions"] == ["a", "a"]
    assert seen["student_approaches"] == ["#### a"] * 2
    assert seen["approach_lengths"] == [5, 5]
    assert seen["baseline_lengths"] == [8, 8]
    assert seen["baseline_solutions"] == ["a", "a"]
    assert seen["ground_truths"] == ["a", "a"]
    assert seen["validation"] == ["v", "v"]
    assert seen["teachings"] == [rollout.completion_text.strip() for rollout in made]
    assert len(seen["teaching_lengths"]) == len(seen["student_responses"]) == 2


def test_metrics_and_interval() -> None:
    class Row:
        def __init__(self, base: str, taught: str, reward: float) -> None:
            self.reward = reward
            self.extra = {
                "baseline_solutions": base,
                "solutions": taught,
                "ground_truths": "1",
                "teacher_response_lengths": 50,
                "approach_lengths": 4,
            }

    made: Any = [Row("1", "1", 0.5), Row("0", "1", 1.5), Row("1", "0", -2.0), Row("0", "0", 0.0)]
    metrics = teaching_metrics(made)
    assert (metrics["student_accuracy"], metrics["baseline_accuracy"], metrics["accuracy_delta"]) == (0.5, 0.5, 0.0)
    assert (metrics["improvement_rate"], metrics["degradation_rate"]) == (0.25, 0.25)
    assert metrics["improvement_rate_low"] < 0.25 < metrics["improvement_rate_high"]
    assert (metrics["teaching_length_mean"], metrics["teaching_length_std"], metrics["token_efficiency"]) == (
        50.0,
        0.0,
        0.0,
    )
    assert wilson_interval(0, 10)[0] == 0.0
    assert wilson_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_trains_saves_and_evaluates(tmp_path: Path) -> None:
    """All four built-in templates, the reference as the student, an evaluation that reports teaching."""
    unset = dict.fromkeys(TEMPLATES)
    trainer = make(
        tmp_path,
        reward_funcs=lambda completions, **_: [1.0 + i for i in range(len(completions))],
        max_probe_tokens=4,
        beta=0.02,
        logging_prob=1.0,
        **unset,
    )
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    assert trainer.state.global_step == 2
    assert not torch.equal(before, trainer.model.lm_head.weight)
    saved = sorted((tmp_path / "successful_teaching").iterdir())
    assert len(saved) == 32
    record = json.loads(saved[0].read_text())
    assert (record["step"], record["prompt"] in LETTERS, record["ground_truth"] in LETTERS) == (0, True, True)
    assert len((tmp_path / "teacher_chats" / "step_000001.jsonl").read_text().splitlines()) == 16
    values = trainer.evaluate(ROWS)
    assert {"eval_reward", "eval_student_accuracy", "eval_baseline_accuracy", "eval_improvement_rate"} <= values.keys()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["student_accuracy"] == 0.0


def test_the_students_engine_leaves_the_update_its_memory(tmp_path: Path) -> None:
    engine = make(tmp_path, student_model=tiny_llama(seed=5)).student._sampler.engine  # type: ignore[attr-defined]
    assert engine.config.memory_fraction == CACHE_SHARE


def test_a_student_the_engine_does_not_know_answers_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    odd = MambaForCausalLM(
        MambaConfig(vocab_size=259, hidden_size=16, num_hidden_layers=1, state_size=4, pad_token_id=0, eos_token_id=2)
    )
    trainer = make(tmp_path, student_model=odd, max_probe_tokens=3)
    assert "instead of the embedded engine" in caplog.text
    (start,) = trainer.teaching.ask_student(ROWS[:1], seed=1, positions=[0])
    assert 1 <= start.probe.num_tokens <= 3
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        make(tmp_path, student_model=odd, sampler="engine")


def test_unknown_placeholder_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="teacher_adaptive_template: unknown placeholder"):
        make(tmp_path, student_model=ScriptedStudent(), teacher_adaptive_template="{queston}")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_teacher_learns_to_teach(tmp_path: Path, seed: int) -> None:
    trainer = TeacherGRPOTrainer(
        copy_of(untrained_teacher()),
        args=config(
            tmp_path, max_steps=30, seed=seed, per_device_train_batch_size=32, num_generations=8, learning_rate=2e-3
        ),
        train_dataset=ROWS,
        processing_class=build_tiny_tokenizer(),
        student_model=student(),
    )
    before = trainer.evaluate(ROWS * 8)
    trainer.train()
    after = trainer.evaluate(ROWS * 8)
    assert before["eval_baseline_accuracy"] <= 0.1
    assert before["eval_student_accuracy"] < 0.6
    assert after["eval_student_accuracy"] > before["eval_student_accuracy"] + 0.25
    assert after["eval_reward"] > before["eval_reward"] + 0.5
