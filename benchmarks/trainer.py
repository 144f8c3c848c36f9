"""How fast is one GRPO step, ours and TRL's, at equal settings on the same machine?

    python benchmarks/trainer.py                            # tiny Llama and SmolLM2-135M, ours and TRL, CPU
    python benchmarks/trainer.py --model tiny --who ours
    python benchmarks/trainer.py --cuda                     # update rate, whole-step rate and peak memory on one GPU

TRL runs in a virtual environment of its own, named by --trl-python (default .cache/trl-venv/bin/python; make it with
`python -m venv .cache/trl-venv && .cache/trl-venv/bin/pip install torch==2.13.0 trl==1.16.0`). Both sides train the same number of
tokens per step (completions have a fixed length), in float32 on CPU, with AdamW and no reference model. The time of a step is the wall time
between two optimizer steps; the first two are left out and the median is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SETTINGS: dict[str, dict[str, int]] = {
    "tiny": {"batch": 32, "group": 8, "prompt": 32, "completion": 64, "steps": 8},
    "smollm2": {"batch": 8, "group": 8, "prompt": 16, "completion": 16, "steps": 5},
}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(character in "aeiou" for character in text) / max(len(text), 1) for text in completions]


# ---------------------------------------------------------------------- preparation (ours makes the folder, both load it)


def prepare(model: str, folder: Path) -> None:
    """Model, tokenizer and prompts of exactly the wished length."""
    from transformers import AutoTokenizer

    settings = SETTINGS[model]
    if model == "tiny":
        from atlaslib.models.tiny import tiny_model_folder

        tiny_model_folder(folder / "model", vocab_size=259, hidden=128, layers=4, heads=4, kv_heads=4, max_len=256)
        source = folder / "model"
    else:
        from atlaslib.models.smollm2 import smollm2_folder

        source = smollm2_folder()
        (folder / "model").symlink_to(source, target_is_directory=True)
    tokenizer = AutoTokenizer.from_pretrained(str(source))
    sentence = "the sun rose over a quiet river and people went to work again while birds sang in tall green trees"
    words = sentence.split()
    rows = []
    for number in range(64):
        text = " ".join(words[(number + i) % len(words)] for i in range(80))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: settings["prompt"]]
        text = tokenizer.decode(ids)
        while len(tokenizer(text)["input_ids"]) > settings["prompt"]:
            text = text[:-1]
        rows.append({"prompt": text})
    (folder / "rows.json").write_text(json.dumps(rows))


class StepClock:
    """Notes the time of each optimizer step; works with both trainers."""

    def __new__(cls) -> Any:
        from transformers import TrainerCallback

        class Clock(TrainerCallback):  # type: ignore[misc]
            def __init__(self) -> None:
                self.times: list[float] = []
                self.cpu_times: list[float] = []

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                self.times.append(time.perf_counter())
                self.cpu_times.append(time.process_time())

        return Clock()


def summary(clock: Any, extra: dict[str, float]) -> dict[str, float]:
    """Wall and processor time of a step; on a busy machine the second is the one to compare (with one thread)."""
    steps = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)][1:]
    cpu = [b - a for a, b in zip(clock.cpu_times, clock.cpu_times[1:], strict=False)][1:]
    return {
        "step_s": statistics.median(steps),
        "step_cpu_s": statistics.median(cpu),
        "steps": float(len(steps)),
        **extra,
    }


# ---------------------------------------------------------------------- the two sides


def run_ours(model: str, folder: Path, *, exact: bool = False) -> dict[str, float]:
    import torch

    from atlaslib.trainers import GRPOConfig, GRPOTrainer

    settings = SETTINGS[model]
    torch.set_num_threads(int(os.environ.get("BENCH_THREADS") or os.cpu_count() or 1))
    config = GRPOConfig(
        output_dir=str(folder / "ours"),
        model_name_or_path=str(folder / "model"),
        per_device_train_batch_size=settings["batch"],
        num_generations=settings["group"],
        max_completion_length=settings["completion"],
        min_completion_length=settings["completion"],
        max_prompt_length=None,
        max_steps=settings["steps"],
        loss_type="dapo",
        beta=0.0,
        temperature=1.0,
        learning_rate=1e-6,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1000,
        exact=exact,
    )
    clock = StepClock()
    rows = json.loads((folder / "rows.json").read_text())
    trainer = GRPOTrainer(config, reward, train_dataset=rows, callbacks=[clock])
    trainer.train()
    lines = [json.loads(line) for line in (folder / "ours" / "metrics.jsonl").read_text().splitlines()][2:]
    names = (
        "time/sampling_s",
        "time/forward_s",
        "time/backward_s",
        "time/update_s",
        "time/layout_s",
        "train/num_tokens",
        "train/row_tokens",
        "policy/mismatch_abs",
    )
    return summary(clock, {name: statistics.median(line[name] for line in lines) for name in names})


def run_exact(model: str, folder: Path) -> dict[str, float]:
    return run_ours(model, folder, exact=True)


def run_trl(model: str, folder: Path) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings = SETTINGS[model]
    torch.set_num_threads(int(os.environ.get("BENCH_THREADS") or os.cpu_count() or 1))
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=settings["batch"],
        num_generations=settings["group"],
        max_completion_length=settings["completion"],
        generation_kwargs={"min_new_tokens": settings["completion"]},
        max_steps=settings["steps"],
        loss_type="dapo",
        beta=0.0,
        temperature=1.0,
        learning_rate=1e-6,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        logging_steps=1000,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
    )
    clock = StepClock()
    rows = Dataset.from_list(json.loads((folder / "rows.json").read_text()))
    trainer = GRPOTrainer(str(folder / "model"), reward, config, train_dataset=rows, callbacks=[clock])
    trainer.train()
    return summary(clock, {})


def compare(model: str, who: str, trl_python: str) -> dict[str, Any]:
    """Both sides one after the other, each in a process of its own."""
    results: dict[str, Any] = {"model": model, **SETTINGS[model]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(model, folder)
        for side in {"both": ("ours", "trl"), "exact": ("ours", "exact")}.get(who, (who,)):
            python = trl_python if side == "trl" else sys.executable
            command = [python, __file__, "--side", side, "--model", model, "--folder", name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
            results[side] = json.loads(done.stdout.strip().splitlines()[-1])
    if who == "both":
        results["speedup"] = results["trl"]["step_s"] / results["ours"]["step_s"]
        results["speedup_cpu_time"] = results["trl"]["step_cpu_s"] / results["ours"]["step_cpu_s"]
    if who == "exact":
        results["exact_slowdown"] = results["exact"]["step_s"] / results["ours"]["step_s"]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", "smollm2", "all"], default="all")
    parser.add_argument(
        "--who",
        choices=["ours", "trl", "both", "exact"],
        default="both",
        help="exact: ours with and without exact=True",
    )
    parser.add_argument("--trl-python", default=str(Path(".cache/trl-venv/bin/python").absolute()))
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--side", choices=["ours", "exact", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="update,step,exact_step,memory", help="with --cuda: which parts")
    arguments = parser.parse_args()
    if arguments.side:
        run = {"ours": run_ours, "exact": run_exact, "trl": run_trl}[arguments.side]
        print(json.dumps(run(arguments.model, Path(arguments.folder))))
    elif arguments.cuda:
        parts = arguments.only.split(",")
        if len(parts) > 1:  # a process each, so that none sees what another left in memory
            for name in parts:
                subprocess.run([sys.executable, __file__, "--cuda", "--only", name], check=True)
            return
        sys.path.insert(0, str(Path(__file__).parent))
        from trainer_cuda import run_cuda

        print(json.dumps(run_cuda(parts[0])), flush=True)
    else:
        for model in ("tiny", "smollm2") if arguments.model == "all" else (arguments.model,):
            print(json.dumps(compare(model, arguments.who, arguments.trl_python), indent=1), flush=True)


if __name__ == "__main__":
    main()
