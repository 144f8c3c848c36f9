"""On-policy distillation: the student samples, the teacher scores the very same tokens, the student moves towards it.

python examples/distill.py                  two tiny models made on the spot: the teacher knows the task, the student guesses
python examples/distill.py --steps 2 --warmup-steps 20
"""

from __future__ import annotations

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--warmup-steps", type=int, default=200)
parser.add_argument("--output", type=Path, default=Path("runs/distill"))
options = parser.parse_args()

from atlaslib.launch.quickstart_model import build_quickstart_model  # noqa: E402 (--help answers before torch is imported)
from atlaslib.trainers.gkd import GKDTrainer  # noqa: E402
from atlaslib.trainers.grpo_config import GRPOConfig  # noqa: E402
from atroposlib.envs.quickstart_task import split_prompts  # noqa: E402

student = build_quickstart_model(options.output / "student", warmup_steps=options.warmup_steps, right_share=0.25)
teacher = build_quickstart_model(options.output / "teacher", warmup_steps=2 * options.warmup_steps, right_share=1.0)
train, _ = split_prompts(12, 5, 0.2, 0)
config = GRPOConfig(
    output_dir=str(options.output / "checkpoints"),
    model_name_or_path=str(student),
    max_steps=options.steps,
    per_device_train_batch_size=64,
    num_generations=8,
    max_completion_length=8,
    learning_rate=1e-3,
    temperature=1.0,
    beta=0.0,
    save_strategy="no",
    report_to="none",
)
rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in train]
trainer = GKDTrainer(config, train_dataset=rows, teacher_model=str(teacher))
before = trainer.evaluate(rows)["eval_reward"]
trainer.train()
after = trainer.evaluate(rows)["eval_reward"]
print(
    f"minus the distance to the teacher (reverse KL per token): {before:.3f} before, {after:.3f} after {options.steps} steps"
)
