"""Which groups make the next batch: pure bookkeeping, no HTTP, no clock, no disk.

A batch holds exactly `batch_size` sequences, made of whole groups. `BatchQueue.form` chooses by one rule:

    The oldest exact batch: walk the queue from the oldest group to the newest and take a group whenever the room that
    is left after it can still be filled exactly by groups that come later.

So a batch is formed whenever any choice of whole groups adds up to `batch_size`, and the oldest group that can be part
of a batch is part of the next one. Sizes need not divide one another: a 3 waits until a 1, a 5, ... makes it fit and
then goes first. With groups of one size this is first in, first out.

Minimum allocations (`minimums`: env_id -> fraction of the batch) add a condition. An environment with minimum m is due
`int(batch_size * m)` sequences (all scaled down alike when they add up to more than a batch):
  1. fewer queued than due, to within one of its groups: no batch yet, wait for that environment;
  2. else the oldest exact batch that gives each environment at least what it is due;
  3. else the oldest exact batch that gives each what it is due to within one group (whole groups rarely add up);
  4. else the data is there but cannot fit together: this batch ignores the minimums, so that training goes on.
Groups without an environment fill what the minimums leave free.

`PartialGroups` holds what one environment sends in pieces until whole groups' worth of sequences are together.

Cost: `add` and `remove` are O(1) per group. `form` looks at about as many groups as the batch takes, plus the number of
distinct (environment, size) pairs; it never scans the queue. What can fill a gap is a bit set of reachable sums (one
Python integer), computed from the number of groups per size.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

# What decides whether a group fits: its environment (None where no minimum applies to it) and its size.
Kind = tuple[int | None, int]


class GroupMeta(NamedTuple):
    """All that batching knows of a group: its key (ascending with age), its number of sequences, who sent it."""

    key: int
    size: int
    env_id: int | None = None


class _Lane:
    """Keys of one (environment, size), oldest first; removal from anywhere costs O(1), paid as the front passes by."""

    __slots__ = ("_gone", "_in_order", "_keys")

    def __init__(self) -> None:
        self._keys: deque[int] = deque()
        self._gone: set[int] = set()
        self._in_order = True

    def __len__(self) -> int:
        return len(self._keys) - len(self._gone)

    def append(self, key: int) -> None:
        if key in self._gone:
            self._compact()
        if self._keys and key < self._keys[-1]:
            self._in_order = False
        self._keys.append(key)

    def discard(self, key: int) -> None:
        self._gone.add(key)
        while self._keys and self._keys[0] in self._gone:
            self._gone.remove(self._keys.popleft())
        if 2 * len(self._gone) > len(self._keys):
            self._compact()

    def oldest_first(self) -> Iterator[int]:
        if not self._in_order:
            self._keys = deque(sorted(self._keys))
            self._in_order = True
        gone = self._gone
        return (key for key in self._keys if key not in gone) if gone else iter(self._keys)

    def _compact(self) -> None:
        self._keys = deque(key for key in self._keys if key not in self._gone)
        self._gone.clear()


class BatchQueue:
    """Groups waiting for a batch. `form` proposes, `remove` takes out: the caller decides when a batch is formed."""

    def __init__(self) -> None:
        self._groups: dict[int, GroupMeta] = {}
        self._lanes: dict[Kind, _Lane] = {}
        self._groups_of_size: dict[int, int] = {}
        self._sequences_of_env: dict[int | None, int] = {}
        self._num_sequences = 0
        self._max_group_size = 0

    # ---- counters -------------------------------------------------------------------------------------------------

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def num_sequences(self) -> int:
        return self._num_sequences

    @property
    def max_group_size(self) -> int:
        """Sequences in the largest waiting group; 0 when nothing waits."""
        return self._max_group_size

    def env_sequences(self, env_id: int | None) -> int:
        """Waiting sequences of one environment (None: of groups that name no environment)."""
        return self._sequences_of_env.get(env_id, 0)

    def sequences_by_env(self) -> Mapping[int | None, int]:
        """Waiting sequences of every environment that has any. A live view: read it, do not keep it."""
        return self._sequences_of_env

    def __contains__(self, key: int) -> bool:
        return key in self._groups

    # ---- changes --------------------------------------------------------------------------------------------------

    def add(self, group: GroupMeta) -> None:
        """Put a group in its place by age (its key); a key lower than those waiting (a put-back) goes first."""
        if group.size < 1:
            raise ValueError(f"group {group.key} has size {group.size}; a group holds at least one sequence")
        if group.key in self._groups:
            raise ValueError(f"group key {group.key} is already queued; keys are unique")
        self._groups[group.key] = group
        lane = self._lanes.get((group.env_id, group.size))
        if lane is None:
            lane = self._lanes[(group.env_id, group.size)] = _Lane()
        lane.append(group.key)
        self._groups_of_size[group.size] = self._groups_of_size.get(group.size, 0) + 1
        self._sequences_of_env[group.env_id] = self._sequences_of_env.get(group.env_id, 0) + group.size
        self._num_sequences += group.size
        self._max_group_size = max(self._max_group_size, group.size)

    def remove(self, keys: Iterable[int]) -> None:
        """Take groups out; KeyError, before anything changes, when one is not queued."""
        groups = [self._groups[key] for key in dict.fromkeys(keys)]
        for group in groups:
            del self._groups[group.key]
            self._drop_from_lane(group)
            self._num_sequences -= group.size
            self._sequences_of_env[group.env_id] -= group.size
            if not self._sequences_of_env[group.env_id]:
                del self._sequences_of_env[group.env_id]
            self._groups_of_size[group.size] -= 1
            if not self._groups_of_size[group.size]:
                del self._groups_of_size[group.size]
                self._max_group_size = max(self._groups_of_size, default=0)

    def _drop_from_lane(self, group: GroupMeta) -> None:
        lane = self._lanes[(group.env_id, group.size)]
        lane.discard(group.key)
        if not len(lane):
            del self._lanes[(group.env_id, group.size)]

    # ---- forming --------------------------------------------------------------------------------------------------

    def form(self, batch_size: int, minimums: Mapping[int, float] | None = None) -> list[int] | None:
        """Keys of the next batch, oldest first, exactly `batch_size` sequences; None while there is none.

        Changes nothing. `minimums` names only environments that are alive: one that is listed and sends nothing holds
        every batch back.
        """
        if batch_size < 1 or self._num_sequences < batch_size:
            return None
        due = _sequences_due(batch_size, minimums or {})
        if not due:
            return self._oldest_exact(batch_size, {})
        floors = self._floors(batch_size, due)
        if floors is None:
            return None
        for wanted in (due, floors, {}):
            if batch := self._oldest_exact(batch_size, wanted):
                return batch
        return None

    def _floors(self, batch_size: int, due: Mapping[int, int]) -> dict[int, int] | None:
        """What each environment is due to within one of its groups; None when one has fewer than that queued."""
        queued = dict.fromkeys(due, 0)
        largest = dict.fromkeys(due, 0)
        for (env_id, size), lane in self._lanes.items():
            if env_id is not None and env_id in due and size <= batch_size:
                queued[env_id] += size * len(lane)
                largest[env_id] = max(largest[env_id], size)
        floors = {env_id: max(1, amount - largest[env_id] + 1) for env_id, amount in due.items()}
        return floors if all(queued[env_id] >= floor for env_id, floor in floors.items()) else None

    def _oldest_exact(self, batch_size: int, due: Mapping[int, int]) -> list[int] | None:
        """The oldest exact batch that gives every environment in `due` at least that many sequences.

        A group that does not fit rules out all later groups of its kind too (the older one in the place of the younger
        would have fitted as well), so each kind is dropped at most once and the walk stays short.
        """
        lanes = [(env_id if env_id in due else None, size, lane) for (env_id, size), lane in self._lanes.items()]
        plan = _Plan(batch_size, due, [(env_id, size, len(lane)) for env_id, size, lane in lanes])
        if not plan.feasible(()):
            return None
        stream = heapq.merge(*(plan.offer((env_id, size), lane) for env_id, size, lane in lanes if size <= batch_size))
        chosen: list[int] = []
        window: list[tuple[int, Kind]] = []
        while plan.room:
            waiting = sum(kind[1] for _, kind in window)
            while waiting < plan.room and (item := next(stream, None)) is not None:
                if item[1] not in plan.dropped:
                    window.append(item)
                    waiting += item[1][1]
            fit = _longest_feasible_prefix(plan, [kind for _, kind in window])
            for key, kind in window[:fit]:
                chosen.append(key)
                plan.take(kind)
            if fit < len(window):
                plan.drop(window[fit][1])
            window = [item for item in window[fit:] if item[1] not in plan.dropped]
        return chosen


class _Plan:
    """A batch being filled: the room left, what environments are still due, how many groups of each kind are left."""

    __slots__ = ("dropped", "due", "left", "room")

    def __init__(self, room: int, due: Mapping[int, int], stock: Iterable[tuple[int | None, int, int]]) -> None:
        self.room = room
        self.due = dict(due)
        self.left: dict[Kind, int] = {}
        for env_id, size, count in stock:
            if size <= room:
                self.left[env_id, size] = self.left.get((env_id, size), 0) + count
        self.dropped: set[Kind] = set()

    def offer(self, kind: Kind, lane: _Lane) -> Iterator[tuple[int, Kind]]:
        """The groups of a lane, oldest first, for as long as their kind can still fit."""
        for key in lane.oldest_first():
            if kind in self.dropped:
                return
            yield key, kind

    def take(self, kind: Kind) -> None:
        env_id, size = kind
        self.left[kind] -= 1
        self.room -= size
        if env_id is not None:
            self.due[env_id] -= size

    def drop(self, kind: Kind) -> None:
        self.dropped.add(kind)
        self.left.pop(kind, None)

    def feasible(self, taken: Sequence[Kind]) -> bool:
        """Whether, after taking these, the rest of the room can be filled exactly with every environment's due met."""
        room = self.room - sum(size for _, size in taken)
        if room < 0:
            return False
        left, due = dict(self.left), dict(self.due)
        for kind in taken:
            left[kind] -= 1
            if kind[0] is not None:
                due[kind[0]] -= kind[1]
        if room == 0:
            return all(amount <= 0 for amount in due.values())
        return bool(_reachable_with_due(left, due, room) >> room & 1)


def _longest_feasible_prefix(plan: _Plan, kinds: Sequence[Kind]) -> int:
    """How many of these groups, in order, can all be taken. A shorter prefix of a feasible one is feasible."""
    if plan.feasible(kinds):
        return len(kinds)
    low, high = 0, len(kinds)  # `low` is feasible, `high` is not
    while high - low > 1:
        middle = (low + high) // 2
        if plan.feasible(kinds[:middle]):
            low = middle
        else:
            high = middle
    return low


def _sequences_due(batch_size: int, minimums: Mapping[int, float]) -> dict[int, int]:
    """Sequences each environment is due in a batch; those that round to nothing are left out."""
    due = {env_id: int(batch_size * share) for env_id, share in minimums.items() if share > 0}
    total = sum(due.values())
    if total > batch_size:
        due = {env_id: max(1, amount * batch_size // total) for env_id, amount in due.items() if amount}
    return {env_id: amount for env_id, amount in due.items() if amount}


def _reachable(stock: Iterable[tuple[int, int]], limit: int) -> int:
    """Bit n is set when some choice from `stock` (pairs of size and count) adds up to n, for n up to `limit`."""
    bits, mask = 1, (1 << (limit + 1)) - 1
    for size, count in stock:
        count = min(count, limit // size)
        step = 1
        while count > 0:
            step = min(step, count)
            bits |= (bits << (step * size)) & mask
            count -= step
            step *= 2
    return bits


def _reachable_with_due(left: Mapping[Kind, int], due: Mapping[int, int], limit: int) -> int:
    """As `_reachable`, but only sums in which every environment of `due` has at least what it is due."""
    by_env: dict[int | None, list[tuple[int, int]]] = {None: [], **{env_id: [] for env_id in due}}
    for (env_id, size), count in left.items():
        by_env[env_id].append((size, count))
    mask = (1 << (limit + 1)) - 1
    bits = _reachable(by_env.pop(None), limit)
    for env_id, stock in by_env.items():
        if env_id is None:
            continue
        least = max(0, due[env_id])
        bits = _sums(bits, _reachable(stock, limit) >> least << least, mask)
    return bits


def _sums(a: int, b: int, mask: int) -> int:
    """Bit set of all x + y with x in `a` and y in `b`."""
    if a.bit_count() < b.bit_count():
        a, b = b, a
    result = 0
    while b:
        lowest = b & -b
        result |= a << (lowest.bit_length() - 1)
        b ^= lowest
    return result & mask


def greedy_subset(sizes: Sequence[int], target: int) -> list[int]:
    """Indices taken in order, skipping what would overshoot; [] unless they add up to exactly `target`."""
    chosen: list[int] = []
    for index, size in enumerate(sizes):
        if 0 < size <= target:
            chosen.append(index)
            target -= size
        if not target:
            return chosen
    return []


def reachable_by_prefix(sizes: Sequence[int], target: int) -> list[int]:
    """Entry i: bit set of the sums up to `target` that the first i groups can make."""
    mask = (1 << (max(0, target) + 1)) - 1
    reach = [1]
    for size in sizes:
        reach.append(reach[-1] | (reach[-1] << size) & mask)
    return reach


def subset_summing_to(sizes: Sequence[int], target: int) -> list[int]:
    """Ascending indices of groups whose sizes add up to `target`; [] when there are none.

    The greedy choice in order if it is exact; else one that uses a later group only where the earlier ones need it.
    """
    if greedy := greedy_subset(sizes, target):
        return greedy
    reach = reachable_by_prefix(sizes, target)
    if target <= 0 or not reach[-1] >> target & 1:
        return []
    chosen: list[int] = []
    for index in range(len(sizes) - 1, -1, -1):
        if not reach[index] >> target & 1:
            chosen.append(index)
            target -= sizes[index]
    return chosen[::-1]


class PartialGroups:
    """What one environment sent in pieces that are not `group_size` long, until whole groups' worth are together.

    A piece is released together with those that add up to one group (`subset_summing_to`) or, when no choice does, to
    any multiple of the group size. Among any `group_size` pieces some add up to such a multiple, so fewer than
    `group_size` pieces are ever held.
    """

    def __init__(self, group_size: int) -> None:
        if group_size < 1:
            raise ValueError(f"group_size is {group_size}; it must be at least 1")
        self.group_size = group_size
        self._pieces: list[tuple[int, int]] = []  # (key, size), oldest first

    @property
    def num_sequences(self) -> int:
        return sum(size for _, size in self._pieces)

    @property
    def keys(self) -> list[int]:
        return [key for key, _ in self._pieces]

    def add(self, key: int, size: int) -> list[int]:
        """Hold a piece; returns the keys released by it, oldest first ([] when it has to wait)."""
        if size < 1:
            raise ValueError(f"piece {key} has size {size}; it holds at least one sequence")
        self._pieces.append((key, size))
        sizes = [size for _, size in self._pieces]
        released = subset_summing_to(sizes, self.group_size) or self._oldest_multiple(sizes)
        keys = [self._pieces[index][0] for index in released]
        gone = set(released)
        self._pieces = [piece for index, piece in enumerate(self._pieces) if index not in gone]
        return keys

    def _oldest_multiple(self, sizes: Sequence[int]) -> list[int]:
        """Pieces that add up to a multiple of the group size, found from the oldest on; the newest is among them."""
        made: dict[int, tuple[int, ...]] = {0: ()}  # remainder -> the pieces that make it
        *older, newest = sizes
        for index, size in enumerate(older):
            for remainder, pieces in list(made.items()):
                made.setdefault((remainder + size) % self.group_size, (*pieces, index))
        partners = made.get(-newest % self.group_size)
        return [] if partners is None else [*partners, len(older)]
