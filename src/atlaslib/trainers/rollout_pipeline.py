"""Rollouts in process: one batch after another, or ahead of the update within the staleness bound.

With ``max_staleness`` 0 sampling and update take turns. With n > 0 up to n batches are sampled (and scored) in a second thread
while the present one is trained on; a batch that is consumed k updates after it was asked for is at most k versions old.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from atlaslib.data.prompts import derive_seed
from atlaslib.trainers.batch_sizes import share
from atlaslib.trainers.rollouts import Rollout, drop_equal_groups, drop_stale

if TYPE_CHECKING:
    from atlaslib.trainers.grpo import GRPOTrainer


class RolloutPipeline:
    """Makes the rollouts of generation rounds; ``take`` hands them out in order."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        config = trainer.config
        self._ahead = config.staleness_bound // config.num_iterations
        if config.sampler_kind != "engine":
            self._ahead = min(self._ahead, 1)
        self._pending: deque[tuple[int, Future[list[Rollout]]]] = deque()
        self._worker: ThreadPoolExecutor | None = None

    @property
    def is_asynchronous(self) -> bool:
        return self._ahead > 0

    def take(self, round_index: int) -> list[Rollout]:
        """The rollouts of a round, on every process; asks for the following rounds before it returns."""
        trainer = self._trainer
        if not self.is_asynchronous:
            trainer.sync_sampler()
            return self._fill(round_index, self._local(round_index, 0))
        while self._pending and self._pending[0][0] != round_index:
            self._pending.popleft()[1].cancel()
        if not self._pending:
            trainer.sync_sampler()
            self._ask(round_index)
        with trainer.metrics.time("waiting"):
            local = self._pending.popleft()[1].result()
        self._ask_ahead(round_index)
        return self._fill(round_index, local)

    def close(self) -> None:
        """Forget what was asked for and end the thread."""
        while self._pending:
            self._pending.popleft()[1].cancel()
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
            self._worker = None

    def _ask_ahead(self, round_index: int) -> None:
        trainer = self._trainer
        last = -(-trainer.state.max_steps // trainer.config.num_iterations)
        newest = self._pending[-1][0] if self._pending else round_index
        trainer.sync_sampler()
        for wanted in range(newest + 1, round_index + self._ahead + 1):
            if wanted < last:
                self._ask(wanted)

    def _ask(self, round_index: int) -> None:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts")
        self._pending.append((round_index, self._worker.submit(self._local, round_index, 0)))

    def _local(self, round_index: int, refill: int) -> list[Rollout]:
        """This process's share of the groups of a round, sampled and scored."""
        trainer = self._trainer
        rows = trainer.round_rows(round_index, refill)
        calls = trainer.sizes.generation_calls
        made: list[Rollout] = []
        for call in range(calls):
            numbered = list(enumerate(rows))[call * len(rows) // calls : (call + 1) * len(rows) // calls]
            mine = share(numbered, trainer.accelerator.process_index, trainer.accelerator.num_processes)
            with trainer.metrics.time("sampling"):
                fresh = trainer.rollout(
                    [row for _, row in mine],
                    group_ids=[f"round{round_index}-{refill}-{position}" for position, _ in mine],
                    positions=[position for position, _ in mine],
                    seed=derive_seed(trainer.config.seed, round_index, refill),
                    num_generations=trainer.sizes.num_generations,
                )
            with trainer.metrics.time("scoring"):
                trainer.score(fresh)
            made += fresh
        return made

    def _fill(self, round_index: int, local: list[Rollout]) -> list[Rollout]:
        """All processes' rollouts, without the ones that are too old and, on request, refilled to whole batches."""
        trainer, config = self._trainer, self._trainer.config
        made = self._gather(local)
        if not config.dynamic_sampling:
            return made
        made = drop_equal_groups(made)
        wanted, refills = trainer.sizes.prompts_per_batch, 0
        while len(_group_ids(made)) < wanted and refills < config.dynamic_sampling_max_rounds:
            refills += 1
            made += drop_equal_groups(self._gather(self._local(round_index, refills)))
        trainer.metrics.put("rollout/dynamic_rounds", float(refills))
        kept = set(_group_ids(made)[:wanted])
        return [rollout for rollout in made if rollout.group_id in kept]

    def _gather(self, local: list[Rollout]) -> list[Rollout]:
        trainer = self._trainer
        fresh = drop_stale(local, version=trainer.policy_version, bound=trainer.config.staleness_bound)
        trainer.metrics.count("rollout/num_refused_stale", len(local) - len(fresh))
        return trainer.gather_rollouts(fresh)


def _group_ids(made: list[Rollout]) -> list[str]:
    return list(dict.fromkeys(rollout.group_id for rollout in made))
