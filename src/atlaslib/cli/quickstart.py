"""`atropos quickstart`: train a small model on a real task, here and now, with a live page.

    atropos quickstart                       a 0.4M-parameter Llama learns to write DDD for D3, about a minute on two cores
    atropos quickstart --model smollm2       SmolLM2-135M learns to answer sums concisely
    atropos quickstart --env my_env.py:MyEnv --model path/to/model --steps 200
    atropos quickstart --teacher             the teacher trainer makes a student better

Run it again and it goes on from its last checkpoint; --fresh starts anew.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

TINY_TASK = "atroposlib.envs.quickstart_env:RepeatLetters"
SUMS_TASK = "atroposlib.envs.quickstart_env:ConciseSums"


def main(argv: list[str]) -> int:
    """Exit codes as for `atropos run`."""
    options = parse(argv)
    logging.basicConfig(level=logging.ERROR)
    from atlaslib.launch.plan import check_plan, make_plan
    from atlaslib.launch.running import finished_step, run_plan

    plan = make_plan(plan_content(options), where="command line")
    if options.env or options.model not in {"tiny", "smollm2"} or options.set:
        check_plan(plan, where="command line")
    done = None if options.fresh else finished_step(plan.run_dir)
    if done is not None and done >= plan.trainer["max_steps"]:
        print(
            f"{plan.run_dir} has finished at step {done}: atropos view {plan.run_dir} shows it; --fresh starts anew, --steps {2 * done} goes on"
        )
        return 0
    return run_plan(
        plan,
        title=f"atropos quickstart ({'teacher' if options.teacher else options.model})",
        live=False if options.plain else None,
        fresh=options.fresh,
        introduction=INTRODUCTIONS.get("teacher" if options.teacher else "" if options.env else options.model, ""),
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="atropos quickstart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="tiny (default), smollm2, a folder or a hub name")
    parser.add_argument(
        "--env", default=None, metavar="FILE.py:CLASS", help="your environment instead of the built-in task"
    )
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, default=None, help="default: runs/quickstart-MODEL")
    parser.add_argument("--fresh", action="store_true", help="start anew instead of going on from the last checkpoint")
    parser.add_argument(
        "--port", type=int, default=0, help="port of the rollout server and its page (default: any free one)"
    )
    parser.add_argument("--plain", action="store_true", help="lines instead of a panel that refreshes")
    parser.add_argument("--teacher", action="store_true", help="the teacher trainer instead")
    parser.add_argument(
        "set",
        nargs="*",
        metavar="key=value",
        help="further settings as for atropos run, for instance trainer.learning_rate=1e-3",
    )
    options = parser.parse_intermixed_args(argv)
    if options.teacher and (options.env or options.model != "tiny"):
        parser.error("--teacher is a built-in example with its own models; for yours use: atropos train --help")
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps is {options.steps}; it must be at least 1")
    if options.run_dir is None:
        name = options.model if options.model in {"tiny", "smollm2"} else Path(options.model).name
        options.run_dir = Path("runs") / f"quickstart-{'teacher' if options.teacher else name}"
    return options


def plan_content(options: argparse.Namespace) -> dict[str, Any]:
    """The plan of the quickstart, as the content of a plan file."""
    from atlaslib.launch.plan import apply_override

    if options.teacher:
        return teacher_content(options)
    small = options.model == "tiny"
    content: dict[str, Any] = {
        "name": f"quickstart {options.model}",
        "run_dir": str(options.run_dir),
        "model": options.model,
        "seed": options.seed,
        "trainer": TRAINERS.get(options.model, LANGUAGE_TRAINER).copy(),
        "environments": [{"path": options.env or (TINY_TASK if small else SUMS_TASK)}],
        "rollout_server": {"port": options.port},
    }
    if options.steps is not None:
        content["trainer"]["max_steps"] = options.steps
    if not options.env:
        content["environments"][0]["config"] = {"task_seed": options.seed}
    for override in options.set:
        apply_override(content, override)
    return content


def teacher_content(options: argparse.Namespace) -> dict[str, Any]:
    """The plan of the teaching example."""
    from atlaslib.launch.plan import apply_override
    from atlaslib.launch.teacher_models import TEMPLATES

    content: dict[str, Any] = {
        "name": "quickstart teacher",
        "kind": "teacher",
        "run_dir": str(options.run_dir),
        "model": "tiny",
        "seed": options.seed,
        "trainer": {**TEACHER_TRAINER, **TEMPLATES},
        "rollout_server": {"port": options.port},
    }
    if options.steps is not None:
        content["trainer"]["max_steps"] = options.steps
    for override in options.set:
        apply_override(content, override)
    return content


INTRODUCTIONS = {
    "tiny": (
        "A Llama of 0.4M parameters learns to write a letter a number of times and to stop: D3 -> DDD. "
        "held-out: combinations it is never trained on."
    ),
    "smollm2": (
        "SmolLM2-135M learns to give sums within ten tokens: What is 3+7? -> 3 + 7 = 10. held-out: sums it is never trained on, answered "
        "greedily. A step takes about ten seconds on two cores; the very first start also converts the weights."
    ),
    "teacher": (
        "A teacher learns to say what helps a frozen student. Both tiny models are made first, about 20 seconds. "
        "Reward: 0 when the student stays wrong, 2 when a short hint makes a wrong answer right."
    ),
}
TINY_TRAINER: dict[str, Any] = {
    "max_steps": 80,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "per_device_train_batch_size": 256,
    "num_generations": 16,
    "max_prompt_length": 16,
    "max_completion_length": 8,
    "temperature": 1.0,
    "entropy_coef": 0.003,
    "max_batches_offpolicy": 1,
    "max_staleness": 4,
    "save_steps": 20,
    "weight_decay": 0.0,
    "adam_beta2": 0.95,
}
LANGUAGE_TRAINER: dict[str, Any] = {
    "max_steps": 20,
    "learning_rate": 1e-5,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 1,
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_prompt_length": 64,
    "max_completion_length": 12,
    "temperature": 1.0,
    "max_batches_offpolicy": 1,
    "max_staleness": 3,
    "save_steps": 10,
    "weight_decay": 0.0,
}
SMOLLM2_TRAINER: dict[str, Any] = {
    **LANGUAGE_TRAINER,
    "learning_rate": 3e-5,
    "trainable_layers": 10,  # of 30: a third of the backward pass, and enough to change how answers are put
}
TRAINERS = {"tiny": TINY_TRAINER, "smollm2": SMOLLM2_TRAINER}
TEACHER_TRAINER: dict[str, Any] = {
    "max_steps": 40,
    "learning_rate": 2e-3,
    "warmup_ratio": 0.0,
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "temperature": 1.0,
    "max_completion_length": 8,
    "logging_steps": 1,
    "save_steps": 20,
}
