"""Batches from the rollout server: leased, checked for staleness, committed with the checkpoint.

A batch is acknowledged once its samples are in the trainer's hands and committed when a checkpoint holds what was learned from
it; a trainer that comes back from a checkpoint gets exactly the batches after it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from atlaslib.algorithms.advantages import Estimator, ScaleRewards
from atlaslib.data.scored_groups import batch_advantages, to_samples
from atlaslib.errors import RolloutTimeoutError, ScoredGroupError
from atlaslib.types import TrainingSample

logger = logging.getLogger(__name__)
POLL_S = 1.0


class BatchClient(Protocol):
    """The part of ``TrainerClient`` this module uses."""

    def register(self, **settings: Any) -> int: ...
    def next_batch(self, *, timeout_s: float | None = None) -> Any: ...
    def ack(self, seq: int) -> None: ...
    def commit(self, seq: int, step: int) -> None: ...
    def status(self) -> dict[str, Any]: ...
    def report(self, source: str, step: int, metrics: dict[str, float]) -> bool | None: ...
    def close(self) -> None: ...


@dataclass(kw_only=True, slots=True)
class RolloutBatch:
    """One batch as samples, with what was refused on the way."""

    seq: int
    samples: list[TrainingSample]
    refused_stale: int = 0
    refused_broken: int = 0
    unversioned: int = 0
    ahead: int = 0
    """samples of policy versions this run has not reached"""
    num_groups: int = 0
    zero_variance_groups: int = 0
    reward_components: dict[str, list[float]] = field(default_factory=dict)


class RolloutSource:
    """Where the trainer's batches come from in service mode."""

    def __init__(
        self,
        client: BatchClient,
        *,
        default_temperature: float,
        max_staleness: int,
        wait_timeout_s: float,
        estimator: Estimator = "group",
        scale: ScaleRewards = "group",
        url: str = "",
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._client, self._default_temperature = client, default_temperature
        self._estimator, self._scale = estimator, scale
        self._max_staleness, self._timeout_s, self._url = max_staleness, wait_timeout_s, url
        self._should_stop = should_stop
        self.last_seq: int | None = None
        """sequence number of the newest batch whose samples were handed out"""
        self._told_ahead = False
        self._unreported: deque[tuple[int, dict[str, float]]] = deque(maxlen=1000)

    def register(self, **settings: Any) -> None:
        """Announce the trainer; ``resume_after`` names the last batch a checkpoint holds."""
        self._client.register(**settings)
        self.last_seq = settings.get("resume_after")

    def next(self, version: int) -> RolloutBatch | None:
        """The next batch with at least one usable sample; None when the run is asked to stop while waiting."""
        started = time.monotonic()
        refused = Counter[str]()
        while True:
            batch = self._wait(started)
            if batch is None:
                return None
            result = self._convert(batch, version)
            refused.update(stale=result.refused_stale, broken=result.refused_broken)
            self._client.ack(batch.seq)
            self.last_seq = batch.seq
            if result.samples:
                result.refused_stale, result.refused_broken = refused["stale"], refused["broken"]
                self._tell_ahead(result, version)
                return result
            logger.warning(
                "batch %d has no usable sample (%d stale, %d broken); taking the next",
                batch.seq,
                result.refused_stale,
                result.refused_broken,
            )

    def commit(self, step: int) -> None:
        """A checkpoint of ``step`` holds everything learned from the batches handed out so far."""
        if self.last_seq is not None:
            self._client.commit(self.last_seq, step)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Numbers for the live page and the lineage; what did not arrive goes with the next, and never stops training."""
        trained_on = {} if self.last_seq is None else {"batch_seq": float(self.last_seq)}
        self._unreported.append((step, {**metrics, **trained_on}))
        try:
            while self._unreported and self._client.report("trainer", *self._unreported[0]) is not False:
                self._unreported.popleft()
        except Exception as error:  # the page is a convenience: whatever went wrong, training goes on
            logger.debug("could not report metrics of step %d: %r", step, error)

    def close(self) -> None:
        self._client.close()

    def _wait(self, started: float) -> Any:
        """Poll until a batch comes; every wait has a deadline and says who is waited for."""
        told = started
        while not self._should_stop():
            batch = self._client.next_batch(timeout_s=POLL_S)
            if batch is not None:
                return batch
            now = time.monotonic()
            if now - started > self._timeout_s:
                raise RolloutTimeoutError(f"no batch within {self._timeout_s:g} s: {self._who()}")
            if now - told > 15.0:
                logger.info("waiting %.0f s for a batch: %s", now - started, self._who())
                told = now
        return None

    def _who(self) -> str:
        try:
            status = self._client.status()
        except Exception as error:  # only for the message
            return f"the rollout server {self._url} does not answer ({error!r})"
        return f"the rollout server {self._url} answers (status {status}); environments have not delivered enough sequences"

    def _tell_ahead(self, batch: RolloutBatch, version: int) -> None:
        """Once: the server still holds groups of an earlier run, or of steps after the checkpoint; they are trained on all the same."""
        if batch.ahead and not self._told_ahead:
            self._told_ahead = True
            logger.warning(
                "batch %d has %d samples of policy versions this run has not reached (it is at %d): they were made for an earlier run, or "
                "after the checkpoint this one goes on from. They are trained on; a server without them: POST %s/reset_data before the run",
                batch.seq,
                batch.ahead,
                version,
                self._url,
            )

    def _convert(self, batch: Any, version: int) -> RolloutBatch:
        result = RolloutBatch(seq=batch.seq, samples=[], num_groups=len(batch.groups))
        names = list(getattr(batch, "group_ids", None) or [])
        computed = batch_advantages(batch.groups, estimator=self._estimator, scale=self._scale)
        for number, (given, advantages) in enumerate(zip(batch.groups, computed, strict=True)):
            name = given.get("group_id") or (names[number] if number < len(names) else f"batch{batch.seq}-{number}")
            group = {**given, "group_id": name}
            try:
                samples = to_samples(group, advantages, default_temperature=self._default_temperature)
            except ScoredGroupError as error:
                logger.error("a group of batch %d is set aside: %s", batch.seq, error)
                result.refused_broken += len(group.get("tokens") or [])
                continue
            result.zero_variance_groups += len(set(group["scores"])) <= 1
            for name, values in (group.get("reward_components") or {}).items():
                result.reward_components.setdefault(name, []).extend(v for v in values if v is not None)
            for sample in samples:
                if staleness(sample, version) > self._max_staleness:
                    result.refused_stale += 1
                else:
                    result.unversioned += not sample.policy_versions
                    result.ahead += bool(sample.policy_versions) and sample.policy_versions[-1] > version
                    result.samples.append(sample)
        return result


def staleness(sample: TrainingSample, version: int) -> int:
    """Policy versions between the oldest token of the sample and now; 0 when unknown, or of a version still to come."""
    return max(0, version - sample.policy_versions[0]) if sample.policy_versions else 0
