"""The trainer's process of a run: `python -m atlaslib.launch.trainer_process PLAN.json`.

Makes or finds the model, resumes from the newest checkpoint, trains on what the environments send, serves the policy from
the same weights, and leaves the trained model in `RUN/final_model`. Exit code 0 means the run is complete (or was
asked to stop); 2 means the configuration cannot work, so starting it again would not help.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from atlaslib.errors import ConfigError
from atlaslib.launch.plan import RunPlan

logger = logging.getLogger(__name__)

DONE_FILE = "done.json"


def prepare_model(plan: RunPlan) -> None:
    """Make the model folder for the built-in models; others exist already."""
    folder = plan.run_dir / "model"
    if plan.kind == "teacher":
        from atlaslib.launch.teacher_models import build_teaching_models

        build_teaching_models(plan.run_dir, seed=plan.seed)
    elif plan.model == "tiny":
        from atlaslib.launch.quickstart_model import build_quickstart_model

        build_quickstart_model(folder, seed=plan.seed)
    elif plan.model == "smollm2" and not folder.exists():
        from atlaslib.models.smollm2 import smollm2_folder

        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(smollm2_folder(), target_is_directory=True)


def trainer_settings(plan: RunPlan) -> dict[str, Any]:
    """GRPOConfig parameters: defaults for a run on this machine, the plan's on top, addresses last."""
    import torch

    cpu = not torch.cuda.is_available()
    defaults: dict[str, Any] = {
        "run_name": plan.name,
        "report_to": "none",
        "logging_steps": 10,
        "save_steps": 50,
        "save_total_limit": 2,
        "max_steps": 100,
        "seed": plan.seed,
        "use_cpu": cpu,
        "bf16": not cpu and not plan.trainer.get("exact"),
        "disable_tqdm": True,
        "eval_strategy": "no",
        "beta": 0.0,
    }
    places: dict[str, Any] = {
        "output_dir": str(plan.run_dir / "checkpoints"),
        "model_name_or_path": plan.model_dir,
        "metrics_file": "../metrics.jsonl",
    }
    if plan.kind == "teacher":
        return defaults | plan.trainer | places
    places |= {"rollout_server_url": plan.rollout_url, "rollout_server_token": plan.rollout_server.token}
    if plan.policy_server.url is None:
        places |= {"policy_server_port": plan.policy_server.port, "policy_model_name": plan.policy_server.model_name}
    return defaults | plan.trainer | places


def make_trainer(config: Any) -> Any:
    """A trainer on what the environments send."""
    from atlaslib.trainers.grpo import GRPOTrainer

    return GRPOTrainer(config)


def make_teacher(plan: RunPlan, config: Any) -> Any:
    """The teacher of the teaching example; it makes its own rollouts and reports its numbers to the page."""
    from transformers import TrainerCallback

    from atlaslib.launch.teacher_models import ROWS
    from atlaslib.trainers.teacher_trainers import TeacherGRPOTrainer
    from atroposlib.api.client import TrainerClient

    client = TrainerClient(plan.rollout_url, token=plan.rollout_server.token)

    class Report(TrainerCallback):  # type: ignore[misc]
        """Every logged number goes to the live page."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            numbers = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, (int, float))}
            try:
                client.report("trainer", state.global_step, numbers)
            except Exception as error:  # the page is a convenience: whatever went wrong, training goes on
                logger.debug("numbers of step %d not reported: %r", state.global_step, error)

    return TeacherGRPOTrainer(
        config, train_dataset=ROWS, student_model=str(plan.run_dir / "student"), logging_prob=0.05, callbacks=[Report()]
    )


def run(plan: RunPlan) -> int:
    """Train until the plan's last step."""
    import torch

    if plan.threads or plan.model == "tiny":
        torch.set_num_threads(plan.threads or 1)
    prepare_model(plan)
    from atlaslib.trainers.grpo_config import GRPOConfig

    config = GRPOConfig(**trainer_settings(plan))
    trainer = make_teacher(plan, config) if plan.kind == "teacher" else make_trainer(config)
    trainer.train(resume_from_checkpoint="auto")
    if trainer.state.global_step >= config.max_steps:
        trainer.save_model(str(plan.run_dir / "final_model"))
        (plan.run_dir / DONE_FILE).write_text(json.dumps({"step": trainer.state.global_step, "time": time.time()}))
    return 0


def main(argv: list[str]) -> int:
    """Entry point of the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    plan = RunPlan.model_validate_json(Path(argv[0]).read_text())
    try:
        return run(plan)
    except ConfigError as error:
        logger.error("%s", error)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
