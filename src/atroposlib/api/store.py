"""`RolloutStore`: the state of the rollout server and every transition of it. No HTTP, no disk, no threads.

What happens is an event (`atroposlib.api.events`); `apply` is the only thing that changes the stored data, and applying the
same events gives the same state, so replaying the journal puts the store where it was. Deciding (may this group in, which
groups make the next batch) is separate from applying, so that the journal can be written in between.

Defined behaviour worth knowing:
  * Data that arrives before a trainer registers is kept and batched once it does.
  * A group whose size is not its environment's group size is held until pieces add up to whole groups
    (`batching.PartialGroups`); a multiple of the group size is queued at once.
  * A group with more sequences than a batch holds can never be delivered and is refused (422) when a trainer is registered.
    One that came in before, or that a re-registration with a smaller batch made too large, stays queued, is counted by
    `oversized_groups` and delivered when a trainer registers with a batch size that takes it.
  * Groups that name no environment, or one this server does not know, are batched like all others.
  * Cost is per new group: counters, no scans.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.api.batching import BatchQueue, GroupMeta
from atroposlib.api.environments import Environment, Environments
from atroposlib.api.events import (
    BatchAcked,
    BatchFormed,
    BatchSent,
    Committed,
    EnvGone,
    EnvRegistered,
    Event,
    GroupAdded,
    Registered,
    Started,
    WasReset,
)
from atroposlib.api.leases import Batch, BatchLedger, LeaseState
from atroposlib.api.observer import GroupEvent, StoreObserver
from atroposlib.api.slabs import slabs
from atroposlib.api.wire import WireError, WireGroup

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StoredGroup:
    """A group that is buffered, queued or in a batch that is not forgotten."""

    key: int
    size: int
    num_tokens: int
    group_id: str
    env_id: int | None
    binary: bool
    payload: bytes | None
    """None when it is on disk only (acknowledged, not yet committed)."""
    num_bytes: int
    location: tuple[int, int, int] | None = None
    """Journal segment, offset and length of the payload."""


class IdTable:
    """Ids, by digest, and what was answered. Also keeps the digests one after the other, so that saving needs no walk over them."""

    def __init__(self) -> None:
        self.answers: dict[bytes, int] = {}
        self.digests = bytearray()  # 16 bytes each
        self.buffered: dict[bytes, int] = {}  # those whose answer was a buffer size

    def put(self, digest: bytes, answer: int) -> None:
        self.answers[digest] = answer
        self.digests += digest
        if answer >= 0:
            self.buffered[digest] = answer

    def __len__(self) -> int:
        return len(self.answers)


class SeenIds:
    """The ids of the last groups and what was answered; bounded: at least `limit` ids are remembered, at most twice as many."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.recent, self.older = IdTable(), IdTable()

    def get(self, group_id: str) -> int | None:
        """What was answered: the buffer size, or -1 for received; None for an id not seen."""
        digest = _digest(group_id)
        found = self.recent.answers.get(digest)
        return self.older.answers.get(digest) if found is None else found

    def put(self, group_id: str, answer: int) -> None:
        if len(self.recent) >= self.limit:
            self.older, self.recent = self.recent, IdTable()
        self.recent.put(_digest(group_id), answer)


@functools.lru_cache(maxsize=1024)  # an id that is put was asked for just before
def _digest(group_id: str) -> bytes:
    return hashlib.blake2b(group_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(kw_only=True, slots=True)
class Counters:
    """What `/metrics` shows: totals since the process started."""

    groups_accepted: int = 0
    groups_duplicate: int = 0
    groups_rejected: int = 0
    sequences_accepted: int = 0
    tokens_accepted: int = 0
    batches_formed: int = 0
    batches_delivered: int = 0
    batches_redelivered: int = 0
    batches_acked: int = 0


class RolloutStore:
    """All state of a rollout server."""

    def __init__(
        self,
        *,
        observers: Sequence[StoreObserver] = (),
        env_timeout_s: float = 60.0,
        remembered_ids: int = 200_000,
        retain_bytes: int = 512 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.observers = list(observers)
        self.remembered_ids = remembered_ids
        self.retain_bytes = retain_bytes
        self.clock = clock
        self.env_timeout_s = env_timeout_s
        self.instance = secrets.token_hex(4)
        self.counters = Counters()
        self.on_forget: Callable[[StoredGroup], None] = lambda group: None
        self.next_key = 1
        self.ledger = BatchLedger()
        self.max_token_len = -1
        self._clear()

    def _clear(self) -> None:
        self.registration: Registered | None = None
        self.started = False
        self.envs = Environments(timeout_s=self.env_timeout_s, clock=self.clock)
        self.queue = BatchQueue()
        self.groups: dict[int, StoredGroup] = {}
        self.seen = SeenIds(self.remembered_ids)
        self.latest: StoredGroup | None = None
        self.queued_bytes = 0
        self.retained_bytes = 0
        ledger = BatchLedger()
        ledger.next_seq = self.ledger.next_seq
        ledger.committed = ledger.forgotten = ledger.next_seq - 1
        self.ledger = ledger
        self.queue_version = 0
        self._nothing_at: tuple[int, int, dict[int, float]] | None = None

    # ---- reading ------------------------------------------------------------------------------------------------------

    @property
    def current_step(self) -> int:
        """Batches delivered since the trainer registered, on top of the step it started from."""
        return self.registration.starting_step + self.ledger.delivered if self.registration else 0

    @property
    def queue_groups(self) -> int:
        """Groups waiting, including those of formed batches that nobody has."""
        return self.queue.num_groups + sum(len(batch.keys) for batch in self.ledger.waiting())

    @property
    def oversized_groups(self) -> int:
        """Queued groups that no batch of the registered size can hold (0 in a healthy run)."""
        if self.registration is None or self.queue.max_group_size <= self.registration.batch_size:
            return 0
        return sum(
            1 for key in self.groups if key in self.queue and self.groups[key].size > self.registration.batch_size
        )

    def status(self) -> dict[str, int]:
        """Answer of `/status`."""
        return {"current_step": self.current_step, "queue_size": self.queue_groups if self.registration else 0}

    def env_status(self, env: Environment) -> dict[str, Any]:
        """Answer of `/status-env`: how much is queued, in units of this environment's groups."""
        by_env: dict[int | None, int] = dict(self.queue.sequences_by_env())
        largest = self.queue.max_group_size
        for batch in self.ledger.waiting():
            for key in batch.keys:
                group = self.groups[key]
                by_env[group.env_id] = by_env.get(group.env_id, 0) + group.size
                largest = max(largest, group.size)
        largest = max(1, largest)
        batch_size = self.registration.batch_size if self.registration else 0
        minimums = self.envs.minimums()
        group_size = max(env.group_size, env.largest_group)
        own = by_env.pop(env.env_id, 0)
        others = 0
        for env_id, sequences in by_env.items():
            packed = -(-sequences // largest) * largest
            reserved = int(batch_size * minimums.get(env_id, 0.0)) if env_id is not None else 0
            others += max(0, packed - reserved)
        return {
            "current_step": self.current_step,
            "queue_size": (own + others) // group_size,
            "unallocated_fraction": self.envs.unallocated_fraction(),
            "self_queue_size": own // group_size,
            "max_group_size": largest,
            "env_weight": self.envs.weight_of(env),
        }

    def batch_groups(self, batch: Batch) -> list[StoredGroup]:
        """The groups of a batch, oldest first."""
        return [self.groups[key] for key in batch.keys]

    # ---- deciding -----------------------------------------------------------------------------------------------------

    def plan_group(self, group: WireGroup) -> GroupAdded:
        """The event that takes this group in; WireError when it may not come in."""
        self.check_size(group)
        key, self.next_key = self.next_key, self.next_key + 1
        return GroupAdded(
            key=key,
            size=group.size,
            num_tokens=group.num_tokens,
            group_id=group.group_id or f"{self.instance}-{key}",
            env_id=group.env_id,
            binary=group.binary,
            given_id=group.group_id is not None,
        )

    def check_size(self, group: WireGroup) -> None:
        """Refuse a group that no batch could hold, or from an environment that cannot be."""
        if group.env_id is not None and abs(group.env_id) >= 2**63:
            raise WireError(f"env_id is {group.env_id}; it is the number that /register-env answered", "env_id")
        if self.registration is not None and group.size > self.registration.batch_size:
            raise WireError(
                f"the group has {group.size} sequences and a batch holds {self.registration.batch_size}, so it could never be "
                "delivered; send smaller groups or register the trainer with a larger batch_size",
                "tokens",
            )

    def plan_env(
        self,
        *,
        desired_name: str | None,
        max_token_length: int,
        weight: float,
        group_size: int,
        min_batch_allocation: float | None,
    ) -> EnvRegistered:
        """The event that registers this environment."""
        env_id, desired, full = self.envs.plan(desired_name)
        return EnvRegistered(env_id, desired, full, max_token_length, weight, group_size, min_batch_allocation)

    def plan_batch(self) -> BatchFormed | None:
        """The event that forms the next batch; None while there is none. Looks again only when something has changed."""
        if self.registration is None:
            return None
        batch_size, minimums = self.registration.batch_size, self.envs.minimums()
        if self._nothing_at == (self.queue_version, batch_size, minimums):
            return None
        keys = self.queue.form(batch_size, minimums)
        if keys is None:
            self._nothing_at = (self.queue_version, batch_size, minimums)
            return None
        return BatchFormed(self.ledger.next_seq, keys)

    # ---- applying -----------------------------------------------------------------------------------------------------

    def apply(self, event: Event, payload: bytes = b"", location: tuple[int, int, int] | None = None) -> None:
        """Apply any event (replay)."""
        match event:
            case GroupAdded():
                self.add_group(event, payload, location)
            case BatchFormed():
                self.form_batch(event)
            case BatchSent():
                self.ledger.mark_sent(event.seq, plain=event.plain)
            case BatchAcked():
                self.ack(event)
            case Registered():
                self.register(event)
            case EnvRegistered():
                self.register_env(event)
            case EnvGone():
                if (env := self.envs.get(event.env_id)) is not None:
                    env.connected = False
            case Started():
                self.started = True
            case Committed():
                self.commit(event)
            case WasReset():
                self.reset()

    def add_group(self, event: GroupAdded, payload: bytes, location: tuple[int, int, int] | None = None) -> int:
        """Take a group in. Returns -1 when it is queued, else the number of sequences its environment has buffered."""
        group = StoredGroup(
            event.key,
            event.size,
            event.num_tokens,
            event.group_id,
            event.env_id,
            event.binary,
            payload,
            len(payload),
            location,
        )
        self.next_key = max(self.next_key, event.key + 1)
        self.groups[group.key] = group
        env = self.envs.get(group.env_id)
        answer = -1
        if env is not None:
            env.num_groups += 1
            env.num_tokens += group.num_tokens
            env.last_group = self.clock()
        if env is not None and group.size != env.group_size:
            self._enqueue(env.pieces.add(group.key, group.size))
            answer = env.pieces.num_sequences
            # It may wait for long: not in a slab that it would keep alive alone.
            group.payload = bytes(payload)
        else:
            self._enqueue([group.key])
        if event.given_id:
            self.seen.put(event.group_id, answer)
        self.counters.groups_accepted += 1
        self.counters.sequences_accepted += group.size
        self.counters.tokens_accepted += group.num_tokens
        return answer

    def _enqueue(self, keys: Iterable[int]) -> None:
        for key in keys:
            group = self.groups[key]
            self.queue.add(GroupMeta(key, group.size, group.env_id))
            self.queued_bytes += group.num_bytes
            self.latest = group
            if (env := self.envs.get(group.env_id)) is not None:
                env.largest_group = max(env.largest_group, group.size)
        self.queue_version += 1

    def form_batch(self, event: BatchFormed) -> Batch:
        """These groups leave the queue and are the next batch."""
        self.queue.remove(event.keys)
        for key in event.keys:
            self.queued_bytes -= self.groups[key].num_bytes
        self.queue_version += 1
        self.counters.batches_formed += 1
        return self.ledger.add(event.seq, event.keys)

    def ack(self, event: BatchAcked) -> None:
        """The trainer has these batches."""
        for seq in event.seqs:
            batch = self.ledger.batches.get(seq)
            if batch is None or batch.state is LeaseState.ACKED:
                continue
            self.counters.batches_acked += 1
            if self.ledger.ack(seq, keep=event.keep) is not None:
                self._forget([batch])
            else:
                self._retain(batch)
        self._bound_retention()

    def _retain(self, batch: Batch) -> None:
        """Keep an acknowledged batch for a trainer that may come back; in memory only when there is no journal."""
        batch.retained = True
        for group in self.batch_groups(batch):
            self.retained_bytes += group.num_bytes
            if group.location is not None:
                group.payload = None
        slabs.trim()

    def _bound_retention(self) -> None:
        """Forget the oldest acknowledged batches when the trainer commits too rarely to keep them all."""
        while self.retained_bytes > self.retain_bytes:
            oldest = next((batch for batch in self.ledger.batches.values() if batch.state is LeaseState.ACKED), None)
            if oldest is None:
                return
            logger.warning(
                "batch %d is acknowledged but behind no checkpoint; forgotten, because %d bytes are kept for resuming (limit %d)",
                oldest.seq, self.retained_bytes, self.retain_bytes,
            )  # fmt: skip
            self.ledger.forget(oldest)
            self._forget([oldest])

    def commit(self, event: Committed) -> None:
        """A checkpoint contains every batch up to this one."""
        self._forget(self.ledger.commit(event.seq))

    def _forget(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            for key in batch.keys:
                group = self.groups.pop(key)
                if batch.retained:
                    self.retained_bytes -= group.num_bytes
                self.on_forget(group)
        slabs.trim()

    def register(self, event: Registered) -> None:
        """A trainer registered: its settings and step hold from now on; batches it does not have are delivered (again)."""
        changed = self.registration is not None and self.registration.batch_size != event.batch_size
        self.registration = event
        self.max_token_len = event.max_token_len
        self._forget(self.ledger.register(event.resume_after))
        if event.resume_after is not None:
            self._unretain()
        if changed:
            for batch in list(self.ledger.waiting()):
                del self.ledger.batches[batch.seq]
                self._enqueue(batch.keys)
        self.queue_version += 1

    def _unretain(self) -> None:
        """The trainer resumed: what was kept for that is waiting again."""
        for batch in self.ledger.batches.values():
            batch.retained = False
        self.retained_bytes = 0

    def register_env(self, event: EnvRegistered) -> Environment:
        """An environment registered, or came back."""
        known = self.envs.get(event.env_id)
        held = known.pieces.keys if known is not None and known.group_size != event.group_size else []
        env = self.envs.apply(event)
        for key in held:
            size = self.groups[key].size
            self._enqueue([key] if size == env.group_size else env.pieces.add(key, size))
        return env

    def reset(self) -> None:
        """Clear everything; keys and batch numbers go on, so that a client's position stays meaningful."""
        for group in self.groups.values():
            self.on_forget(group)
        self._clear()
        slabs.trim()

    # ---- telling ------------------------------------------------------------------------------------------------------

    def notify(self, name: str, *args: Any) -> None:
        """Tell every observer; one that fails is logged and does no harm."""
        for observer in self.observers:
            try:
                getattr(observer, name)(*args)
            except Exception:  # an observer is somebody else's code: whatever it raises must not reach the data path
                logger.exception("observer %s failed in %s", type(observer).__name__, name)

    def notify_group(self, event: GroupAdded, group: WireGroup) -> None:
        """Tell every observer about an accepted group."""
        if not self.observers:
            return
        env = self.envs.get(event.env_id)
        told = GroupEvent(
            key=event.key,
            group_id=event.group_id,
            env_id=event.env_id,
            env_name=env.wandb_name if env else None,
            size=event.size,
            num_tokens=event.num_tokens,
            scores=group.scores,
            policy_versions=group.policy_versions,
            reward_components=group.reward_components,
            payload=group.payload,
            binary=group.binary,
        )
        self.notify("group_accepted", told)
