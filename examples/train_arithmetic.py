"""Train a model to add, with a reward function and no servers: `GRPOTrainer` samples from the very weights it trains.

python examples/train_arithmetic.py                         SmolLM2-135M learns to answer concisely (a quarter of an hour on two cores)
python examples/train_arithmetic.py --model tiny --steps 3  a random 0.2M model: nothing to learn from, but seconds
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="smollm2", help="smollm2, tiny, a folder or a hub name")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--group", type=int, default=8)
parser.add_argument("--output", default="runs/arithmetic")
options = parser.parse_args()

from atlaslib.models.smollm2 import smollm2_folder  # noqa: E402 (--help answers before torch is imported)
from atlaslib.models.tiny import tiny_model_folder  # noqa: E402
from atlaslib.trainers.grpo import GRPOTrainer  # noqa: E402
from atlaslib.trainers.grpo_config import GRPOConfig  # noqa: E402

PAIRS = [(a, b) for a in range(1, 10) for b in range(1, 10)]


def row(a: int, b: int) -> dict[str, object]:
    """A question and what the reward needs to know."""
    return {"prompt": [{"role": "user", "content": f"What is {a}+{b}?"}], "total": a + b}


def right_and_short(prompts: object, completions: list[object], total: list[int], **_: object) -> list[float]:
    """1 when the last number of the answer is the sum; the length limit does the rest."""
    scores = []
    for completion, wanted in zip(completions, total, strict=True):
        text = completion if isinstance(completion, str) else completion[0]["content"]  # type: ignore[index]
        numbers = re.findall(r"\d+", text)
        scores.append(float(bool(numbers) and len(numbers) != 2 and int(numbers[-1]) == wanted))
    return scores


def model_folder(name: str) -> str:
    """Where the model is."""
    if name == "smollm2":
        return str(smollm2_folder())
    return str(tiny_model_folder(Path(tempfile.mkdtemp()) / "tiny")) if name == "tiny" else name


config = GRPOConfig(
    output_dir=options.output,
    model_name_or_path=model_folder(options.model),
    max_steps=options.steps,
    per_device_train_batch_size=4 * options.group,
    num_generations=options.group,
    max_prompt_length=64,
    max_completion_length=10,
    learning_rate=1e-5,
    temperature=1.0,
    beta=0.0,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    bf16=False,
)
held_out, train = PAIRS[::5], [pair for index, pair in enumerate(PAIRS) if index % 5]
trainer = GRPOTrainer(
    config,
    reward_funcs=right_and_short,
    train_dataset=[row(*p) for p in train],
    eval_dataset=[row(*p) for p in held_out],
)
before = trainer.evaluate()["eval_reward"]
trainer.train()
after = trainer.evaluate()["eval_reward"]
print(
    f"held-out reward {before:.2f} before, {after:.2f} after {options.steps} steps; metrics in {options.output}/metrics.jsonl"
)
