"""A request, its samples, and the table that holds what every running sample has produced so far.

The table is a struct of numpy arrays with one row ("slot") per running sample, so that a step over a thousand
samples is a handful of array operations and Python touches a sample only when it starts, is watched, or ends.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlaslib.engine.config import SamplingParams
from atlaslib.engine.sampling import mix_seed

_FIRST_CAPACITY = 256


@dataclass(kw_only=True, slots=True)
class Completion:
    """One sampled reply; every list has one entry per token of `token_ids` (a stop token is part of the reply).

    Example: two tokens, the second one sampled after a weight update:
    ``Completion(token_ids=[5, 2], logprobs=[-0.1, -0.7], versions=[3, 4], finish_reason="stop", ...)``
    """

    token_ids: list[int]
    logprobs: list[float]  # at the distribution the token was drawn from
    temperature_logprobs: list[
        float
    ]  # softmax(logits / T), no truncation, bias or penalties: a trainer's ratio uses it
    raw_logprobs: list[float]  # softmax(logits)
    versions: list[int]  # policy version that made the token
    finish_reason: str | None  # "stop" | "length" | "abort"; None in a streamed part that is not the last
    text: str | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    top_logprobs: list[dict[int, float]] | None = None  # when `logprobs` > 0
    prompt_logprobs: list[float] | None = None  # when asked for; entry 0 is 0.0
    prompt_top_logprobs: list[dict[int, float]] | None = None

    @property
    def policy_versions(self) -> list[int]:
        """The distinct versions, ascending."""
        return sorted(set(self.versions))


Tokens = NDArray[np.int64]
TokenCallback = Callable[[int, Completion], None]
"""Called in the engine's thread with (sample index, the new part of that sample's reply)."""


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with its sampling parameters and the future its completions go to."""

    prompt: Tokens
    params: SamplingParams
    seed: int
    on_tokens: TokenCallback | None = None
    future: Future[list[Completion]] = field(default_factory=Future)
    score_temperature: float | None = None  # set: only score the prompt, sample nothing
    sequences: list[Sequence] = field(default_factory=list)
    completions: dict[int, Completion] = field(default_factory=dict)
    prompt_logprobs: list[float] | None = None
    prompt_top_logprobs: list[dict[int, float]] | None = None

    def __post_init__(self) -> None:
        self.sequences = [Sequence(self, index, self.prompt) for index in range(self.params.n)]

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None or self.score_temperature is not None


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. `tokens` is what must be in the cache before the next token can be sampled."""

    request: Request
    index: int
    tokens: Tokens  # prompt, and after a preemption also the reply so far
    slot: int = -1
    num_computed: int = 0  # leading tokens whose keys are in the cache, while prefilling
    blocks: list[int] = field(default_factory=list)
    node: int = 0  # prefix-tree node of the last remembered block
    num_remembered: int = 0  # leading blocks that are in the prefix tree
    cacheable: bool = True  # False: holds keys of older weights, its blocks must not be shared
    saved: Any = None  # reply so far while preempted (list of arrays)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    num_streamed: int = 0
    text_seen: str = ""
    finished: bool = False

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def watched(self) -> bool:
        """Needs a look after every token, not only at its end."""
        return self.request.on_tokens is not None or bool(self.params.stop) or self.params.logprobs > 0


class SlotTable:
    """Arrays over slots; row `slot` belongs to one running sample."""

    def __init__(self, num_slots: int, max_blocks: int, eos_ids: list[int]) -> None:
        self.num_slots, self.eos_ids = num_slots, eos_ids
        self.free = list(range(num_slots - 1, -1, -1))
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.block_tables = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(num_slots, dtype=np.int64)  # valid entries of each row of block_tables
        self.length = np.zeros(num_slots, dtype=np.int64)  # tokens known: prompt + reply, launched ones included
        self.generated = np.zeros(num_slots, dtype=np.int64)  # reply tokens, launched ones included
        self.max_new = np.zeros(num_slots, dtype=np.int64)
        self.min_new = np.zeros(num_slots, dtype=np.int64)
        self.stop_ids = np.full((num_slots, 4), -1, dtype=np.int64)
        self.temperature = np.ones(num_slots, dtype=np.float32)
        self.seed = np.zeros(num_slots, dtype=np.int64)
        self.plain = np.ones(num_slots, dtype=bool)
        self.watched = np.zeros(num_slots, dtype=bool)
        self.epoch = np.zeros(num_slots, dtype=np.int64)  # how often the slot was given away
        self.placed: set[int] = set()  # slots given away since a copy of `block_tables` elsewhere was last renewed
        self._capacity = _FIRST_CAPACITY
        self.out: list[np.ndarray[Any, Any]] = [
            np.zeros((num_slots, self._capacity), dtype=kind)
            for kind in (np.int64, np.float32, np.float32, np.float32, np.int32)
        ]  # token ids, logprobs, temperature logprobs, raw logprobs, versions

    def place(self, seq: Sequence, max_new: int) -> None:
        """Give `seq` a slot; its reply so far (after a preemption) moves back in."""
        slot = self.free.pop()
        params = seq.params
        seq.slot = slot
        self.sequences[slot] = seq
        self.placed.add(slot)
        self.length[slot] = len(seq.tokens)
        self.max_new[slot], self.min_new[slot] = max_new, params.min_tokens
        self.temperature[slot], self.plain[slot] = params.temperature, params.plain
        self.seed[slot] = mix_seed(seq.request.seed, seq.index)
        stops = [*params.stop_token_ids, *([] if params.ignore_eos else self.eos_ids)]
        if len(stops) > self.stop_ids.shape[1]:
            more = np.full((self.num_slots, len(stops) - self.stop_ids.shape[1]), -1, dtype=np.int64)
            self.stop_ids = np.concatenate([self.stop_ids, more], axis=1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stops)] = stops
        self.watched[slot] = seq.watched
        self.generated[slot] = 0
        self.reserve(max_new)
        if seq.saved is not None:
            count = len(seq.saved[0])
            for array, values in zip(self.out, seq.saved, strict=True):
                array[slot, :count] = values
            self.generated[slot] = count
            seq.saved = None

    def remove(self, seq: Sequence) -> None:
        slot = seq.slot
        self.sequences[slot] = None
        self.epoch[slot] += 1
        self.free.append(slot)
        seq.slot = -1

    def set_blocks(self, slot: int, start: int, blocks: list[int]) -> None:
        self.block_tables[slot, start : start + len(blocks)] = blocks
        self.num_blocks[slot] = start + len(blocks)

    def save(self, seq: Sequence) -> None:
        """Keep the reply so far with the sequence, before it loses its slot."""
        seq.saved = [array[seq.slot, : self.generated[seq.slot]].copy() for array in self.out]

    def reserve(self, capacity: int) -> None:
        """Room for `capacity` reply tokens in every slot (untouched pages cost nothing)."""
        if capacity <= self._capacity:
            return
        capacity = max(capacity, 2 * self._capacity)
        for index, array in enumerate(self.out):
            wider = np.zeros((self.num_slots, capacity), dtype=array.dtype)
            wider[:, : self._capacity] = array
            self.out[index] = wider
        self._capacity = capacity

    def record(
        self, slots: np.ndarray[Any, Any], at: np.ndarray[Any, Any], values: list[np.ndarray[Any, Any]], version: int
    ) -> None:
        """Write one sampled token per slot at reply index `at`."""
        for array, column in zip(self.out, [*values, np.int32(version)], strict=True):
            array[slots, at] = column

    def ended(
        self, slots: np.ndarray[Any, Any], at: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Which of these slots just ended by a stop token, and which by length; two bool arrays."""
        count = at + 1
        stopped = (self.stop_ids[slots] == tokens[:, None]).any(axis=1) & (count >= self.min_new[slots])
        return stopped, (count >= self.max_new[slots]) & ~stopped

    def part(self, seq: Sequence, start: int, end: int) -> Completion:
        """Reply tokens [start, end) of a running sequence."""
        ids, logprobs, at_temperature, raw, versions = (array[seq.slot, start:end].tolist() for array in self.out)
        tops = seq.top_logprobs[start:end] if seq.params.logprobs else None
        return Completion(
            token_ids=ids,
            logprobs=logprobs,
            temperature_logprobs=at_temperature,
            raw_logprobs=raw,
            versions=versions,
            finish_reason=None,
            top_logprobs=tops,
        )
