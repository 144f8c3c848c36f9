"""Who runs in the next step: continuous batching with chunked prefill, group forks and preemption by recompute.

A step either reads prompts (up to `max_prefill_tokens` of them, in chunks) or decodes one token of every running
sample. While both kinds of work exist they alternate, so a long prompt does not stall running replies. The samples
of a request are one sequence until the prompt is read; then they fork: full blocks are shared, the last partial one
is copied. When the cache is full, the youngest sample gives its blocks back and is read again later, reply included.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlaslib.engine.block_manager import ROOT, BlockManager
from atlaslib.engine.sequence import Request, Sequence, SlotTable, Tokens


@dataclass(slots=True, eq=False)
class Chunk:
    """Tokens [start, end) of one sequence that a prefill step reads."""

    seq: Sequence
    start: int
    end: int

    @property
    def last(self) -> bool:
        return self.end == len(self.seq.tokens)


@dataclass(slots=True)
class PrefillPlan:
    chunks: list[Chunk]


@dataclass(slots=True)
class DecodePlan:
    """One more token for each of these slots. Results are dropped for slots that have been given away since."""

    slots: np.ndarray[Any, Any]  # int64 [B]
    positions: np.ndarray[Any, Any]  # int64 [B], of the token that goes in
    at: np.ndarray[Any, Any]  # int64 [B], reply index of the token that comes out
    epochs: np.ndarray[Any, Any]  # int64 [B], see SlotTable.epoch


Plan = PrefillPlan | DecodePlan


class Scheduler:
    """Queues, block ownership, and the next plan."""

    def __init__(
        self,
        blocks: BlockManager,
        table: SlotTable,
        *,
        max_prefill_tokens: int,
        max_model_len: int,
        prefix_cache: bool,
        max_scored_tokens: int = 1 << 30,
        admit_share: int = 0,
    ) -> None:
        self.blocks, self.table = blocks, table
        self.max_prefill_tokens, self.max_model_len, self.prefix_cache = max_prefill_tokens, max_model_len, prefix_cache
        self.max_scored_tokens = max_scored_tokens  # prompt tokens of one step whose logits are all kept
        self.admit_at = table.num_slots // admit_share if admit_share else 1  # free slots worth a prefill step
        self.waiting: deque[Sequence] = deque()  # the first sample of a request stands for all of them
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []  # decoding, oldest first
        self.block_copies: list[tuple[int, int]] = []  # (from, to), done by the runner before the next step
        self.num_preemptions = 0
        self.hold_new = False  # drain: only samples that have started may continue
        self._decoded_last = True
        self._slots: np.ndarray[Any, Any] | None = None  # slots of `running`, rebuilt when membership changes

    def add(self, request: Request) -> None:
        self.waiting.append(request.sequences[0])

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def started(self) -> bool:
        """Some sample has begun and not ended."""
        preempted = (seq.saved is not None for seq in tuple(self.waiting))  # a copy: another thread may be asking
        return bool(self.running or self.prefilling) or any(preempted)

    def schedule(self) -> Plan | None:
        """The next step, or None when there is nothing to do."""
        return self._prefill() or self.decode() if self._decoded_last else self.decode() or self._prefill()

    # prefill

    def _prefill(self) -> PrefillPlan | None:
        """Chunks of half-read prompts first, then of waiting ones, as long as tokens, slots and blocks last."""
        budget, scored = self.max_prefill_tokens, self.max_scored_tokens
        chunks: list[Chunk] = []
        being_read = {self._next_block(seq) for seq in self.prefilling} - {None}
        postponed: list[Sequence] = []
        worth_it = len(self.table.free) >= min(self.admit_at, len(self.waiting))
        queue = deque(self.prefilling)
        while budget > 0 and (queue or (worth_it and self.waiting)):
            seq = queue.popleft() if queue else self.waiting.popleft()
            room = min(budget, scored) if seq.request.wants_prompt_logprobs else budget
            if seq.slot < 0:
                if self.hold_new and seq.saved is None:
                    postponed.append(seq)
                    continue  # a preempted sample may wait behind it
                if room == 0 or not self._admit(seq, being_read):
                    postponed.append(seq)
                    if self.table.free and self._next_block(seq) in being_read:
                        continue  # its beginning is being read in this very step: share it in the next one
                    break
                if (next_block := self._next_block(seq)) is not None:
                    being_read.add(next_block)
                self.prefilling.append(seq)
            if room > 0:
                chunk = Chunk(seq, seq.num_computed, min(len(seq.tokens), seq.num_computed + room))
                chunks.append(chunk)
                budget -= chunk.end - chunk.start
                scored -= chunk.end - chunk.start if seq.request.wants_prompt_logprobs else 0
        self.waiting.extendleft(reversed(postponed))
        if not chunks:
            return None
        self._decoded_last = False
        return PrefillPlan(chunks)

    def _next_block(self, seq: Sequence) -> tuple[int, bytes] | None:
        """The first whole block of `seq` that is not in the cache, as the prefix tree would know it."""
        size = self.blocks.block_size
        start = seq.num_remembered * size
        if not self.prefix_cache or seq.request.wants_prompt_logprobs or start + size > len(seq.tokens) - 1:
            return None
        return seq.node, seq.tokens[start : start + size].tobytes()

    def _admit(self, seq: Sequence, being_read: set[tuple[int, bytes] | None]) -> bool:
        """Slot and blocks for a waiting sequence; False when it has to wait."""
        if not self.table.free:
            return False
        tokens = seq.tokens
        found: list[int] = []
        seq.node = ROOT
        if self.prefix_cache and not seq.request.wants_prompt_logprobs:
            found, seq.node = self.blocks.find_prefix(tokens, limit=len(tokens) - 1)  # the last token must be run
        seq.num_remembered = len(found)
        next_block = self._next_block(seq)
        reserved = sum(1 for block in found if self.blocks.users(block) == 0)
        missing = self.blocks.blocks_for(len(tokens)) - len(found)
        no_room = missing + reserved + (1 if self.running else 0) > self.blocks.num_free
        if no_room or (next_block is not None and next_block in being_read):
            return False
        seq.blocks = [self.blocks.share(block) for block in found]  # shared first, so that none is handed out below
        seq.blocks += [self.blocks.allocate() for _ in range(missing)]
        seq.num_computed, seq.cacheable = len(found) * self.blocks.block_size, True
        self._place(seq)
        return True

    def _place(self, seq: Sequence) -> None:
        prompt = len(seq.request.prompt)
        self.table.place(seq, min(seq.params.max_tokens, self.max_model_len - prompt))
        self.table.set_blocks(seq.slot, 0, seq.blocks)

    def prefilled(self, chunk: Chunk) -> list[Sequence]:
        """A chunk has been run. When it was the last: the samples that now sample from its logits."""
        seq = chunk.seq
        seq.num_computed = chunk.end
        self._remember(seq, seq.tokens, chunk.end)
        if not chunk.last:
            return []
        self.prefilling.remove(seq)
        forked = [seq]
        fresh = self.table.generated[seq.slot] == 0 and seq.index == 0
        for sibling in seq.request.sequences[1:] if fresh else ():
            if sibling.finished or sibling.slot >= 0 or sibling in self.waiting:
                continue
            if self._fork(seq, sibling):
                forked.append(sibling)
            else:
                self.waiting.appendleft(sibling)
        self.running.extend(forked)
        self._slots = None
        return forked

    def _fork(self, seq: Sequence, sibling: Sequence) -> bool:
        """`sibling` continues from `seq`'s prompt: full blocks shared, a partial last one copied."""
        partial = len(seq.tokens) % self.blocks.block_size != 0
        if not self.table.free or self.blocks.num_free < (1 if partial else 0):
            return False
        full = seq.blocks[:-1] if partial else seq.blocks
        sibling.blocks = [self.blocks.share(block) for block in full]
        if partial:
            sibling.blocks.append(self.blocks.allocate())
            self.block_copies.append((seq.blocks[-1], sibling.blocks[-1]))
        sibling.tokens, sibling.num_computed = seq.tokens, seq.num_computed
        sibling.node, sibling.num_remembered, sibling.cacheable = seq.node, seq.num_remembered, seq.cacheable
        self._place(sibling)
        return True

    def _remember(self, seq: Sequence, tokens: Tokens, computed: int) -> None:
        if not self.prefix_cache or not seq.cacheable:
            return
        size = self.blocks.block_size
        for index in range(seq.num_remembered, computed // size):
            seq.node = self.blocks.remember(seq.blocks[index], seq.node, tokens[index * size : (index + 1) * size])
            seq.num_remembered = index + 1

    # decode

    def decode(self) -> DecodePlan | None:
        """One token of every running sample; preempts the youngest while blocks are missing."""
        self._give_blocks()
        slots = self._unfinished()
        if not len(slots):
            return None
        self._decoded_last = True
        return self.plan_of(slots)

    def _unfinished(self) -> np.ndarray[Any, Any]:
        """Slots of running samples whose last token is not already on its way."""
        if self._slots is None:
            self._slots = np.array([seq.slot for seq in self.running], dtype=np.int64)
        unfinished: np.ndarray[Any, Any] = self._slots[
            self.table.generated[self._slots] < self.table.max_new[self._slots]
        ]
        return unfinished

    def plan_of(self, slots: np.ndarray[Any, Any]) -> DecodePlan:
        table = self.table
        return DecodePlan(slots, table.length[slots] - 1, table.generated[slots].copy(), table.epoch[slots].copy())

    @property
    def short_of_blocks(self) -> bool:
        """The next decode step may have to preempt."""
        return self.blocks.num_free < len(self.running)

    def _give_blocks(self) -> None:
        """A block for every sample whose next position lies beyond the ones it has."""
        table = self.table
        slots = self._unfinished()
        due = slots[(table.length[slots] - 1) // self.blocks.block_size >= table.num_blocks[slots]]
        for seq in [table.sequences[slot] for slot in due]:
            assert seq is not None
            while not self.blocks.num_free and seq.slot >= 0:
                self.preempt(self.running[-1])
            if seq.slot >= 0:  # not preempted for an older one
                seq.blocks.append(self.blocks.allocate())
                table.set_blocks(seq.slot, len(seq.blocks) - 1, seq.blocks[-1:])

    def launched(self, slots: np.ndarray[Any, Any]) -> None:
        """One more token of these slots is on its way."""
        self.table.length[slots] += 1
        self.table.generated[slots] += 1

    def preempt(self, seq: Sequence) -> None:
        """Take slot and blocks away; prompt and reply so far are read again when there is room."""
        self.num_preemptions += 1
        self.table.save(seq)
        seq.tokens = np.concatenate([seq.request.prompt, seq.saved[0]])
        self._leave(seq)
        self.waiting.appendleft(seq)

    def requeue_all(self) -> None:
        """Every running sample is read again (new weights, fresh keys), oldest first."""
        for seq in reversed(self.running[:]):
            self.preempt(seq)
        for seq in reversed(self.prefilling[:]):
            self._drop(seq)
            self.waiting.appendleft(seq)

    def finish(self, seq: Sequence, num_reply: int) -> None:
        """`seq` is done: remember its full blocks for the next turn of the same talk, then let them go."""
        tokens = np.concatenate([seq.request.prompt, self.table.out[0][seq.slot, :num_reply]])
        self._remember(seq, tokens, len(tokens) - 1)  # the last token was never run
        self._leave(seq)
        seq.finished = True

    def abort(self, seq: Sequence) -> None:
        """Remove a sequence from wherever it is."""
        if seq in self.waiting:
            self.waiting.remove(seq)
        elif seq in self.prefilling:
            self._drop(seq)
        elif seq.slot >= 0:
            self._leave(seq)
        seq.finished = True

    def _drop(self, seq: Sequence) -> None:
        """A half-read prompt loses what was read."""
        self.prefilling.remove(seq)
        if self.table.generated[seq.slot]:
            self.table.save(seq)
        self.blocks.release(seq.blocks)
        seq.blocks, seq.num_computed = [], 0
        self.table.remove(seq)

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._slots = None
        self.blocks.release(seq.blocks)
        seq.blocks, seq.num_computed = [], 0
        self.table.remove(seq)
