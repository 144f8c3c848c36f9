"""Microbatches: training samples laid out in rows for one forward pass.

Three layouts with the same mathematics:

``padded``         one sample per row, pads on the right (causal attention never looks at them);
``packed``         several samples per row, each blind to the others, positions counted from 0 in each;
``shared_prefix``  like packed, but samples of one group that begin with the same tokens hold that beginning once.

The flat list of trained tokens is the same in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from atlaslib.types import Microbatch, TrainingSample

Layout = Literal["padded", "packed", "shared_prefix"]
NAN = float("nan")


@dataclass(kw_only=True, slots=True)
class _Segment:
    """Samples that share one row stretch: the prefix once, then each sample's own rest."""

    prefix: list[int]
    samples: list[int]
    """indices into the sample list"""

    def length(self, samples: Sequence[TrainingSample]) -> int:
        return len(self.prefix) + sum(len(samples[i].token_ids) - len(self.prefix) for i in self.samples)


@dataclass(kw_only=True, slots=True)
class _Row:
    """One row under construction; ``owner`` and ``prefix_end`` define who may look where."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    block: list[int] = field(default_factory=list)
    """segment number of each position"""
    branch: list[int] = field(default_factory=list)
    """-1 in a shared prefix, else the number of the branch"""


def build_microbatch(
    samples: Sequence[TrainingSample],
    *,
    layout: Layout = "padded",
    pad_id: int = 0,
    device: torch.device | str = "cpu",
    row_capacity: int | None = None,
    pad_to_multiple_of: int = 1,
) -> Microbatch:
    """Lay ``samples`` out; ``row_capacity`` is the wished length of packed rows (a longer sample gets a row of its own)."""
    segments = _segments(samples, share=layout == "shared_prefix")
    rows: list[_Row] = []
    columns: list[list[int]] = [
        [] for _ in samples
    ]  # flat column of every token of every sample, as (row, column) pairs below
    row_of: list[int] = [0 for _ in samples]
    for group in _assign_rows(segments, samples, layout, row_capacity):
        row = _Row()
        for block, segment in enumerate(group):
            _lay_segment(row, block, segment, samples, columns)
            for index in segment.samples:
                row_of[index] = len(rows)
        rows.append(row)
    width = max((len(row.ids) for row in rows), default=1)
    width = -(-width // pad_to_multiple_of) * pad_to_multiple_of
    return _to_microbatch(samples, rows, columns, row_of, width, layout, pad_id, device)


def _segments(samples: Sequence[TrainingSample], *, share: bool) -> list[_Segment]:
    if not share:
        return [_Segment(prefix=[], samples=[index]) for index in range(len(samples))]
    by_prefix: dict[tuple[object, ...], _Segment] = {}
    for index, sample in enumerate(samples):
        prefix = sample.token_ids[: _untrained_prefix(sample)]
        key = (sample.group_id, tuple(prefix)) if prefix else ("alone", index)
        by_prefix.setdefault(key, _Segment(prefix=list(prefix), samples=[])).samples.append(index)
    return list(by_prefix.values())


def _untrained_prefix(sample: TrainingSample) -> int:
    """Length of the beginning that carries no loss (the whole sample when nothing is trained)."""
    return next((i for i, trained in enumerate(sample.loss_mask) if trained), len(sample.loss_mask))


def _assign_rows(
    segments: list[_Segment], samples: Sequence[TrainingSample], layout: Layout, row_capacity: int | None
) -> Iterable[list[_Segment]]:
    """First-fit decreasing into rows of at most ``row_capacity``; padded rows hold one segment each."""
    if layout == "padded":
        return [[segment] for segment in segments]
    longest = max((segment.length(samples) for segment in segments), default=1)
    capacity = max(row_capacity or longest, longest)
    rows: list[tuple[int, list[_Segment]]] = []
    for segment in sorted(segments, key=lambda s: -s.length(samples)):
        size = segment.length(samples)
        for number, (used, content) in enumerate(rows):
            if used + size <= capacity:
                content.append(segment)
                rows[number] = (used + size, content)
                break
        else:
            rows.append((size, [segment]))
    return [content for _, content in rows]


def _lay_segment(
    row: _Row, block: int, segment: _Segment, samples: Sequence[TrainingSample], columns: list[list[int]]
) -> None:
    start, shared = len(row.ids), len(segment.prefix)
    row.ids += segment.prefix
    row.positions += range(shared)
    row.block += [block] * shared
    row.branch += [-1] * shared
    for branch, index in enumerate(segment.samples):
        rest = samples[index].token_ids[shared:]
        columns[index] = [*range(start, start + shared), *range(len(row.ids), len(row.ids) + len(rest))]
        row.ids += rest
        row.positions += range(shared, shared + len(rest))
        row.block += [block] * len(rest)
        row.branch += [branch] * len(rest)


def _to_microbatch(
    samples: Sequence[TrainingSample],
    rows: list[_Row],
    columns: list[list[int]],
    row_of: list[int],
    width: int,
    layout: Layout,
    pad_id: int,
    device: torch.device | str,
) -> Microbatch:
    source: list[int] = []
    targets: list[int] = []
    owner: list[int] = []
    lengths: list[float] = []
    streams: dict[str, list[float]] = {"temperature": [], "advantages": [], "sampler": [], "ref": []}
    sft: list[bool] = []
    for index, sample in enumerate(samples):
        trained = [i for i in range(1, len(sample.token_ids)) if sample.loss_mask[i]]
        base = row_of[index] * width
        source += [base + columns[index][i - 1] for i in trained]
        targets += [sample.token_ids[i] for i in trained]
        owner += [index] * len(trained)
        lengths.append(float(len(trained)))
        streams["temperature"] += [sample.temperature] * len(trained)
        streams["advantages"] += [sample.advantages[i] for i in trained]
        streams["sampler"] += _picked(sample.sampler_logprobs, trained)
        streams["ref"] += _picked(sample.ref_logprobs, trained)
        sft += [sample.sft] * len(trained)
    single = layout == "padded"
    distill = _distill_tensors(samples, device)
    return Microbatch(
        input_ids=_rows_tensor([row.ids for row in rows], width, pad_id, device),
        position_ids=None if single else _rows_tensor([row.positions for row in rows], width, 0, device),
        attention_mask=None if single else _tree_mask(rows, width, device),
        source_index=torch.tensor(source, dtype=torch.long, device=device),
        target_ids=torch.tensor(targets, dtype=torch.long, device=device),
        sample_index=torch.tensor(owner, dtype=torch.long, device=device),
        sample_lengths=torch.tensor(lengths, dtype=torch.float32, device=device),
        temperature=torch.tensor(streams["temperature"], dtype=torch.float32, device=device),
        advantages=torch.tensor(streams["advantages"], dtype=torch.float32, device=device),
        sampler_logprobs=torch.tensor(streams["sampler"], dtype=torch.float32, device=device),
        sft=torch.tensor(sft, dtype=torch.bool, device=device),
        given_ref_logprobs=torch.tensor(streams["ref"], dtype=torch.float32, device=device),
        distill_ids=distill[0],
        distill_logprobs=distill[1],
        num_input_tokens=len(rows) * width,
    )


def _picked(values: list[float] | None, indices: list[int]) -> list[float]:
    return [NAN] * len(indices) if values is None else [values[i] for i in indices]


def _rows_tensor(rows: list[list[int]], width: int, pad: int, device: torch.device | str) -> torch.Tensor:
    return torch.tensor([row + [pad] * (width - len(row)) for row in rows], dtype=torch.long, device=device).reshape(
        -1, width
    )


def _tree_mask(rows: list[_Row], width: int, device: torch.device | str) -> torch.Tensor:
    """[R, 1, W, W] bool: a position sees earlier positions of its own segment that are prefix or of its own branch."""
    block = _rows_tensor([row.block for row in rows], width, -1, device)
    branch = _rows_tensor([row.branch for row in rows], width, -2, device)
    same_block = block[:, :, None] == block[:, None, :]
    visible_branch = (branch[:, None, :] == -1) | (branch[:, :, None] == branch[:, None, :])
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    return (same_block & visible_branch & causal).unsqueeze(1)


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
