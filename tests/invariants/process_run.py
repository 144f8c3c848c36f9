"""A training run as a process of its own: ``python process_run.py settings.json``; writes weights.pt when it is done.

``settings.json``: {"config": GRPOConfig fields, "tokenizer": folder, "resume": bool, "kill_at": step or null, "kill_rank": only this process,
"model": folder or null, "reward": name of one of the functions below, "rows": how many of the prompts, "lora": train an adapter,
"final_model": folder or null, "sft": supervised training, whose evaluation goes to evaluation.json}.
"""

from __future__ import annotations

import faulthandler
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
from atlaslib.trainers import GRPOConfig, GRPOTrainer, run_state
from atlaslib.trainers.sft import SFTTrainer

GIVE_UP_AFTER_S = 120
"""Processes that wait for each other for ever show where, and end"""
ROWS = [{"prompt": f"{'ab' * n} {n}:"} for n in range(1, 9)]


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(ord(character) % 7 for character in text) / 20 for text in completions]


def reward_but_one(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    """No reward for the first completion of the first prompt: the samples cannot be shared out evenly."""
    values: list[float | None] = list(reward(completions))
    if ROWS[0]["prompt"] in prompts:
        values[prompts.index(ROWS[0]["prompt"])] = None
    return values


def reward_but_last_row(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    if ROWS[-1]["prompt"] in prompts:
        raise ValueError("no reward for this prompt")
    return reward(completions)


def reward_but_second_row(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    if ROWS[1]["prompt"] in prompts:
        raise ValueError("no reward for this prompt")
    return reward(completions)


def shard_on_cpu() -> None:
    """accelerate leaves FSDP out on CPUs; torch's has no such limit."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


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


def adapter() -> Any:
    from peft import LoraConfig

    torch.manual_seed(0)
    return LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def make_trainer(settings: dict[str, Any], config: GRPOConfig, tokenizer: Any) -> GRPOTrainer:
    model = settings.get("model") or make_model(tokenizer)
    rows = ROWS[: settings.get("rows")]
    if settings.get("sft"):
        answered = [{**row, "completion": "xyz"[: number % 4]} for number, row in enumerate(rows)]
        return SFTTrainer(model, args=config, train_dataset=answered, eval_dataset=answered, processing_class=tokenizer)
    functions = (reward, reward_but_one, reward_but_last_row, reward_but_second_row)
    return GRPOTrainer(
        model,
        {function.__name__: function for function in functions}[settings.get("reward", "reward")],
        config,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=adapter() if settings.get("lora") else None,
    )


def evaluate(trainer: GRPOTrainer) -> None:
    """Writes what an evaluation reports, and how many rows each process passed through the model for it."""
    seen: list[int] = []
    forward = trainer.update.forward_logprobs

    def counted(model: Any, batch: Any) -> Any:
        seen.append(batch.input_ids.shape[0])
        return forward(model, batch)

    trainer.update.forward_logprobs = counted
    values = trainer.evaluate()
    rows = run_state.gather_lists(trainer.accelerator, [seen])
    if trainer.is_world_process_zero():
        content = {"rows": rows, "loss": values["eval_loss"], "perplexity": values["eval_perplexity"]}
        Path(trainer.config.output_dir, "evaluation.json").write_text(json.dumps(content))


def main(settings_file: str) -> None:
    torch.set_num_threads(1)
    settings = json.loads(Path(settings_file).read_text())
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    config = GRPOConfig(**settings["config"])
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if sharded:
        shard_on_cpu()
    trainer = make_trainer(settings, config, tokenizer)
    assert trainer.is_fsdp_enabled == sharded
    if settings.get("kill_at") and settings.get("kill_rank", config.process_index) == config.process_index:
        trainer.add_callback(KillAt(settings["kill_at"], settings.get("signal", signal.SIGKILL)))
    if settings.get("kill_while_saving"):
        kill_in_the_middle_of_saving(trainer, settings["kill_while_saving"])
    trainer.train(resume_from_checkpoint="auto" if settings.get("resume") else None)
    if settings.get("sft"):
        evaluate(trainer)
    if settings.get("final_model"):
        trainer.save_model(settings["final_model"])
    exported = config.deepspeed is not None or settings.get("lora")
    state = dict(full_state(trainer.model)) if exported else trainer.accelerator.get_state_dict(trainer.model)
    if trainer.is_world_process_zero():
        torch.save({name: value.cpu() for name, value in state.items()}, Path(config.output_dir) / "weights.pt")
    if torch.distributed.is_initialized():
        # Gloo's threads need the interpreter to free the tensors of the last gather, and DeepSpeed keeps their group alive: without
        # the wait in here the interpreter may end first, which aborts the process.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(GIVE_UP_AFTER_S, exit=True)
    main(sys.argv[1])
