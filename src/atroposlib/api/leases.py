"""Who has which batch: numbers, leases, acknowledgements. Pure bookkeeping.

A batch is formed once, gets the next number (1, 2, 3, ...) and keeps its content for good. Then it is

    waiting   nobody has it (its reply never arrived, or the trainer came back from a checkpoint)
    leased    its reply is on the way or has arrived; nobody has acknowledged it
    acked     the trainer has it; it is kept until the trainer's checkpoint contains it (only for clients that commit)

and forgotten after that. A plain client, which knows none of this, acknowledges what it has received by asking for the next
batch. `delivered` counts the batches leased or acked since the trainer registered: the step the run is at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum


class LeaseState(IntEnum):
    """Where a batch is; see the module docstring."""

    WAITING = 0
    LEASED = 1
    ACKED = 2


@dataclass(slots=True)
class Batch:
    """A formed batch."""

    seq: int
    keys: list[int]
    state: LeaseState = LeaseState.LEASED
    sent_plain: bool = False
    """Its whole reply went out to a client that acknowledges by asking for the next."""
    sent: bool = False
    retained: bool = False
    """Acknowledged and kept for a trainer that may come back."""
    lease: int = 0
    """Changes whenever the batch changes hands, so that late word about an earlier delivery is recognised."""


class BatchLedger:
    """All batches that are not forgotten, in order."""

    def __init__(self) -> None:
        self.batches: dict[int, Batch] = {}  # by seq, ascending
        self.next_seq = 1
        self.committed = 0
        self.forgotten = 0
        """The highest number that is gone for good: nobody can resume from before it."""
        self.delivered = 0

    def add(self, seq: int, keys: list[int]) -> Batch:
        """A batch was formed and is being sent."""
        batch = self.batches[seq] = Batch(seq, keys)
        self.next_seq = max(self.next_seq, seq + 1)
        self.delivered += 1
        return batch

    def lease(self, batch: Batch) -> None:
        """A batch goes out (again)."""
        if batch.state is LeaseState.WAITING:
            batch.state = LeaseState.LEASED
            batch.lease += 1
            self.delivered += 1

    def give_back(self, seq: int) -> bool:
        """The reply with this batch did not arrive: it waits for the next who asks. False when it was acknowledged meanwhile."""
        batch = self.batches.get(seq)
        if batch is None or batch.state is not LeaseState.LEASED:
            return False
        batch.state = LeaseState.WAITING
        batch.sent = batch.sent_plain = False
        self.delivered -= 1
        return True

    def mark_sent(self, seq: int, *, plain: bool) -> None:
        """The whole reply went out."""
        batch = self.batches.get(seq)
        if batch is not None and batch.state is not LeaseState.ACKED:
            self.lease(batch)
            batch.sent = True
            batch.sent_plain = plain

    def ack(self, seq: int, *, keep: bool) -> Batch | None:
        """The trainer has this batch. Returns it when it is forgotten by this."""
        batch = self.batches.get(seq)
        if batch is None:
            return None
        self.lease(batch)
        batch.state = LeaseState.ACKED
        if keep and seq > self.committed:
            return None
        self.forget(batch)
        return batch

    def forget(self, batch: Batch) -> None:
        """Nobody will ask for this batch again."""
        del self.batches[batch.seq]
        self.forgotten = max(self.forgotten, batch.seq)

    def commit(self, seq: int) -> list[Batch]:
        """A checkpoint contains every batch up to `seq`; returns those forgotten by this."""
        self.committed = max(self.committed, seq)
        done = [batch for batch in self.batches.values() if batch.seq <= seq]
        for batch in done:
            self.lease(batch)
            self.forget(batch)
        return done

    def register(self, resume_after: int | None) -> list[Batch]:
        """A trainer starts: it has nothing but what its checkpoint contains. Returns the batches forgotten by this.

        Without a checkpoint position: what was acknowledged stays so, what was not is delivered again.
        """
        done: list[Batch] = []
        if resume_after is not None:
            done = self.commit(resume_after)
            self.next_seq = max(self.next_seq, resume_after + 1)
        for batch in self.batches.values():
            if resume_after is not None or batch.state is LeaseState.LEASED:
                batch.state = LeaseState.WAITING
                batch.sent = batch.sent_plain = False
                batch.lease += 1
        self.delivered = 0
        return done

    def settle_after_restart(self) -> None:
        """A reply that was on its way when the server stopped did not arrive."""
        for batch in list(self.batches.values()):
            if batch.state is LeaseState.LEASED and not batch.sent:
                self.give_back(batch.seq)

    def plain_received(self) -> list[int]:
        """Batches a plain client has received in full: asking for the next acknowledges them."""
        return [batch.seq for batch in self.batches.values() if batch.sent_plain and batch.state is LeaseState.LEASED]

    def first_waiting(self) -> Batch | None:
        """The oldest batch that nobody has."""
        return next((batch for batch in self.batches.values() if batch.state is LeaseState.WAITING), None)

    def first_after(self, after: int | None) -> Batch | None:
        """The oldest batch after this number, or, without one, the oldest that is not acknowledged."""
        if after is None:
            return next((batch for batch in self.batches.values() if batch.state is not LeaseState.ACKED), None)
        return next((batch for batch in self.batches.values() if batch.seq > after), None)

    def waiting(self) -> Iterator[Batch]:
        """Formed batches that nobody has: they count as queued."""
        return (batch for batch in self.batches.values() if batch.state is LeaseState.WAITING)
