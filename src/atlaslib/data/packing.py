"""Microbatches: training samples laid out in rows for one forward pass.

Three layouts with the same mathematics:

``padded``         one sample per row, pads on the right (causal attention never looks at them);
``packed``         one flat row of all samples without pads; attention works on whole samples (variable lengths);
``shared_prefix``  like packed, but samples of one group that begin with the same untrained tokens hold that beginning once.

The flat list of trained tokens is the same in all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from atlaslib.types import FlatRuns, Microbatch, TrainingSample

Layout = Literal["padded", "packed", "shared_prefix"]
NAN = float("nan")


@dataclass(kw_only=True, slots=True)
class _Rows:
    """The tokens of the rows, and where each sample's tokens stand in them."""

    ids: list[list[int]]
    positions: list[list[int]] | None
    columns: list[list[int]]
    """per sample, per token: its position in its row"""
    row_of: list[int]
    runs: list[list[int]]
    """flat rows: the tokens between two ends of samples or shared beginnings, in order; for each such run the positions its last token sees"""


def build_microbatch(
    samples: Sequence[TrainingSample], *, layout: Layout = "padded", pad_id: int = 0, device: torch.device | str = "cpu"
) -> Microbatch:
    """Lay ``samples`` out."""
    rows = _padded(samples) if layout == "padded" else _flat(samples, share=layout == "shared_prefix")
    width = max((len(row) for row in rows.ids), default=1)
    flat = rows.positions is not None
    gather, place = _flat_tables(rows.columns, width) if flat else (None, None)
    streams = _token_streams(samples, rows, width)
    distill = _distill_tensors(samples, device)

    def floats(name: str) -> torch.Tensor:
        return _tensor(streams[name], np.float32).to(device)

    def integers(name: str) -> torch.Tensor:
        return _tensor(streams[name], np.int64).to(device)

    return Microbatch(
        input_ids=_rows_tensor(rows.ids, width, pad_id, device),
        position_ids=None if rows.positions is None else _rows_tensor(rows.positions, width, 0, device),
        gather_index=None if gather is None else gather.to(device),
        place_index=None if place is None else place.to(device),
        runs=_runs(rows.runs, width, device) if flat else None,
        source_index=integers("source"),
        target_ids=integers("target"),
        sample_index=integers("owner"),
        sample_lengths=floats("length"),
        temperature=floats("temperature"),
        advantages=floats("advantage"),
        sampler_logprobs=floats("sampler"),
        sft=_tensor(streams["sft"], np.bool_).to(device),
        given_ref_logprobs=floats("ref"),
        distill_ids=distill[0],
        distill_logprobs=distill[1],
        num_input_tokens=len(rows.ids) * width,
    )


def _padded(samples: Sequence[TrainingSample]) -> _Rows:
    return _Rows(
        ids=[sample.token_ids for sample in samples],
        positions=None,
        columns=[list(range(len(sample.token_ids))) for sample in samples],
        row_of=list(range(len(samples))),
        runs=[],
    )


def _flat(samples: Sequence[TrainingSample], *, share: bool) -> _Rows:
    """One row; with ``share``, the untrained beginning of a group's samples once."""
    ids: list[int] = []
    positions: list[int] = []
    columns: list[list[int]] = []
    runs: list[list[int]] = []
    prefixes: dict[tuple[object, ...], list[int]] = {}
    for sample in samples:
        shared = untrained_prefix(sample) if share else 0
        key = (sample.group_id, *sample.token_ids[:shared])
        if shared and key not in prefixes:
            prefixes[key] = list(range(len(ids), len(ids) + shared))
            ids += sample.token_ids[:shared]
            positions += range(shared)
            runs.append(prefixes[key])
        own = sample.token_ids[shared:]
        columns.append([*(prefixes[key] if shared else []), *range(len(ids), len(ids) + len(own))])
        if own:
            runs.append(columns[-1])
        ids += own
        positions += range(shared, shared + len(own))
    return _Rows(ids=[ids], positions=[positions], columns=columns, row_of=[0] * len(samples), runs=runs)


def untrained_prefix(sample: TrainingSample) -> int:
    """Length of the beginning that carries no loss (the whole sample when nothing is trained)."""
    return next((i for i, trained in enumerate(sample.loss_mask) if trained), len(sample.loss_mask))


def _flat_tables(columns: list[list[int]], num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather table [S, W'] and, for each flat position, one place in it."""
    longest = max(len(row) for row in columns)
    gather = np.zeros((len(columns), longest), dtype=np.int64)
    place = np.zeros(num_positions, dtype=np.int64)
    for sample, row in enumerate(columns):
        gather[sample, : len(row)] = row
        place[gather[sample, : len(row)]] = np.arange(len(row)) + sample * longest
    return torch.from_numpy(gather), torch.from_numpy(place)


def _runs(runs: list[list[int]], num_positions: int, device: torch.device | str) -> FlatRuns:
    """A run's queries are the positions since the last run's end: they end where the positions it sees end."""
    ends = [run[-1] + 1 for run in runs]
    key_ends = np.cumsum([len(run) for run in runs])
    keys = [position for run in runs for position in run]
    shared = len(keys) > num_positions
    return FlatRuns(
        key_index=_tensor(keys, np.int64).to(device) if shared else None,
        query_starts=_tensor([0, *ends], np.int32).to(device),
        key_starts=_tensor([0, *key_ends], np.int32).to(device),
        longest_queries=_power_of_two(max(end - start for start, end in itertools.pairwise([0, *ends]))),
        longest_keys=_power_of_two(max(len(run) for run in runs)),
    )


def _power_of_two(length: int) -> int:
    """Not below ``length``; few distinct bounds, so that code compiled for one serves many batches."""
    return 1 << (length - 1).bit_length()


def _tensor(values: Any, dtype: Any) -> torch.Tensor:
    """Through numpy, which reads long lists of numbers several times faster than torch does."""
    return torch.from_numpy(np.array(values, dtype=dtype))


def _token_streams(samples: Sequence[TrainingSample], rows: _Rows, width: int) -> dict[str, Any]:
    """Everything that is one value per trained token (``length``: per sample), as arrays."""
    names = ("source", "target", "owner", "length", "temperature", "advantage", "sampler", "ref", "sft")
    parts: dict[str, list[Any]] = {name: [] for name in names}
    for index, sample in enumerate(samples):
        trained = np.flatnonzero(np.array(sample.loss_mask[1:], dtype=np.bool_)) + 1
        base = rows.row_of[index] * width
        parts["source"].append(base + np.array(rows.columns[index], dtype=np.int64)[trained - 1])
        parts["target"].append(np.array(sample.token_ids, dtype=np.int64)[trained])
        parts["owner"].append(np.full(len(trained), index))
        parts["length"].append(np.array([len(trained)]))
        parts["temperature"].append(np.full(len(trained), sample.temperature))
        parts["advantage"].append(np.array(sample.advantages, dtype=np.float32)[trained])
        parts["sampler"].append(_picked(sample.sampler_logprobs, trained))
        parts["ref"].append(_picked(sample.ref_logprobs, trained))
        parts["sft"].append(np.full(len(trained), sample.sft))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _picked(values: list[float] | None, indices: Any) -> Any:
    return np.full(len(indices), NAN) if values is None else np.array(values, dtype=np.float32)[indices]


def _rows_tensor(rows: list[list[int]], width: int, pad: int, device: torch.device | str) -> torch.Tensor:
    return _tensor([row + [pad] * (width - len(row)) for row in rows], np.int64).reshape(-1, width).to(device)


def _distill_tensors(
    samples: Sequence[TrainingSample], device: torch.device | str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if all(sample.distill_token_ids is None or sample.distill_logprobs is None for sample in samples):
        return None, None
    ids: list[list[int]] = []
    logprobs: list[list[float]] = []
    for sample in samples:
        for i in range(1, len(sample.token_ids)):
            if sample.loss_mask[i]:
                given = sample.distill_token_ids is not None and sample.distill_logprobs is not None
                ids.append(list(sample.distill_token_ids[i]) if given and sample.distill_token_ids else [])
                logprobs.append(list(sample.distill_logprobs[i]) if given and sample.distill_logprobs else [])
    widest = max((len(row) for row in ids), default=0)
    if widest == 0:
        return None, None
    padded_ids = [row + [0] * (widest - len(row)) for row in ids]
    padded_logprobs = [row + [float("-inf")] * (widest - len(row)) for row in logprobs]
    return torch.tensor(padded_ids, device=device), torch.tensor(padded_logprobs, dtype=torch.float32, device=device)


def split_evenly(samples: Sequence[TrainingSample], parts: int) -> list[list[TrainingSample]]:
    """``parts`` contiguous pieces whose sizes differ by at most one; pieces may be empty when there are few samples."""
    base, extra = divmod(len(samples), parts)
    pieces: list[list[TrainingSample]] = []
    start = 0
    for number in range(parts):
        end = start + base + (1 if number < extra else 0)
        pieces.append(list(samples[start:end]))
        start = end
    return pieces
