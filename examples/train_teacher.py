"""Teach a teacher: its reward is how much better a frozen student answers with its help.

    python examples/train_teacher.py                  two tiny models made on the spot, about a minute
    python examples/train_teacher.py --steps 2 --warmup-steps 20

For your own models: `TeacherGRPOTrainer(GRPOConfig(model_name_or_path=TEACHER, ...), student_model=STUDENT, train_dataset=rows)` with rows
of `prompt` and `ground_truth`; the templates have good defaults.
"""

from __future__ import annotations

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--warmup-steps", type=int, default=200)
parser.add_argument("--output", type=Path, default=Path("runs/teacher"))
options = parser.parse_args()

from atlaslib.launch.teacher_models import ROWS, TEMPLATES, build_teaching_models  # noqa: E402 (--help answers before torch is imported)
from atlaslib.trainers.grpo_config import GRPOConfig  # noqa: E402
from atlaslib.trainers.teacher_trainers import TeacherGRPOTrainer  # noqa: E402

build_teaching_models(options.output, student_steps=options.warmup_steps, teacher_steps=options.warmup_steps)
config = GRPOConfig(
    output_dir=str(options.output / "checkpoints"),
    model_name_or_path=str(options.output / "model"),
    max_steps=options.steps,
    per_device_train_batch_size=32,
    num_generations=8,
    learning_rate=2e-3,
    warmup_ratio=0.0,
    temperature=1.0,
    max_completion_length=8,
    beta=0.0,
    save_strategy="no",
    report_to="none",
    **TEMPLATES,
)
trainer = TeacherGRPOTrainer(
    config, student_model=str(options.output / "student"), train_dataset=ROWS, logging_prob=0.1
)
before = trainer.evaluate(ROWS * 8)
trainer.train()
after = trainer.evaluate(ROWS * 8)
for name in ("eval_baseline_accuracy", "eval_student_accuracy", "eval_reward"):
    print(f"{name:<24}{before[name]:.2f} before, {after[name]:.2f} after")
