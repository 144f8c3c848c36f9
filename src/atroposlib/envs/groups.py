"""Scored groups: build one from single rollouts, check it, complete it. Pure functions.

``check_group`` answers with a ``Rejection`` that names the reason, or with None when the group may be sent; the
reasons are counters in the metrics, so nothing disappears without a trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.type_definitions import ScoredDataGroup, ScoredDataItem

OPTIONAL_KEYS = ("ref_logprobs", "overrides", "group_overrides", "distill_token_ids", "distill_logprobs")
ALWAYS_LISTED_KEYS = ("advantages", "ref_logprobs", "messages", "overrides", "images")
CARRIED_KEYS = ("inference_logprobs", "distill_token_ids", "distill_logprobs", "policy_versions")


class Rejection(NamedTuple):
    """Why a group is not sent."""

    reason: str
    """Stable name, part of the metric ``rollout/num_groups_rejected_<reason>``."""
    detail: str


def group_from_items(items: Sequence[ScoredDataItem]) -> ScoredDataGroup:
    """Stack single rollouts into one group.

    A field that every rollout carries is stacked; ``group_overrides`` are merged, ``generation_params`` are those of
    the first rollout that has them. A per-sequence field that only some rollouts carry keeps those values for the keys
    environments have always had (``advantages`` ...), and is left out for the newer ones, where positions matter.
    """
    group: dict[str, Any] = {"tokens": [], "masks": [], "scores": [], "group_overrides": {}}
    group.update({key: [] for key in ALWAYS_LISTED_KEYS})
    for item in items:
        for key in ("tokens", "masks", "scores"):
            group[key].append(item[key])  # type: ignore[literal-required]
        for key in ALWAYS_LISTED_KEYS:
            if item.get(key) is not None:
                group[key].append(item[key])  # type: ignore[literal-required]
        group["group_overrides"].update(item.get("group_overrides") or {})
        if item.get("generation_params") is not None:
            group.setdefault("generation_params", item["generation_params"])
    for key in CARRIED_KEYS:
        values = [item.get(key) for item in items]
        if values and all(value is not None for value in values):
            group[key] = values
    components = [item.get("reward_components") for item in items]
    if components and all(components) and len({frozenset(c or {}) for c in components}) == 1:
        group["reward_components"] = {name: [(c or {})[name] for c in components] for name in components[0] or {}}
    return group  # type: ignore[return-value]


def expected_group_size(group: Mapping[str, Any], group_size: int) -> int:
    """The size this group must have: its own override, or the configured one."""
    overrides = group.get("group_overrides") or {}
    return int(overrides.get("group_size", group_size))


def check_group(group: Mapping[str, Any], *, group_size: int, ensure_scores_are_not_same: bool) -> Rejection | None:
    """Form, size and score checks, in this order; None means the group is fine so far."""
    if not isinstance(group, Mapping):
        return Rejection(
            "not_a_group",
            f"a result must be a ScoredDataGroup (a dict), a list of them, or None, and holds a {type(group).__name__};"
            " call score() in collect_trajectories or postprocess_histories",
        )
    wanted = expected_group_size(group, group_size)
    tokens = group.get("tokens")
    if tokens is None or len(tokens) != wanted:
        have = "no tokens" if tokens is None else f"{len(tokens)} sequences"
        return Rejection(
            "wrong_size",
            f"a group must hold {wanted} sequences and has {have}; set group_overrides['group_size'] to send another size",
        )
    scores = group.get("scores") or []
    broken = [index for index, score in enumerate(scores) if not _is_finite(score)]
    if broken:
        return Rejection(
            "not_finite_score",
            f"scores {broken} are not finite numbers: {[scores[index] for index in broken]};"
            " leave out rollouts that could not be scored, or the group",
        )
    if ensure_scores_are_not_same and len(set(scores)) == 1:
        return Rejection("equal_scores", f"all {len(scores)} scores are {scores[0]}")
    return None


def _is_finite(score: Any) -> bool:
    """False for NaN, infinities and None, which is how reward functions mark a completion they failed on."""
    return score is not None and not (isinstance(score, float) and not math.isfinite(score))


def check_lengths(group: Mapping[str, Any], *, max_token_len: int) -> Rejection | None:
    """Reject the whole group when a sequence does not fit the trainer; nothing is ever cut."""
    longest = max((len(sequence) for sequence in group["tokens"]), default=0)
    if longest >= max_token_len:
        return Rejection("too_long", f"a sequence of {longest} tokens does not fit the trainer's {max_token_len}")
    return None


def complete_group(group: dict[str, Any]) -> None:
    """Give the group every optional key the wire expects (None where absent)."""
    for key in OPTIONAL_KEYS:
        group.setdefault(key, None)


def trained_lengths(group: Mapping[str, Any]) -> list[int]:
    """Trained tokens of each sequence."""
    return [
        len(mask) - mask.count(-100) if isinstance(mask, list) else sum(int(m) != -100 for m in mask)
        for mask in group["masks"]
    ]


def messages_from_tokens(
    tokens: Sequence[Sequence[int]], decode: Callable[[Sequence[int]], str]
) -> list[list[dict[str, str]]]:
    """One user message per sequence holding its decoded text."""
    return [[{"role": "user", "content": decode(sequence)}] for sequence in tokens]


def add_policy_versions(result: Any, versions: set[int]) -> None:
    """Note on every group of ``result`` that lacks it which policy versions made it."""
    if not versions:
        return
    for group in result if isinstance(result, list) else [result]:
        if isinstance(group, dict) and group.get("tokens") is not None and group.get("policy_versions") is None:
            group["policy_versions"] = [sorted(versions) for _ in group["tokens"]]
