"""The CUDA runner: Triton attention, captured graphs, sampling on the device, one small copy back per step.

A decode step is: one copy of `info` to the device, one graph replay (gather last tokens, forward, sample, remember the
tokens and new blocks), one copy of [3, B] numbers back. The copy back is waited for only after the next step has been launched.
A prefill step is one copy of `reading` and one graph replay; where the device works longer than the host launches, no graph.

`info` is int64 [B, 8]: slot, position, cache slot, length, counter, seed, bits of the temperature, unused.
`reading` is what a prefill reads, see layout.py.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlaslib.engine import memory
from atlaslib.engine.attention import Span, StepContext
from atlaslib.engine.config import EngineConfig
from atlaslib.engine.cuda import kernels
from atlaslib.engine.cuda.fused import FusedStack
from atlaslib.engine.cuda.layout import (
    Sizes,
    batch_buckets,
    captured_sizes,
    laid_out,
    length_of,
    parts_of,
    prefill_buckets,
    tiles_of,
)
from atlaslib.engine.cuda.paged_attention import paged_decode, paged_prefill, prefill_tiling
from atlaslib.engine.model_runner import ModelRunner, Prefilled, StepResult
from atlaslib.engine.scheduler import DecodePlan, PrefillPlan
from atlaslib.engine.sequence import SlotTable

logger = logging.getLogger(__name__)
INFO_WIDTH = 8
_NO_TOKENS, _NO_TILES = np.zeros((3, 0), dtype=np.int64), np.zeros((0, 4), dtype=np.int64)
_MAX_AHEAD = 20
_RING = _MAX_AHEAD + 8  # pinned buffers in turn; more than the steps that can be in flight


class CudaRunner(ModelRunner):
    """ModelRunner with kernels and graphs."""

    runs_ahead = True
    admit_share = 16  # a few prompts take a step nearly as long as many: queued ones wait for a sixteenth of the slots

    def __init__(self, model: Any, config: EngineConfig, max_model_len: int) -> None:
        self.fused = fused_stack(model, config)
        super().__init__(model, config, max_model_len)
        slots, width = config.max_num_seqs, -(-max_model_len // config.block_size)
        self.last_tokens = torch.zeros(slots + 1, dtype=torch.int64, device=self.device)  # the last row takes padding
        self.tables = torch.zeros(slots + 1, width, dtype=torch.int32, device=self.device)
        self.info = torch.zeros(slots, INFO_WIDTH, dtype=torch.int64, device=self.device)
        self.out = torch.zeros(3, slots, dtype=torch.int32, device=self.device)
        self._info_ring = [torch.zeros(slots, INFO_WIDTH, dtype=torch.int64).pin_memory() for _ in range(_RING)]
        self._out_ring = [torch.zeros(3, slots, dtype=torch.int32).pin_memory() for _ in range(_RING)]
        self._turn = 0
        self._step_s: dict[int, float] = {}  # seconds of a decode step by its graph's batch size
        self._launch_s = math.inf  # seconds the host needs to launch a prefill
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None  # memory of all graphs; one runs at a time
        self._weights: tuple[int, ...] = ()
        self.buckets = batch_buckets(slots)
        widest = max(max(shape.key_dim, shape.value_dim) for shape in self.layers)
        self.tiling = prefill_tiling(widest, self.layers[0].dtype)
        self._prefill_graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.prefill_sizes = prefill_buckets(memory.captured_tokens(model, config, max_model_len))
        largest = self._sizes_of(max(self.prefill_sizes, default=0))
        self.reading = torch.zeros(length_of(largest), dtype=torch.int64, device=self.device)
        self.read_logits: Tensor | None = None

    @contextmanager
    def prepared(self) -> Iterator[None]:
        with super().prepared(), self.fused.active() if self.fused else nullcontext():
            yield

    def forward(self, ids: Tensor, positions: Tensor, context: StepContext, keep: Tensor | None) -> Tensor:
        if self.fused is not None and context.recorded is None:
            context.keep, keep = keep, None  # the stack leaves the other rows out itself
        return super().forward(ids, positions, context, keep)

    # attention

    def customise(self, context: StepContext) -> None:
        context.attend = self._attend
        if context.spans:
            self._as_decode(context)

    def _as_decode(self, context: StepContext) -> None:
        """Exact mode: every prompt token is a row of the decode kernel."""
        tables = np.zeros((len(context.spans), max(len(span.blocks) for span in context.spans)), dtype=np.int32)
        for row, span in enumerate(context.spans):
            tables[row, : len(span.blocks)] = span.blocks
        context.tables = self.to_device(tables)
        counts = [span.count for span in context.spans]
        context.table_rows = self.to_device(np.repeat(np.arange(len(counts)), counts))
        ends = [np.arange(span.start + 1, span.start + span.count + 1) for span in context.spans]
        context.lengths = self.to_device(np.concatenate(ends))

    def _attend(
        self,
        context: StepContext,
        layer: int,
        query: Tensor,
        key: Tensor | None,  # None: written
        value: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        keys, values = context.cache.keys[layer], context.cache.values[layer]
        if key is not None and value is not None:
            kernels.write_kv(keys, values, context.slots, key, value)
        if context.tiles is not None:
            return paged_prefill(query, keys, values, self.tables, context.tiles, scale, window, softcap, self.tiling)
        assert context.table_rows is not None
        assert context.lengths is not None
        tables = self.tables if context.tables is None else context.tables
        return paged_decode(
            query, keys, values, tables, context.table_rows, context.lengths, scale, window, softcap,
            one_tile=self.config.exact,
        )  # fmt: skip

    # graphs

    def warm_up(self) -> None:
        """Capture one graph per batch size and per number of prompt tokens; they serve until the weights move."""
        start = time.perf_counter()
        self._graphs.clear()
        self._prefill_graphs.clear()
        self._pool, self.read_logits = None, None
        self._weights = self._weight_addresses()
        if not self.config.cuda_graphs:
            return
        self.info.zero_()
        self.info[:, 0] = self.config.max_num_seqs
        self.info[:, 2] = -1
        with self.prepared():
            for size in reversed(self.buckets):
                self._graphs[size] = self._captured(partial(self._decode_graph_body, size))
                self._step_s[size] = self._seconds_of(self._graphs[size][0])
            for size in reversed(self.prefill_sizes):
                self._send_reading(_NO_TOKENS, _NO_TILES, _NO_TILES[:, 0], size)
                self._prefill_graphs[size], _ = self._captured(partial(self._prefill_graph_body, size))
        count = len(self._graphs) + len(self._prefill_graphs)
        logger.info("captured %d graphs in %.1f s", count, time.perf_counter() - start)

    def _captured(self, body: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """`body` as a graph, and the tensor it gives at every replay."""
        body()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = body()
        self._pool = self._pool or graph.pool()
        return graph, result

    def _seconds_of(self, graph: torch.cuda.CUDAGraph) -> float:
        seconds = 0.0
        for _ in range(2):  # the first replay also uploads the graph
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize(self.device)
            seconds = time.perf_counter() - start
        return seconds

    def _decode_graph_body(self, size: int) -> Tensor:
        info = self.info[:size]
        ids, positions, slots = kernels.unpack_info(info, self.last_tokens, self.tables, self.config.block_size)
        context = StepContext(
            cache=self.cache,
            slots=slots,
            table_rows=info[:, 0],
            lengths=info[:, 3],
            attend=self._attend,
        )
        logits = self.forward(ids, positions, context, None)
        self._sample_plain(logits, info)
        return logits

    def _prefill_graph_body(self, size: int) -> Tensor:
        logits = self._read(self.reading, self._sizes_of(size))
        if self.read_logits is None:  # the first run, of the largest size, before its capture
            self.read_logits = torch.empty_like(logits)
        return self.read_logits[: len(logits)].copy_(logits)

    def weights_changed(self) -> None:
        """After an update: graphs hold addresses, so capture again when parameters moved."""
        super().weights_changed()
        if self._weights and self._weight_addresses() != self._weights:
            logger.warning("parameters moved to new storage; preparing the model again")
            self.fused = fused_stack(self.model, self.config)
            self.warm_up()

    def _weight_addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self.model.parameters())

    # steps

    def decode_ahead(self, batch: int) -> int:
        """As many as keep the device busy while the host launches a prefill."""
        step_s = self._step_s.get(self._bucket(batch))
        if step_s is None or self._launch_s == math.inf:
            return 0
        return min(math.ceil(self._launch_s / step_s), _MAX_AHEAD)

    def prefill(self, plan: PrefillPlan, table: SlotTable) -> Prefilled:
        start = time.perf_counter()
        self._update_tables(table)
        read = super().prefill(plan, table)
        # rises slowly: now and then the host waits in here, for a compiler or for the device
        self._launch_s = min(time.perf_counter() - start, 1.25 * self._launch_s)
        return read

    def read(self, packed: np.ndarray[Any, Any], spans: list[Span], keep: np.ndarray[Any, Any]) -> Tensor:
        if self.config.exact:
            return super().read(packed, spans, keep)
        rows, tiles = packed.shape[1], tiles_of(spans, self.tiling[0])
        size = self._prefill_bucket(rows, len(tiles), len(keep))
        if size is None:
            sizes = rows + rows % 2, len(tiles), len(keep)  # even: then each part starts at a multiple of 16 bytes
            return self._read(self.to_device(laid_out(packed, tiles, keep, sizes)), sizes)
        self._send_reading(packed, tiles, keep, size)
        self._prefill_graphs[size].replay()
        assert self.read_logits is not None
        return self.read_logits[: len(keep)]

    def _send_reading(
        self, packed: np.ndarray[Any, Any], tiles: np.ndarray[Any, Any], keep: np.ndarray[Any, Any], bucket: int
    ) -> None:
        reading = torch.from_numpy(laid_out(packed, tiles, keep, self._sizes_of(bucket))).pin_memory()
        self.reading[: len(reading)].copy_(reading, non_blocking=True)

    def _read(self, reading: Tensor, sizes: Sizes) -> Tensor:
        tokens, tiles, keep = parts_of(reading, sizes)
        ids, positions, slots = tokens.unbind(0)
        context = StepContext(cache=self.cache, slots=slots, attend=self._attend, tiles=tiles)
        return self.forward(ids, positions, context, keep)

    def _sizes_of(self, bucket: int) -> Sizes:
        return captured_sizes(bucket, self.tiling[0])

    def _prefill_bucket(self, rows: int, tiles: int, kept: int) -> int | None:
        """The smallest graph with room for all of it."""
        wanted = (rows, tiles, kept)
        for size in self.prefill_sizes if self._prefill_graphs else ():
            if all(need <= room for need, room in zip(wanted, self._sizes_of(size), strict=True)):
                return size
        return None

    def _bucket(self, batch: int) -> int:
        return next((bucket for bucket in self.buckets if bucket >= batch), batch)

    def decode_step(self, plan: DecodePlan, table: SlotTable) -> StepResult:
        self._update_tables(table)
        batch = len(plan.slots)
        size = self._bucket(batch)
        self._send_info(plan, table, size)
        if size in self._graphs:
            graph, logits = self._graphs[size]
            graph.replay()
        else:
            with self.prepared():
                logits = self._decode_graph_body(size)
        if table.plain[plan.slots].all():
            return self._fetch(batch)
        return self.sample_general(logits[:batch], plan, table)

    def sample(self, logits: Tensor, plan: DecodePlan, table: SlotTable) -> StepResult:
        if not table.plain[plan.slots].all():
            return self.sample_general(logits, plan, table)
        self._send_info(plan, table, len(plan.slots))
        self._sample_plain(logits, self.info[: len(plan.slots)])
        return self._fetch(len(plan.slots))

    def _sample_plain(self, logits: Tensor, info: Tensor) -> None:
        """Tokens, log-probs and raw log-probs into `out`; in exact mode the log-probs are those of the trainer's pass."""
        kernels.sample_rows(logits, info, self.out, self.last_tokens)
        if self.config.exact:
            tokens, logprobs, raw = self.out[:, : len(info)].unbind(0)
            ids, temperatures = tokens.long(), info[:, 6].int().view(torch.float32)
            logprobs.copy_(self.token_logprobs(logits, ids, temperatures).view(torch.int32))
            raw.copy_(self.token_logprobs(logits, ids, 1.0).view(torch.int32))

    def _send_info(self, plan: DecodePlan, table: SlotTable, size: int) -> None:
        """One pinned copy with everything the step needs to know about its rows; rows beyond the batch do nothing."""
        self._turn = (self._turn + 1) % _RING
        pinned = self._info_ring[self._turn]
        info = pinned.numpy()[:size]
        batch, block = len(plan.slots), self.config.block_size
        info[:batch, 0] = plan.slots
        info[:batch, 1] = plan.positions
        info[:batch, 2] = (
            table.block_tables[plan.slots, plan.positions // block].astype(np.int64) * block + plan.positions % block
        )
        info[:batch, 3] = plan.positions + 1
        info[:batch, 4] = plan.at
        info[:batch, 5] = table.seed[plan.slots]
        info[:batch, 6] = table.temperature[plan.slots].view(np.int32)
        info[batch:] = (self.config.max_num_seqs, 0, -1, 0, 0, 0, 0, 0)
        self.info[:size].copy_(pinned[:size], non_blocking=True)

    def _update_tables(self, table: SlotTable) -> None:
        """Send the block tables of slots that were given away; blocks that come later are in the steps' `info`."""
        if not table.placed:
            return
        slots = np.array(sorted(table.placed), dtype=np.int64)
        table.placed.clear()
        rows = self.to_device(table.block_tables[slots])
        self.tables[:, : rows.shape[1]].index_copy_(0, self.to_device(slots), rows)

    def _fetch(self, batch: int) -> StepResult:
        pinned = self._out_ring[self._turn]
        pinned.copy_(self.out, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()

        def arrays() -> list[np.ndarray[Any, Any]]:
            event.synchronize()
            bits = pinned.numpy()[:, :batch].copy()
            logprobs, raw = bits[1].view(np.float32), bits[2].view(np.float32)
            return [bits[0].astype(np.int64), logprobs, logprobs, raw]

        return StepResult(arrays)


def fused_stack(model: Any, config: EngineConfig) -> FusedStack | None:
    """Where the model has one and it may be used. Exact mode runs the modules, as the trainer's pass does."""
    if config.exact or not config.fused_kernels:
        return None
    fused = FusedStack(model, merge=config.merge_weights)
    return fused if fused.stack is not None else None
