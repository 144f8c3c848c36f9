"""`RolloutService`: the store and its journal as one asynchronous thing; what the HTTP routes call.

Every change goes the same way: decide (store), journal (group commit on a writer thread), apply (store), answer. With no journal
(`--in-memory`) the middle step falls away. Records are applied in the order in which they are in the journal.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from atroposlib.api.compaction import Compactor
from atroposlib.api.environments import Environment
from atroposlib.api.events import (
    BatchAcked,
    BatchSent,
    Committed,
    EnvGone,
    Event,
    GroupAdded,
    Registered,
    Started,
    WasReset,
)
from atroposlib.api.journal import Done, Journal
from atroposlib.api.leases import Batch, LeaseState
from atroposlib.api.observer import LaggingObserver
from atroposlib.api.schemas import RegisterEnv, Registration
from atroposlib.api.store import RolloutStore, StoredGroup
from atroposlib.api.wire import WireError, WireGroup
from atroposlib.errors import JournalError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Location = tuple[int, int, int] | None

SETTLE_S = 1.0
"""How long a plain `/batch` waits for another one that is still being sent: a retry must not overtake it."""


@dataclass(kw_only=True, slots=True)
class Delivery:
    """A batch on its way to a client."""

    batch: Batch
    lease: int
    """The batch's lease when it went out."""
    groups: list[StoredGroup]
    payloads: list[bytes]
    plain: bool


class RolloutService:
    """What the rollout server does, without HTTP."""

    def __init__(self, store: RolloutStore, journal: Journal | None = None) -> None:
        self.store = store
        self.journal = journal
        self.started_at = time.time()
        self._read_back: dict[int, tuple[int, int]] = {}  # groups and tokens by environment that an earlier server took
        self._arriving: dict[str, list[Done]] = {}  # ids being written, and who waits for the answer
        self._compactor = Compactor(store)
        self._register_lock = asyncio.Lock()
        self._batch_lock = asyncio.Lock()
        self._sending: dict[int, asyncio.Event] = {}

    # ---- start and stop -----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Read the journal back and start writing."""
        if self.journal is not None and not self.journal.is_open:
            await self.journal.open(self.store)
            self._read_back = {env.env_id: (env.num_groups, env.num_tokens) for env in self.store.envs.all}

    async def close(self) -> None:
        """Write what is left and stop."""
        if self.journal is not None and self.journal.is_open:
            await self.journal.close()

    async def _do(self, event: Event, apply: Callable[[Location], T], payload: bytes = b"") -> T:
        if self.journal is None:
            return apply(None)
        done, answered = _answer_to_future()
        self.journal.write(event, payload, apply, answered)
        return cast(T, await done)

    # ---- trainer ------------------------------------------------------------------------------------------------------

    async def register(self, request: Registration) -> None:
        """A trainer registers, or registers again."""
        event = Registered(**request.model_dump())
        await self._settle()
        async with self._register_lock, self._batch_lock:
            after, forgotten = request.resume_after, self.store.ledger.forgotten
            if after is not None and after < forgotten:
                raise WireError(
                    f"cannot resume after batch {after}: batches up to {forgotten} are gone (committed, or too many uncommitted ones). "
                    f"Resume from a newer checkpoint, or register without resume_after to go on with new data",
                    "resume_after",
                    status=409,
                )
            await self._do(event, lambda _: self.store.register(event))
            if after is not None:
                self.store.notify("committed", after, request.starting_step)

    async def next_batch(self, *, plain: bool, after: int | None = None) -> Delivery | None:
        """The next batch for this client, leased to it; None while there is none. Call `delivered` or `undelivered` after."""
        if plain:
            await self._settle()
        async with self._batch_lock:
            if not self.store.started:
                await self._do(Started(), lambda _: self.store.apply(Started()))
            batch = await self._ack_and_choose(plain=plain, after=after)
            if batch is None:
                return None
            self._sending[batch.seq] = asyncio.Event()
            lease = batch.lease
            groups = self.store.batch_groups(batch)
        delivery = Delivery(batch=batch, lease=lease, groups=groups, payloads=[], plain=plain)
        try:
            delivery.payloads = await self._payloads(groups)
        except BaseException:  # also a cancelled request: the lease is given back, the error goes on
            self.undelivered(batch, lease)
            raise
        return delivery

    async def _ack_and_choose(self, *, plain: bool, after: int | None) -> Batch | None:
        """A plain client has what it received: note that; then the batch to deliver, None while there is none."""
        ledger = self.store.ledger
        received = ledger.plain_received() if plain else []
        if received and ledger.first_waiting() is None:
            return await self._ack_and_form(received)
        if received:
            await self._ack(received, keep=False)
        batch = ledger.first_waiting() if plain else ledger.first_after(after)
        if batch is None:
            return await self._form()
        ledger.lease(batch)
        self.store.counters.batches_redelivered += 1
        return batch

    async def _ack_and_form(self, received: list[int]) -> Batch | None:
        """Both in one commit: forming begins, as a task, right after the acknowledgement was given to the journal."""
        forming = asyncio.ensure_future(self._form())
        try:
            await self._ack(received, keep=False)
        except JournalError:
            formed = (await asyncio.gather(forming, return_exceptions=True))[0]
            if isinstance(formed, Batch):
                self.store.ledger.give_back(formed.seq)  # nobody gets it this time
            raise
        return await forming

    async def _settle(self) -> None:
        for sending in list(self._sending.values()):
            try:
                await asyncio.wait_for(sending.wait(), SETTLE_S)
            except TimeoutError:
                logger.info("another client is still receiving a batch after %s s; handing out the next one", SETTLE_S)

    async def _form(self) -> Batch | None:
        event = self.store.plan_batch()
        if event is None:
            return None
        batch = await self._do(event, lambda _: self.store.form_batch(event))
        self.store.notify("batch_formed", batch.seq, [self.store.groups[key].group_id for key in batch.keys])
        return batch

    async def _payloads(self, groups: list[StoredGroup]) -> list[bytes]:
        payloads = [group.payload for group in groups]
        if self.journal is None or None not in payloads:
            return [payload or b"" for payload in payloads]
        read = self.journal.read
        return await asyncio.to_thread(lambda: [group.payload or read(group.location) for group in groups])

    async def delivered(self, delivery: Delivery) -> None:
        """The whole reply went out."""
        batch = delivery.batch
        self._sent(batch.seq)
        if batch.lease != delivery.lease:  # a trainer registered meanwhile: it waits for whoever asks next
            return
        event = BatchSent(batch.seq, delivery.plain)
        self.store.ledger.mark_sent(batch.seq, plain=delivery.plain)
        self.store.counters.batches_delivered += 1
        self.store.notify("batch_delivered", batch.seq)
        try:
            await self._do(event, lambda _: None)
        except JournalError as error:  # the reply is out; without this record the batch may come twice after a restart
            logger.warning("that batch %d arrived could not be noted: %s", batch.seq, error)

    def undelivered(self, batch: Batch, lease: int) -> None:
        """The client to whom it was leased went away without the reply: the batch waits for the next who asks."""
        self._sent(batch.seq)
        if batch.lease == lease and self.store.ledger.give_back(batch.seq):
            logger.warning(
                "batch %d was not received (the client closed the connection); it will be delivered again", batch.seq
            )

    def _sent(self, seq: int) -> None:
        if (sending := self._sending.pop(seq, None)) is not None:
            sending.set()

    async def ack(self, seq: int) -> int:
        """A client that acknowledges explicitly has this batch and all before it. Returns how many that is news of."""
        self._known_seq(seq)
        batches = self.store.ledger.batches.values()
        seqs = [batch.seq for batch in batches if batch.seq <= seq and batch.state is not LeaseState.ACKED]
        await self._ack(seqs, keep=True)
        return len(seqs)

    async def _ack(self, seqs: list[int], *, keep: bool) -> None:
        event = BatchAcked(seqs, keep)
        await self._do(event, lambda _: self.store.ack(event))
        for seq in seqs:
            self.store.notify("batch_acked", seq)

    async def commit(self, seq: int, step: int) -> None:
        """A checkpoint contains every batch up to this one."""
        self._known_seq(seq)
        event = Committed(seq, step)
        await self._let_observers_finish()
        await self._do(event, lambda _: self.store.commit(event))
        self.store.notify("committed", seq, step)

    async def _let_observers_finish(self) -> None:
        """A commit forgets batches: what a run log has not written by then, a restart could not tell it any more."""
        for observer in self.store.observers:
            if isinstance(observer, LaggingObserver):
                try:
                    await asyncio.to_thread(observer.flush)
                except TimeoutError as error:
                    logger.warning("%s", error)

    def _known_seq(self, seq: int) -> None:
        last = self.store.ledger.next_seq - 1
        if seq > last:
            raise WireError(
                f"batch {seq} is not known here; the last one is {last}. Register the trainer again",
                "batch_seq",
                status=409,
            )

    # ---- environments -------------------------------------------------------------------------------------------------

    async def register_env(self, request: RegisterEnv) -> Environment | None:
        """An environment registers; None while no trainer has asked for a batch."""
        if self.store.registration is None or not self.store.started:
            return None
        async with self._register_lock:
            event = self.store.plan_env(**request.model_dump())
            return await self._do(event, lambda _: self.store.register_env(event))

    async def disconnect_env(self, env_id: int) -> bool:
        """An environment leaves; False when it is not known."""
        if self.store.envs.get(env_id) is None:
            return False
        event = EnvGone(env_id)
        await self._do(event, lambda _: self.store.apply(event))
        return True

    # ---- data ---------------------------------------------------------------------------------------------------------

    async def submit(self, groups: list[WireGroup]) -> list[int]:
        """Store all groups or none; for each -1 (queued) or the sequences buffered. An id that was there before is answered as before."""
        if len(groups) == 1:
            return [await self._submit(groups[0])]
        await self._let_arrive(groups)
        for group in groups:
            self.store.check_size(group)
        together = object()
        return list(await asyncio.gather(*[self._submit(group, together) for group in groups]))

    async def _let_arrive(self, groups: list[WireGroup]) -> None:
        """What is being written for somebody else may yet be refused; the groups here should not depend on it."""
        while waiting := next((self._arriving[g.group_id] for g in groups if g.group_id in self._arriving), None):
            done, answered = _answer_to_future()
            waiting.append(lambda answer, error, answered=answered: answered(answer, None))  # type: ignore[misc]
            await done

    def _submit(self, group: WireGroup, together: object | None = None) -> asyncio.Future[int]:
        done, answered = _answer_to_future()
        answer = self.submit_one(group, answered, together)
        if answer is not None:
            done.set_result(answer)
        return done

    def submit_one(self, group: WireGroup, answered: Done, together: object | None = None) -> int | None:
        """As `submit` for one group: the answer, or None: `answered` is called with it when the journal is written.

        `together`: as for `Journal.write`.
        """
        store, group_id = self.store, group.group_id
        store.envs.touch(group.env_id)
        if group_id is not None:
            known, waiting = store.seen.get(group_id), self._arriving.get(group_id)
            if known is not None or waiting is not None:
                store.counters.groups_duplicate += 1
                if known is None and waiting is not None:  # it is being written right now
                    waiting.append(answered)
                return known
        event = store.plan_group(group)
        if self.journal is None:
            return self._add_group(event, group, None)
        if group_id is not None:
            self._arriving[group_id] = [answered]
            answered = functools.partial(self._answer_all, group_id)
        self.journal.write(
            event, group.payload, lambda location: self._add_group(event, group, location), answered, together
        )
        return None

    def _answer_all(self, group_id: str, answer: Any, error: Exception | None) -> None:
        """The group is in, or refused: say so to all who sent it."""
        for answered in self._arriving.pop(group_id):
            answered(answer, error)

    def _add_group(self, event: GroupAdded, group: WireGroup, location: Location) -> int:
        answer = self.store.add_group(event, group.payload, location)
        self.store.notify_group(event, group)
        self._compactor.add(event.key, group.blanks)
        return answer

    def rejected(self, env_id: int | None, reason: str) -> None:
        """A group was refused."""
        self.store.counters.groups_rejected += 1
        self.store.notify("group_rejected", env_id, reason)

    def report(self, source: str, step: int, when: float | None, metrics: dict[str, float]) -> None:
        """A process reports numbers; the observers keep them."""
        self.store.notify("reported", source, step, time.time() if when is None else when, metrics)

    async def reset(self) -> None:
        """Clear everything."""
        async with self._register_lock, self._batch_lock:
            await self._do(WasReset(), lambda _: self.store.reset())

    def overview(self) -> dict[str, Any]:
        """Everything `atropos status` shows."""
        store, now = self.store, self.store.clock()
        ledger, registration = store.ledger, store.registration
        return {
            "uptime_s": time.time() - self.started_at,
            "durable": self.journal is not None,
            "queue": {
                "groups": store.queue_groups,
                "sequences": store.queue.num_sequences,
                "bytes": store.queued_bytes,
                "buffered_sequences": sum(env.pieces.num_sequences for env in store.envs.all),
                "oversized_groups": store.oversized_groups,
            },
            "batches": {
                "last_formed": ledger.next_seq - 1,
                "committed": ledger.committed,
                "unacknowledged": sum(1 for batch in ledger.batches.values() if not batch.retained),
                "retained": sum(1 for batch in ledger.batches.values() if batch.retained),
            },
            "trainer": None
            if registration is None
            else {
                "step": store.current_step,
                "num_steps": registration.num_steps,
                "batch_size": registration.batch_size,
                "started": store.started,
            },
            "environments": [
                {
                    "env_id": env.env_id,
                    "name": env.wandb_name,
                    "alive": store.envs.is_alive(env),
                    "silent_s": now - env.last_seen,
                    "groups": env.num_groups,
                    "tokens": env.num_tokens,
                    "groups_since_start": max(0, env.num_groups - self._read_back.get(env.env_id, (0, 0))[0]),
                    "tokens_since_start": max(0, env.num_tokens - self._read_back.get(env.env_id, (0, 0))[1]),
                    "last_group_s": None if env.last_group is None else now - env.last_group,
                    "queued_sequences": store.queue.env_sequences(env.env_id),
                    "buffered_sequences": env.pieces.num_sequences,
                    "group_size": env.group_size,
                    "weight": store.envs.weight_of(env),
                    "min_batch_allocation": env.min_batch_allocation,
                }
                for env in store.envs.all
            ],
            "counters": {name: getattr(store.counters, name) for name in store.counters.__slots__},
        }


def _answer_to_future() -> tuple[asyncio.Future[Any], Done]:
    """A future, and the call that settles it (unless whoever waited has gone)."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered(answer: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error)

    return future, answered
