"""The two tiny models of `atropos quickstart --teacher`: a frozen student, and a teacher that has to learn what helps it.

The student repeats the letter it is taught (``b=`` -> ``#### b``) and is wrong when nobody teaches it. The teacher knows letters, and
names the asked one only a little more often than the others: what it is rewarded for is the student getting better.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

LETTERS = "abcd"
ROWS = [{"prompt": letter, "ground_truth": letter} for letter in LETTERS]
TEMPLATES = {
    "student_baseline_template": "{question}?",
    "student_diagnostic_template": "{question}!",
    "teacher_adaptive_template": "{question}{approach}",
    "student_with_teaching_template": "{teaching}=",
}


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def student_rows() -> list[dict[str, Any]]:
    """Demonstrations for the student."""
    rows = [{"prompt": _chat(f"{letter}="), "completion": f"#### {letter}"} for letter in LETTERS]
    rows += [{"prompt": _chat(f"{letter}?"), "completion": "#### z"} for letter in LETTERS]
    return rows + [{"prompt": _chat(f"{letter}!"), "completion": "p"} for letter in LETTERS]


def teacher_rows() -> list[dict[str, Any]]:
    """Demonstrations for the teacher: every letter once, the right one twice."""
    pairs = [(question, answer) for question in LETTERS for answer in [*LETTERS, question]]
    return [{"prompt": _chat(f"{question}p"), "completion": answer} for question, answer in pairs]


def build_teaching_models(run_dir: Path, *, seed: int = 0, student_steps: int = 220, teacher_steps: int = 200) -> None:
    """Make `RUN/student` and `RUN/model` (the teacher) unless they are there."""
    _build(run_dir / "student", student_rows(), seed=5, steps=student_steps)
    _build(run_dir / "model", teacher_rows(), seed=6 + seed, steps=teacher_steps)


def _build(folder: Path, rows: list[dict[str, Any]], *, seed: int, steps: int) -> None:
    if (folder / "config.json").exists():
        return
    from transformers import AutoTokenizer

    from atlaslib.models.tiny import tiny_llama
    from atlaslib.trainers.grpo_config import GRPOConfig
    from atlaslib.trainers.sft import SFTTrainer
    from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer

    partial = folder.with_name(folder.name + ".partial")
    tokenizer = AutoTokenizer.from_pretrained(str(make_tiny_tokenizer(partial)))
    model = tiny_llama(seed=seed)
    args = GRPOConfig(
        output_dir=str(partial / "scratch"),
        max_steps=steps,
        per_device_train_batch_size=len(rows),
        num_generations=len(rows),
        learning_rate=5e-3,
        beta=0.0,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        warmup_ratio=0.0,
        disable_tqdm=True,
        metrics_file=None,
    )
    SFTTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer).train()
    model.save_pretrained(str(partial))
    os.replace(partial, folder)
