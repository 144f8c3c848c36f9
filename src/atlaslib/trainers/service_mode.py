"""The trainer's side of service mode: batches come from environments through the rollout server."""

from __future__ import annotations

import logging
import statistics
from typing import TYPE_CHECKING, Any

from atlaslib.data.rollout_source import RolloutBatch, RolloutSource
from atlaslib.trainers import run_state
from atlaslib.trainers.choices import estimator_of, scale_of
from atlaslib.types import TrainingSample

if TYPE_CHECKING:
    from atlaslib.trainers.grpo import GRPOTrainer

logger = logging.getLogger(__name__)


class ServiceMode:
    """Process 0 talks to the rollout server; the others get the samples from it."""

    def __init__(self, trainer: GRPOTrainer, *, client: Any = None) -> None:
        self._trainer = trainer
        self._client = client
        self.source: RolloutSource | None = None
        self.resume_after: int | None = None

    def start(self) -> None:
        """Register with the rollout server (again after a restart, from the checkpoint's position)."""
        trainer, config = self._trainer, self._trainer.config
        if not trainer.is_world_process_zero() or self.source is not None:
            return
        self.source = RolloutSource(
            self._client or self._make_client(),
            default_temperature=config.temperature,
            max_staleness=config.staleness_bound,
            wait_timeout_s=config.rollout_wait_timeout_s,
            estimator=estimator_of(config),
            scale=scale_of(config),
            url=config.rollout_server_url or "",
            should_stop=lambda: trainer.stop_signal.requested,
        )
        limit = config.rollout_max_token_len or (config.max_prompt_length or 0) + config.completion_limit
        self.source.register(
            batch_size=config.rollout_batch_size or trainer.sizes.sequences_per_batch,
            max_token_len=limit,
            num_steps=int(trainer.state.max_steps),
            checkpoint_dir=config.output_dir,
            save_checkpoint_interval=int(trainer.state.save_steps),
            starting_step=int(trainer.state.global_step),
            wandb_group=config.run_name or "",
            wandb_project="",
            resume_after=self.resume_after,
        )

    def next_samples(self) -> list[TrainingSample] | None:
        """The samples of the next batch on every process; None when asked to stop."""
        samples: list[TrainingSample] | None = None
        if self.source is not None:
            with self._trainer.metrics.time("waiting"):
                batch = self.source.next(self._trainer.policy_version)
            if batch is not None:
                self._log(batch)
                samples = self._mask_truncated(batch.samples)
        shared: list[TrainingSample] | None = run_state.broadcast(self._trainer.accelerator, samples)
        return shared

    def commit(self, step: int) -> None:
        """The checkpoint of ``step`` is on disk."""
        if self.source is not None:
            self.source.commit(step)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Numbers for the live page."""
        if self.source is not None:
            self.source.report(step, metrics)

    def close(self) -> None:
        if self.source is not None:
            self.source.close()
            self.source = None

    def _make_client(self) -> Any:
        from atroposlib.api.client import TrainerClient

        config = self._trainer.config
        return TrainerClient(config.rollout_server_url or "", token=config.rollout_server_token)

    def _mask_truncated(self, samples: list[TrainingSample]) -> list[TrainingSample]:
        if self._trainer.config.mask_truncated_completions:
            for sample in samples:
                if sample.truncated:
                    sample.loss_mask = [False] * len(sample.loss_mask)
        return samples

    def _log(self, batch: RolloutBatch) -> None:
        metrics = self._trainer.metrics
        metrics.put("reward", statistics.fmean(sample.reward for sample in batch.samples))
        by_group: dict[str, list[float]] = {}
        for sample in batch.samples:
            by_group.setdefault(sample.group_id, []).append(sample.reward)
        spreads = [statistics.stdev(rewards) if len(rewards) > 1 else 0.0 for rewards in by_group.values()]
        metrics.put("reward_std", statistics.fmean(spreads))
        metrics.put("rollout/zero_variance_share", batch.zero_variance_groups / max(batch.num_groups, 1))
        metrics.put("rollout/num_refused_stale", float(batch.refused_stale))
        metrics.put("rollout/num_refused_broken", float(batch.refused_broken))
        metrics.put("rollout/num_unversioned", float(batch.unversioned))
        metrics.put("rollout/num_ahead", float(batch.ahead))
        metrics.put("rollout/num_groups", float(batch.num_groups))
        for name, values in batch.reward_components.items():
            if values:
                metrics.put(f"rewards/{name}", statistics.fmean(values))
