"""Groups from the rollout server to training samples.

The wire says: ``masks`` hold the token id where a token is trained and -100 elsewhere; ``inference_logprobs`` hold the sampler's
log-prob where trained and 1.0 elsewhere; ``advantages``, when given, win over the ones from ``scores``; ``overrides`` (per
sequence) and ``group_overrides`` may say ``set_advantage_to_zero``, ``sft`` and ``temperature``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from atlaslib.algorithms.advantages import Estimator, ScaleRewards, compute_advantages
from atlaslib.errors import ScoredGroupError
from atlaslib.types import TrainingSample

IGNORED = -100
NO_LOGPROB = 1.0


def batch_advantages(
    groups: Sequence[dict[str, Any]], *, estimator: Estimator = "group", scale: ScaleRewards = "group"
) -> list[list[float]]:
    """Advantages from the scores of a batch, one list per group."""
    scores = [_scores(group) for group in groups]
    owners = [number for number, row in enumerate(scores) for _ in row]
    flat = torch.tensor([score for row in scores for score in row], dtype=torch.float64)
    computed = compute_advantages(flat, torch.tensor(owners, dtype=torch.long), estimator=estimator, scale=scale)
    values = iter(computed.values.tolist())
    return [[next(values) for _ in row] for row in scores]


def to_samples(
    group: dict[str, Any], advantages: Sequence[float], *, default_temperature: float
) -> list[TrainingSample]:
    """The sequences of one group as samples, with the ``advantages`` of their scores or the ones the group brings."""
    tokens, masks, scores = _rows(group, "tokens"), _rows(group, "masks"), _scores(group)
    group_id = str(group.get("group_id") or "?")
    if not len(tokens) == len(masks) == len(scores):
        raise ScoredGroupError(
            f"group {group_id}: {len(tokens)} token rows, {len(masks)} mask rows and {len(scores)} scores; they must be as many"
        )
    samples = []
    for index, (ids, mask) in enumerate(zip(tokens, masks, strict=True)):
        if len(ids) != len(mask):
            raise ScoredGroupError(
                f"group {group_id}, sequence {index}: {len(ids)} tokens and {len(mask)} masks; they must be as many"
            )
        samples.append(
            _sample(group, index, ids, mask, scores[index], advantages[index], default_temperature, group_id)
        )
    return samples


def _sample(
    group: dict[str, Any],
    index: int,
    ids: list[int],
    mask: list[int],
    score: float,
    advantage: float,
    default_temperature: float,
    group_id: str,
) -> TrainingSample:
    overrides = {**(group.get("group_overrides") or {}), **(_entry(group.get("overrides"), index) or {})}
    loss_mask = [value != IGNORED for value in mask]
    given = _entry(group.get("advantages"), index)
    advantages = [advantage] * len(ids) if given is None else _given_advantages(given, ids, loss_mask, group_id, index)
    if overrides.get("set_advantage_to_zero"):
        advantages = [0.0] * len(ids)
    temperature = overrides.get("temperature", (group.get("generation_params") or {}).get("temperature"))
    reasons = _entry((group.get("generation_params") or {}).get("finish_reasons"), index)
    env = group.get("env_name") or group.get("env_id")
    distill_ids, distill_logprobs = _distilled(group, index, len(ids), group_id)
    return TrainingSample(
        token_ids=list(ids),
        loss_mask=loss_mask,
        sampler_logprobs=_logprobs(_entry(group.get("inference_logprobs"), index), len(ids)),
        advantages=advantages,
        reward=score,
        temperature=float(temperature) if temperature else default_temperature,
        policy_versions=sorted(int(v) for v in (_entry(group.get("policy_versions"), index) or [])),
        group_id=group_id,
        env=None if env is None else str(env),
        truncated=reasons == "length" or bool(overrides.get("truncated")),
        sft=bool(overrides.get("sft")),
        ref_logprobs=_logprobs(_entry(group.get("ref_logprobs"), index), len(ids)),
        distill_token_ids=distill_ids,
        distill_logprobs=distill_logprobs,
        images=_entry(group.get("images"), index),
    )


def _given_advantages(given: Any, ids: list[int], loss_mask: list[bool], group_id: str, index: int) -> list[float]:
    """One number for the sequence, one per token, or one per trained token."""
    if isinstance(given, int | float):
        return [float(given)] * len(ids)
    values = [float(value) for value in given]
    if len(values) == len(ids):
        return values
    if len(values) == 1:
        return values * len(ids)
    if len(values) == sum(loss_mask):
        rest = iter(values)
        return [next(rest) if trained else 0.0 for trained in loss_mask]
    raise ScoredGroupError(
        f"group {group_id}, sequence {index}: {len(values)} advantages for {len(ids)} tokens ({sum(loss_mask)} trained); "
        "give one, one per token, or one per trained token"
    )


def _logprobs(values: Sequence[float] | None, length: int) -> list[float] | None:
    """Log-probs of the right length; the filler 1.0 and impossible values become NaN (unknown)."""
    if values is None or len(values) == 0:
        return None
    clean = [math.nan if value is None or not -math.inf < value <= 0.0 else float(value) for value in values]
    return clean[:length] + [math.nan] * (length - len(clean))


def _distilled(group: dict[str, Any], index: int, length: int, group_id: str) -> tuple[Any, Any]:
    """The teacher's candidates and their log-probs, one list of each per token; (None, None) without them."""
    given = [_entry(group.get(key), index) for key in ("distill_token_ids", "distill_logprobs")]
    if None in given:
        return None, None
    ids, logprobs = ([list(row or []) for row in rows[:length]] for rows in given)
    if len(ids) < length or [len(row) for row in ids] != [len(row) for row in logprobs]:
        raise ScoredGroupError(
            f"group {group_id}, sequence {index}: distill_token_ids and distill_logprobs must hold one list per token "
            f"({length}), equally long in both; got {len(ids)} and {len(logprobs)}"
        )
    return ids, logprobs


def _scores(group: dict[str, Any]) -> list[float]:
    return [math.nan if score is None else float(score) for score in group["scores"]]


def _rows(group: dict[str, Any], key: str) -> list[list[int]]:
    return [row.tolist() if hasattr(row, "tolist") else list(row) for row in group[key]]


def _entry(rows: Any, index: int) -> Any:
    """Row ``index`` of an optional per-sequence field."""
    if rows is None or (not isinstance(rows, list | tuple) and not hasattr(rows, "__getitem__")):
        return None
    if isinstance(rows, dict) or len(rows) <= index:
        return None
    value = rows[index]
    return value.tolist() if hasattr(value, "tolist") else value
