"""One forward of the trainer's own module over the packed tokens of a step, and the choice of the next tokens.

Consumes plans of the scheduler, produces device tensors. Owns the key-value cache and the last token of every slot.
The module is put into eval mode and onto paged attention for the duration of a forward and left as it was found.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlaslib.engine import attention, exact, memory
from atlaslib.engine.attention import KVCache, LayerShape, Span, StepContext
from atlaslib.engine.config import EngineConfig
from atlaslib.engine.cpu.lean_decode import lean_decode_for
from atlaslib.engine.output import ScoredRows
from atlaslib.engine.sampling import RowParams, all_logprobs, sample, token_logprobs
from atlaslib.engine.scheduler import Chunk, DecodePlan, PrefillPlan
from atlaslib.engine.sequence import SlotTable, Tokens

logger = logging.getLogger(__name__)
_SMALL_MODEL = 8_000_000  # parameters below which one thread beats several


@dataclass(slots=True)
class Prefilled:
    """Result of a prefill step."""

    logits: Tensor  # [kept rows, V]
    last_rows: list[int]  # per chunk: the row after its last token; -1 when the prompt goes on
    scored: list[ScoredRows]


@dataclass(slots=True)
class StepResult:
    """What a step sampled; `arrays()` waits for it: token ids, log-probs, temperature log-probs, raw log-probs, [B] each."""

    arrays: Callable[[], list[np.ndarray[Any, Any]]]
    top_ids: Tensor | None = None  # [B, k]
    top_logprobs: Tensor | None = None


@contextmanager
def cpu_settings(device: torch.device, threads: int | None) -> Iterator[None]:
    """Torch threads for a step; on ARM also plain BLAS, which is 1.4x oneDNN at the few rows of a decode step."""
    if device.type != "cpu":
        yield
        return
    before, onednn = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
    plain_blas = onednn and platform.machine() in ("aarch64", "arm64")
    if threads not in (None, before):
        torch.set_num_threads(threads or before)
    if plain_blas:
        torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        if plain_blas:
            torch._C._set_mkldnn_enabled(True)
        if threads not in (None, before):
            torch.set_num_threads(before)


class ModelRunner:
    """Runs the module; keeps the cache."""

    runs_ahead = False  # the next step may be launched before this one's tokens are known on the host
    admit_share = 0  # see Scheduler.admit_at

    def __init__(self, model: Any, config: EngineConfig, max_model_len: int) -> None:
        self.model, self.config = model, config
        self.modules = list(model.modules())
        self.attention_configs = attention.configs_of(self.modules)
        parameter = next(model.parameters())
        self.device: torch.device = parameter.device
        if self.device.type == "cpu" and parameter.dtype != torch.float32:
            logger.warning("%s on CPU: matrix products are up to 100 times slower than in float32", parameter.dtype)
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.threads = self._choose_threads()
        self.lean = (
            lean_decode_for(model, config.num_threads) if self.device.type == "cpu" and not config.exact else None
        )
        self.layers = self.record_shapes()
        reserve = memory.activation_bytes(model, config, max_model_len)
        self.num_blocks = memory.choose_num_blocks(self.layers, config, max_model_len, self.device, reserve)
        self.cache = KVCache.empty(self.layers, self.num_blocks, config.block_size, self.device)
        self.last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
        self._dummy_mask = torch.zeros(1, 1, 1, 1, device=self.device, dtype=parameter.dtype)

    def _choose_threads(self) -> int | None:
        if self.device.type != "cpu":
            return None
        if self.config.num_threads is not None:
            return self.config.num_threads
        return 1 if sum(p.numel() for p in self.model.parameters()) < _SMALL_MODEL else None

    # forward

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """No gradients, eval mode, paged attention, chosen threads and BLAS; everything restored afterwards."""
        with ExitStack() as stack:
            stack.enter_context(self.inference_mode())
            stack.enter_context(attention.paged_attention(self.attention_configs))
            stack.enter_context(cpu_settings(self.device, self.threads))
            if self.config.exact:
                stack.enter_context(exact.ExactMode())
            yield

    @contextmanager
    def inference_mode(self) -> Iterator[None]:
        """No gradients and eval mode; each module's own mode comes back (faster than model.eval())."""
        training = [module for module in self.modules if module.training]
        for module in training:
            module.__dict__["training"] = False
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.__dict__["training"] = True

    def forward(self, ids: Tensor, positions: Tensor, context: StepContext, keep: Tensor | None) -> Tensor:
        """Logits [rows, V] of the packed tokens; `keep`: the rows wanted, None for all of them."""
        with attention.running(context):
            output = self.model(
                input_ids=ids[None],
                position_ids=positions[None],
                attention_mask=self._dummy_mask,
                use_cache=False,
                logits_to_keep=0 if keep is None else keep,
            )
        logits: Tensor = output.logits[0]
        return logits

    def record_shapes(self) -> list[LayerShape]:
        """What each layer stores per token, learned from a forward of two tokens."""
        recorded: dict[int, LayerShape] = {}
        self._dummy_mask = torch.zeros(1, 1, 1, 1, device=self.device)
        ids = torch.zeros(2, dtype=torch.int64, device=self.device)
        context = StepContext(cache=KVCache([], [], 1), slots=ids, recorded=recorded)
        with self.prepared():
            self.forward(ids, torch.arange(2, device=self.device), context, None)
        return [recorded[layer] for layer in sorted(recorded)]

    # steps

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.cache.copy_blocks(pairs)

    def prefill(self, plan: PrefillPlan, table: SlotTable) -> Prefilled:
        """Read the chunks of the plan in one packed forward."""
        size = self.config.block_size
        packed: list[np.ndarray[Any, Any]] = []
        spans: list[Span] = []
        keep: list[int] = []
        row = 0
        for chunk in plan.chunks:
            count = chunk.end - chunk.start
            places = np.arange(chunk.start, chunk.end)
            blocks = np.array(chunk.seq.blocks[: -(-chunk.end // size)], dtype=np.int64)
            packed.append(
                np.stack(
                    [chunk.seq.tokens[chunk.start : chunk.end], places, blocks[places // size] * size + places % size]
                )
            )
            spans.append(Span(row, count, chunk.start, chunk.seq.slot, blocks))
            if chunk.seq.request.wants_prompt_logprobs:
                keep += range(row, row + count)
            elif chunk.last:
                keep.append(row + count - 1)
            row += count
        with self.prepared():
            logits = self.read(np.concatenate(packed, axis=1), spans, np.array(keep, dtype=np.int64))
            return self._split(plan, logits)

    def read(self, packed: np.ndarray[Any, Any], spans: list[Span], keep: np.ndarray[Any, Any]) -> Tensor:
        """Logits of the rows `keep`; `packed` is int64 [3, T]: token ids, positions, cache slots."""
        rows = packed.shape[1]
        even = np.pad(
            packed, ((0, 0), (0, rows % 2))
        )  # each of the three starts at a multiple of 16 bytes: compiled once
        ids, positions, slots = self.to_device(even)[:, :rows].unbind(0)
        context = StepContext(cache=self.cache, slots=slots, spans=spans)
        self.customise(context)
        return self.forward(ids, positions, context, self.to_device(keep))

    def _split(self, plan: PrefillPlan, logits: Tensor) -> Prefilled:
        """Kept rows back to their chunks: prompt log-probs, and the last row of each finished prompt."""
        row = 0
        last_rows: list[int] = []
        scored: list[ScoredRows] = []
        for chunk in plan.chunks:
            if chunk.seq.request.wants_prompt_logprobs:
                targets = chunk.seq.tokens[chunk.start + 1 : chunk.end + 1]
                scored.append(self._score(chunk, logits[row : row + len(targets)], targets))
                row += chunk.end - chunk.start
            elif chunk.last:
                row += 1
            last_rows.append(row - 1 if chunk.last else -1)
        return Prefilled(logits, last_rows, scored)

    def _score(self, chunk: Chunk, logits: Tensor, targets: Tokens) -> ScoredRows:
        request = chunk.seq.request
        temperature = 1.0 if request.score_temperature is None else request.score_temperature
        logprobs = self.token_logprobs(logits, self.to_device(targets), temperature)
        tops = request.params.prompt_logprobs or 0
        if not tops:
            return ScoredRows(request, chunk.start + 1, logprobs, None, None)
        values, ids = all_logprobs(logits.float()).topk(min(tops, logits.shape[1]), dim=-1)
        return ScoredRows(request, chunk.start + 1, logprobs, ids, values)

    def decode_step(self, plan: DecodePlan, table: SlotTable) -> StepResult:
        """Launch one more token for every slot of the plan."""
        if self.lean is not None and self.lean.usable():
            with torch.no_grad(), cpu_settings(self.device, self.threads):
                return self.sample(self.lean.forward(*self._decode_inputs(plan, table)), plan, table)
        with self.prepared():
            return self.sample(self.forward(*self._decode_inputs(plan, table), None), plan, table)

    def _decode_inputs(self, plan: DecodePlan, table: SlotTable) -> tuple[Tensor, Tensor, StepContext]:
        """Token ids [B], positions [B] and where they live."""
        size = self.config.block_size
        width = int(plan.positions.max()) // size + 1
        tables = table.block_tables[plan.slots, :width]
        last_block = tables[np.arange(len(plan.slots)), plan.positions // size].astype(np.int64)
        context = StepContext(
            cache=self.cache,
            slots=self.to_device(last_block * size + plan.positions % size),
            tables=self.to_device(tables),
            lengths=self.to_device(plan.positions + 1),
        )
        self.customise(context)
        slots = self.to_device(plan.slots)
        return self.last_tokens[slots], self.to_device(plan.positions), context

    def customise(self, context: StepContext) -> None:
        """Another attention implementation, where there is one."""
        if self.config.exact:
            context.attend = exact.attend_exact

    def warm_up(self) -> None:
        """Whatever should not be paid by the first request."""

    def decode_ahead(self, batch: int) -> int:
        """How many decode steps of `batch` rows to launch before a prefill."""
        return 0

    def weights_changed(self) -> None:
        """Called after every update of the weights."""
        self.modules = list(self.model.modules())

    # sampling

    def sample(self, logits: Tensor, plan: DecodePlan, table: SlotTable) -> StepResult:
        """Choose a token per row and remember it as the slot's last token."""
        return self.sample_general(logits, plan, table)

    def sample_first(self, logits: Tensor, plan: DecodePlan, table: SlotTable) -> StepResult:
        """The first token of prompts that were just read."""
        with cpu_settings(self.device, self.threads), torch.no_grad():
            return self.sample(logits, plan, table)

    def sample_general(self, logits: Tensor, plan: DecodePlan, table: SlotTable) -> StepResult:
        params = self.row_params(plan.slots, plan.at, table)
        sampled = sample(logits, params)
        if self.config.exact:
            sampled.temperature_logprobs = self.token_logprobs(logits, sampled.tokens, params.temperatures)
            sampled.raw_logprobs = self.token_logprobs(logits, sampled.tokens, 1.0)
            sampled.logprobs = sampled.temperature_logprobs if params.plain else sampled.logprobs
        self.last_tokens[self.to_device(plan.slots)] = sampled.tokens
        columns = (sampled.tokens, sampled.logprobs, sampled.temperature_logprobs, sampled.raw_logprobs)
        return StepResult(lambda: [c.cpu().numpy() for c in columns], sampled.top_ids, sampled.top_logprobs)

    def token_logprobs(self, logits: Tensor, tokens: Tensor, temperature: Tensor | float) -> Tensor:
        function = exact.exact_token_logprobs if self.config.exact else token_logprobs
        return function(logits, tokens, temperature)

    def row_params(self, slots: np.ndarray[Any, Any], at: np.ndarray[Any, Any], table: SlotTable) -> RowParams:
        temperature = table.temperature[slots]
        params = RowParams(
            temperatures=self.to_device(temperature),
            seeds=self.to_device(table.seed[slots]),
            counters=self.to_device(at),
            plain=bool(table.plain[slots].all()),
            unit_temperature=bool((temperature == 1.0).all()),
            any_greedy=bool((temperature == 0.0).any()),
        )
        return params if params.plain else self._shaping(params, slots, at, table)

    def _shaping(
        self, params: RowParams, slots: np.ndarray[Any, Any], at: np.ndarray[Any, Any], table: SlotTable
    ) -> RowParams:
        rows = [table.sequences[slot] for slot in slots]
        settings = [seq.params for seq in rows if seq is not None]

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(s, name) for s in settings], dtype=dtype, device=self.device)

        params.top_ks = column("top_k", torch.int64)
        params.top_ps, params.min_ps = column("top_p", torch.float32), column("min_p", torch.float32)
        params.biases = [s.logit_bias for s in settings]
        params.num_top = max(s.logprobs for s in settings)
        if any(s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty for s in settings):
            params.repetition = column("repetition_penalty", torch.float32)
            params.presence = column("presence_penalty", torch.float32)
            params.frequency = column("frequency_penalty", torch.float32)
            params.prompt_tokens = [seq.request.prompt.tolist() for seq in rows if seq is not None]
            params.reply_tokens = [table.out[0][slot, :count].tolist() for slot, count in zip(slots, at, strict=True)]
        return params

    def to_device(self, values: np.ndarray[Any, Any]) -> Tensor:
        """Without waiting for the device."""
        tensor = torch.from_numpy(values)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)
