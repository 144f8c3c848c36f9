"""The batching helpers that existing code imports: same names, same arguments, same results.

They work on plain lists of group dicts and keep the old rule (groups smaller than the largest one join in bundles of
equal size that add up to the largest). The server itself uses `atroposlib.api.batching`, which needs no bundles.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from atroposlib.api.batching import greedy_subset, reachable_by_prefix

Group = dict[str, Any]
Queue = list[Group]


def find_groups_summing_to_target(buffer: Queue, target_size: int) -> list[int]:
    """Ascending indices of groups in `buffer` whose sequences add up to exactly `target_size`; [] when there are none.

    The greedy choice in order if it is exact; else a choice that uses later groups wherever it can.
    """
    target = target_size
    sizes = [_size(group) for group in buffer]
    if greedy := greedy_subset(sizes, target):
        return greedy
    reach = reachable_by_prefix(sizes, target)
    if target <= 0 or not reach[-1] >> target & 1:
        return []
    chosen: list[int] = []
    for index in range(len(sizes) - 1, -1, -1):
        if sizes[index] <= target and reach[index] >> (target - sizes[index]) & 1:
            chosen.append(index)
            target -= sizes[index]
    return chosen[::-1]


def grab_exact_from_heterogeneous_queue(queue: Queue, batch_size: int) -> tuple[Queue | None, Queue]:
    """(batch of exactly `batch_size` sequences, rest of the queue), or (None, the queue as it was)."""
    if not queue or _sequences(queue) < batch_size:
        return None, queue
    chosen: list[int] = []
    room = batch_size
    for index in _complete_bundles(queue, range(len(queue)), _size):
        chosen.append(index)
        room -= _size(queue[index])
        if room <= 0:
            break
    return _split(queue, chosen, room)


def grab_batch_with_minimum_allocations(
    queue: Queue, batch_size: int, env_configs: Sequence[dict[str, Any]]
) -> tuple[Queue | None, Queue]:
    """As `grab_exact_from_heterogeneous_queue`, with a share for each connected environment that names a minimum.

    `env_configs`: dicts with `registered_id`, `connected` and `min_batch_allocation` (fraction of the batch, or None).
    """
    minimums = {
        env["registered_id"]: int(batch_size * env["min_batch_allocation"])
        for env in env_configs
        if env.get("connected", False) and env.get("min_batch_allocation") is not None
    }
    if not minimums:
        return grab_exact_from_heterogeneous_queue(queue, batch_size)
    if not queue:
        return None, queue
    ours = [index for index, group in enumerate(queue) if group.get("env_id") is not None]
    eligible = _complete_bundles(queue, ours, lambda group: (group["env_id"], _size(group)))
    by_env: dict[Any, list[int]] = {}
    for index in eligible:
        by_env.setdefault(queue[index]["env_id"], []).append(index)
    if any(amount > 0 and env_id not in by_env for env_id, amount in minimums.items()):
        return None, queue
    minimums = _scaled(minimums, batch_size, {env: min(_size(queue[i]) for i in own) for env, own in by_env.items()})
    chosen: list[int] = []
    room = batch_size
    for env_id, amount in minimums.items():
        for index in by_env.get(env_id, ()):
            size = _size(queue[index])
            if amount <= 0:
                break
            if size <= room:
                chosen.append(index)
                room -= size
                amount -= size
    taken = set(chosen)
    for index in sorted(eligible):
        if index not in taken and _size(queue[index]) <= room:
            chosen.append(index)
            room -= _size(queue[index])
    return _split(queue, chosen, room)


def _size(group: Group) -> int:
    return len(group["tokens"])


def _sequences(groups: Iterable[Group]) -> int:
    return sum(len(group["tokens"]) for group in groups)


def _complete_bundles(queue: Queue, indices: Iterable[int], kind: Callable[[Group], Hashable]) -> list[int]:
    """Indices of groups in complete bundles, in the order the bundles become complete.

    A bundle is a run of groups of one kind (hence one size) that together hold as many sequences as the largest group.
    """
    largest = max(_size(group) for group in queue)
    complete: list[int] = []
    open_bundles: dict[Hashable, list[int]] = {}
    for index in indices:
        bundle = open_bundles.setdefault(kind(queue[index]), [])
        bundle.append(index)
        if len(bundle) * _size(queue[index]) == largest:
            complete += bundle
            bundle.clear()
    return complete


def _scaled(minimums: dict[Any, int], batch_size: int, smallest: dict[Any, int]) -> dict[Any, int]:
    """Minimums that together ask for more than a batch, scaled to fit; each keeps at least its smallest group."""
    total = sum(minimums.values())
    if total <= batch_size:
        return minimums
    return {
        env_id: max(int(amount * (batch_size / total)), smallest[env_id])
        for env_id, amount in minimums.items()
        if amount > 0
    }


def _split(queue: Queue, chosen: Sequence[int], room: int) -> tuple[Queue | None, Queue]:
    if room:
        return None, queue
    taken = set(chosen)
    return [queue[i] for i in chosen], [group for i, group in enumerate(queue) if i not in taken]
