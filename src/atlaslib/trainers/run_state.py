"""What a run needs to stop and start again, and the few collective operations the trainer uses."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from atlaslib.errors import CheckpointError
from atlaslib.generation.replica import whole
from atlaslib.types import Microbatch, TrainingSample

if TYPE_CHECKING:
    from atlaslib.trainers.grpo import GRPOTrainer

logger = logging.getLogger(__name__)
STATE_NAME = "rollout_state.json"
Item = TypeVar("Item")


class StopSignal:
    """SIGTERM asks the run to save a checkpoint and leave after the step in progress."""

    def __init__(self) -> None:
        self.requested = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Listen inside this block (only the main thread can)."""
        self.requested = False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGTERM, self._request)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _request(self, *_: Any) -> None:
        self.requested = True


def find_checkpoint(wish: Any, output_dir: str) -> str | None:
    """The checkpoint to resume from: a path as given, True = the newest complete one, ``"auto"`` = that or none."""
    if wish is None or wish is False:
        return None
    if wish is not True and wish != "auto":
        if not is_complete(Path(wish)):
            raise CheckpointError(f"{wish} is not a complete checkpoint (no readable trainer_state.json)")
        return str(wish)
    found = newest_complete(Path(output_dir))
    if found is None and wish is True:
        raise CheckpointError(f"no complete checkpoint in {output_dir}; start without resume_from_checkpoint")
    return None if found is None else str(found)


def check_fsdp(checkpoint: str | None, *, enabled: bool) -> None:
    """Weights and optimizer state of a run with FSDP lie in files of their own: such a run cannot go on without it, nor the other way."""
    if checkpoint is None or enabled == any(Path(checkpoint).glob("pytorch_model_fsdp*")):
        return
    raise CheckpointError(
        f"{checkpoint} was written {'without' if enabled else 'with'} FSDP and this run is {'with' if enabled else 'without'} it; "
        "go on as it began, or start anew in another output_dir"
    )


def newest_complete(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step; one cut off by a killed process is passed over."""
    numbered = [
        (int(path.name.rsplit("-", 1)[1]), path)
        for path in folder.glob("checkpoint-*")
        if path.name.rsplit("-", 1)[1].isdigit()
    ]
    for _, path in sorted(numbered, reverse=True):
        if is_complete(path):
            return path
        logger.warning("%s is incomplete and is passed over", path)
    return None


def is_complete(path: Path) -> bool:
    """``trainer_state.json`` is written last: where it can be read, everything else is there."""
    try:
        json.loads((path / "trainer_state.json").read_text())
    except (OSError, json.JSONDecodeError):
        return False
    return True


def save(folder: Path, trainer: GRPOTrainer) -> None:
    """Rollout position and the samples still to be trained on (more than one iteration per batch).

    All processes call it, the first one writes.
    """
    unfinished = trainer.state.global_step % trainer.config.num_iterations != 0
    mine = [piece.old_logprobs for piece in _pieces(trainer) if piece.old_logprobs is not None] if unfinished else []
    old_logprobs = gather_lists(trainer.accelerator, [value for part in mine for value in part.tolist()])
    if not trainer.is_world_process_zero():
        return
    folder.mkdir(parents=True, exist_ok=True)
    source = trainer.service.source if trainer.service is not None else None
    state = {
        "global_step": trainer.state.global_step,
        "policy_version": trainer.policy_version,
        "batch_seq": None if source is None else source.last_seq,
        "samples": [dataclasses.asdict(sample) for sample in trainer.step_samples] if unfinished else [],
        "old_logprobs": old_logprobs,
        "extra": trainer.extra_state(),
    }
    temporary = folder / (STATE_NAME + ".partial")
    temporary.write_text(json.dumps(state))
    os.replace(temporary, folder / STATE_NAME)


def load(checkpoint: str | None) -> dict[str, Any] | None:
    """The rollout state of a checkpoint; None for a fresh start or a checkpoint of another trainer."""
    path = None if checkpoint is None else Path(checkpoint) / STATE_NAME
    if path is None or not path.is_file():
        return None
    state: dict[str, Any] = json.loads(path.read_text())
    return state


def restore(trainer: GRPOTrainer) -> None:
    """Bring the trainer's own state to where the checkpoint left it."""
    if trainer.metrics_file is not None:
        trainer.metrics_file.rewind(trainer.state.global_step)
    state = trainer.resume_state
    if state is None:
        return
    if trainer.service is not None:
        trainer.service.resume_after = state["batch_seq"]
    trainer.step_samples = [TrainingSample(**sample) for sample in state["samples"]]
    trainer.step_batch = []
    if trainer.step_samples:
        trainer.lay_out_step(trainer.config.gradient_accumulation_steps)
        _restore_old_logprobs(trainer, state["old_logprobs"])
    trainer.restore_extra_state(state.get("extra") or {})


def _restore_old_logprobs(trainer: GRPOTrainer, saved: list[float]) -> None:
    """This process's part of the saved ones; where the batch has other tokens now, they are computed anew.

    They stand in the order of the samples, so the number of processes and pieces may differ from the run that saved them.
    """
    accelerator = trainer.accelerator
    counts = gather_lists(accelerator, [sum(piece.num_trained_tokens for piece in _pieces(trainer))])
    if len(saved) != sum(counts):
        return
    place = sum(counts[: accelerator.process_index])
    for piece in _pieces(trainer):
        values = saved[place : place + piece.num_trained_tokens]
        piece.old_logprobs = torch.tensor(values, dtype=torch.float32, device=accelerator.device) if values else None
        place += len(values)


def _pieces(trainer: GRPOTrainer) -> list[Microbatch]:
    return [piece for part in trainer.step_batch for piece in part]


def sync_reference(trainer: GRPOTrainer) -> None:
    """``sync_ref_model``: reference = alpha * policy + (1 - alpha) * reference, every so many steps."""
    config = trainer.config
    if (
        not config.sync_ref_model
        or trainer.reference is None
        or trainer.state.global_step % config.ref_model_sync_steps
    ):
        return
    alpha = config.ref_model_mixup_alpha
    policy = trainer.accelerator.unwrap_model(trainer.model)
    with torch.no_grad():
        for target, source in zip(trainer.reference.parameters(), policy.parameters(), strict=True):
            with whole(source) as tensor:
                target.lerp_(tensor.to(target.device, target.dtype), alpha)


def gather_lists(accelerator: Any, local: list[Item]) -> list[Item]:
    """The lists of all processes chained in process order."""
    if accelerator.num_processes == 1:
        return local
    from accelerate.utils import gather_object

    return list(gather_object(local))


def broadcast(accelerator: Any, value: Any) -> Any:
    """The value of process 0 on every process."""
    if accelerator.num_processes == 1:
        return value
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value], from_process=0)[0]


def any_process(accelerator: Any, flag: bool) -> bool:
    """True when the flag is set on at least one process."""
    if accelerator.num_processes == 1:
        return flag
    return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), reduction="sum").item() > 0)


def sum_over_processes(accelerator: Any, sums: dict[str, float]) -> dict[str, float]:
    """Each value summed over the processes; a process without samples may lack some names."""
    if accelerator.num_processes == 1:
        return sums
    total: dict[str, float] = {}
    for part in gather_lists(accelerator, [sums]):
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
