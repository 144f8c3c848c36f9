"""The trainer's process of a run: `python -m atlaslib.launch.trainer_process PLAN.json`.

With `--prepare` it only makes the model folder. Otherwise it resumes from the newest checkpoint, trains on what the environments send, serves the policy from
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
    if plan.model == "tiny":
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
        "bf16": not cpu,
        "disable_tqdm": True,
        "eval_strategy": "no",
        "beta": 0.0,
    }
    places: dict[str, Any] = {
        "output_dir": str(plan.run_dir / "checkpoints"),
        "model_name_or_path": plan.model_dir,
        "rollout_server_url": plan.rollout_url,
        "rollout_server_token": plan.rollout_server.token,
        "metrics_file": "../metrics.jsonl",
    }
    if plan.policy_server.url is None:
        places |= {"policy_server_port": plan.policy_server.port, "policy_model_name": plan.policy_server.model_name}
    return defaults | plan.trainer | places


def run(plan: RunPlan) -> int:
    """Train until the plan's last step."""
    import torch

    if plan.threads or plan.model == "tiny":
        torch.set_num_threads(plan.threads or 1)
    from atlaslib.trainers.grpo import GRPOTrainer
    from atlaslib.trainers.grpo_config import GRPOConfig

    config = GRPOConfig(**trainer_settings(plan))
    trainer = GRPOTrainer(config)
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
        if "--prepare" in argv:
            prepare_model(plan)
            return 0
        return run(plan)
    except ConfigError as error:
        logger.error("%s", error)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
