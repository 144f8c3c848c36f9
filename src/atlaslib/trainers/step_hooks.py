"""Ties the trainer's own bookkeeping to the transformers loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from atlaslib.trainers import run_state
from atlaslib.trainers.policy import register_head

if TYPE_CHECKING:
    from atlaslib.trainers.grpo import GRPOTrainer

logger = logging.getLogger(__name__)


class StepHooks(TrainerCallback):  # type: ignore[misc]
    """Start of training, the optimizer's write, end of a step."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self._update: contextlib.ExitStack | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        register_head(self._trainer.accelerator.unwrap_model(self._trainer.model))
        run_state.restore(self._trainer)
        self._trainer.sampler_host.start()
        if self._trainer.service is not None:
            self._trainer.service.start()
        self._trainer.metrics.restart()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._update = contextlib.ExitStack()
        self._update.enter_context(self._trainer.metrics.time("update"))
        self._update.enter_context(self._trainer.sampler_host.updating())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._update is not None:
            self._update.close()
            self._update = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        trainer = self._trainer
        run_state.sync_reference(trainer)
        trainer.sampler_host.push_to_environments()
        trainer.close_step()
        if run_state.any_process(trainer.accelerator, trainer.stop_signal.requested):
            if trainer.is_world_process_zero():
                logger.warning("stopping on request after step %d: saving a checkpoint", state.global_step)
            control.should_save = control.should_training_stop = True
        return control


def remember_grad_norm(trainer: GRPOTrainer) -> None:
    """Put the gradient norm that clipping computes into the step's metrics."""
    original: Callable[..., Any] = trainer.accelerator.clip_grad_norm_

    def clip(*args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        if norm is not None:
            trainer.metrics.put("train/grad_norm", float(norm))
        return norm

    trainer.accelerator.clip_grad_norm_ = clip
