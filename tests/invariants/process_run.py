"""A training run as a process of its own: ``python process_run.py settings.json``; writes weights.pt when it is done.

``settings.json``: {"config": GRPOConfig fields, "tokenizer": folder, "resume": bool, "kill_at": step or null, "model": folder or null}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TrainerCallback

from atlaslib.generation.weight_export import full_state
from atlaslib.models.tiny import tiny_llama
from atlaslib.trainers import GRPOConfig, GRPOTrainer


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(ord(character) % 7 for character in text) / 20 for text in completions]


class KillAt(TrainerCallback):
    """SIGKILL to the own process, at a step or in the middle of writing a checkpoint."""

    def __init__(self, step: int, signal_number: int) -> None:
        self._step, self._signal = step, signal_number

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), self._signal)


def kill_in_the_middle_of_saving(trainer: GRPOTrainer, step: int) -> None:
    save = trainer._save_optimizer_and_scheduler

    def half(folder: str) -> None:
        if trainer.state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        save(folder)

    trainer._save_optimizer_and_scheduler = half


def make_model(tokenizer: Any) -> Any:
    return tiny_llama(len(tokenizer), hidden=32, seed=1, eos_token_id=tokenizer.eos_token_id)


def main(settings_file: str) -> None:
    torch.set_num_threads(1)
    settings = json.loads(Path(settings_file).read_text())
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    config = GRPOConfig(**settings["config"])
    model = settings.get("model") or make_model(tokenizer)
    rows = [{"prompt": f"{'ab' * n} {n}:"} for n in range(1, 9)]
    trainer = GRPOTrainer(model, reward, config, train_dataset=rows, processing_class=tokenizer)
    if settings.get("kill_at"):
        trainer.add_callback(KillAt(settings["kill_at"], settings.get("signal", signal.SIGKILL)))
    if settings.get("kill_while_saving"):
        kill_in_the_middle_of_saving(trainer, settings["kill_while_saving"])
    trainer.train(resume_from_checkpoint="auto" if settings.get("resume") else None)
    sharded_by_deepspeed = config.deepspeed is not None
    state = (
        dict(full_state(trainer.model)) if sharded_by_deepspeed else trainer.accelerator.get_state_dict(trainer.model)
    )
    if trainer.is_world_process_zero():
        torch.save({name: value.cpu() for name, value in state.items()}, Path(config.output_dir) / "weights.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
