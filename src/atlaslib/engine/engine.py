"""The engine: requests in, completions out, sampled from the very module the trainer optimises.

    generate / EngineThread.submit ──▶ inbox ──▶ Scheduler ──plan──▶ ModelRunner ──logits──▶ sampling ──▶ SlotTable ──▶ Completion
                                                   ▲    blocks                    keys and values            │
                                                   └────────────── finished, preempted, forked ◀─────────────┘

One lock guards the model: a step holds it, and so does `updating()` while an optimizer writes, so no token is ever
sampled from half-written weights. `step()` is the table of contents; everything else is one call away.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from atlaslib.engine.block_manager import BlockManager
from atlaslib.engine.config import EngineConfig, SamplingParams, check_temperature
from atlaslib.engine.garbage import full_collections_later
from atlaslib.engine.memory import prefill_tokens
from atlaslib.engine.model_runner import ModelRunner, StepResult
from atlaslib.engine.output import Ending, Outputs, collect_scores, note_top_logprobs
from atlaslib.engine.sampling import mix_seed
from atlaslib.engine.scheduler import DecodePlan, PrefillPlan, Scheduler
from atlaslib.engine.sequence import Completion, Request, Sequence, SlotTable, TokenCallback
from atlaslib.engine.support import check_supported, choose_length, eos_ids, probe
from atlaslib.errors import EngineInputError

logger = logging.getLogger(__name__)
_SCORED_LOGITS = 1 << 26  # logits kept at once for prompt log-probs
Launched = tuple[DecodePlan, StepResult]


class Engine:
    """Samples from `model` itself; see the module text for the parts and docs/design/engine.md for the reasons."""

    scheduler: Scheduler

    def __init__(self, model: Any, tokenizer: Any = None, config: EngineConfig | None = None) -> None:
        self.tokenizer = tokenizer
        self.config = config or EngineConfig()
        self.version = 0
        self.num_tokens = 0  # sampled since start
        self._lock = threading.RLock()
        self._inbox: deque[Request] = deque()
        self._cancelled: deque[Request] = deque()
        self._claims: deque[int] = deque()  # threads that wait for `exclusive`
        self._exclusive_thread: int | None = None
        self._updating = False
        self._seeds = np.random.default_rng(self.config.seed) if self.config.seed is not None else None
        self.attach(model)

    def attach(self, model: Any) -> None:
        """Sample from `model` from now on (also for weights that moved to new storage); nothing may be running."""
        with self._lock:
            check_supported(model)
            if "scheduler" in vars(self) and self.scheduler.busy:
                raise EngineInputError("attach() needs an idle engine; finish or abort the running requests first")
            self.model = model
            config = self.config
            wanted = choose_length(model, config.max_model_len)
            self._in_flight: deque[Launched] = deque()  # launched, results not yet written down; oldest first
            self.runner = make_runner(model, config, wanted)
            self.max_model_len = min(wanted, self.runner.num_blocks * config.block_size)
            self.blocks = BlockManager(self.runner.num_blocks, config.block_size)
            self.table = SlotTable(
                config.max_num_seqs, self.blocks.blocks_for(self.max_model_len), eos_ids(model, self.tokenizer)
            )
            self.outputs = Outputs(self.table, self.tokenizer)
            self.scheduler = Scheduler(
                self.blocks,
                self.table,
                max_prefill_tokens=prefill_tokens(config, self.runner.device),
                max_model_len=self.max_model_len,
                prefix_cache=config.prefix_cache,
                max_scored_tokens=max(64, _SCORED_LOGITS // self.runner.vocab_size),
                admit_share=self.runner.admit_share,
            )
            self.runner.warm_up()
            if config.check_model:
                probe(self)
                self.blocks.forget_all()
                self.num_tokens = 0

    # requests

    @full_collections_later()
    def generate(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[list[Completion]]:
        """Completions for every prompt, `params.n` each; blocks until all are there."""
        settings = params if isinstance(params, list) else [params or SamplingParams()] * len(prompts)
        if len(settings) != len(prompts):
            raise EngineInputError(f"{len(prompts)} prompts but {len(settings)} sampling parameters")
        requests = [self.make_request(prompt, setting) for prompt, setting in zip(prompts, settings, strict=True)]
        return self._run(requests)

    @full_collections_later()
    def score(self, sequences: list[list[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """Log-prob of token i given the tokens before it, at `temperature`; index 0 is 0.0."""
        check_temperature(temperature)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        requests = [self.make_request(tokens, params, score_temperature=temperature) for tokens in sequences]
        return [completions[0].prompt_logprobs or [] for completions in self._run(requests)]

    def make_request(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        on_tokens: TokenCallback | None = None,
        score_temperature: float | None = None,
    ) -> Request:
        """Check a request and give it a seed; `enqueue` then makes it run."""
        prompt = np.asarray(prompt_ids)
        self._check(prompt, params)
        prompt = prompt.astype(np.int64)
        seed = params.seed
        if seed is not None:  # prompts that share a seed do not share their random numbers
            seed = mix_seed(seed, zlib.crc32(prompt.tobytes()))
        else:
            seed = int(self._seeds.integers(1 << 62)) if self._seeds is not None else secrets.randbits(62)
        return Request(prompt, params, seed, on_tokens=on_tokens, score_temperature=score_temperature)

    def _check(self, prompt: np.ndarray[Any, Any], params: SamplingParams) -> None:
        if not prompt.size:
            raise EngineInputError("the prompt is empty; it needs at least one token")
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise EngineInputError(
                f"the prompt must be a list of token ids, got {prompt.ndim} dimensions of {prompt.dtype}"
            )
        self._check_ids("prompt", int(prompt.min()), int(prompt.max()))
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            if ids:
                self._check_ids(name, min(ids), max(ids))
        room = self.max_model_len - len(prompt)
        if room < (1 if params.max_tokens else 0):
            raise EngineInputError(
                f"the prompt has {len(prompt)} tokens, but prompt and reply together may have max_model_len={self.max_model_len}"
            )
        if params.stop and self.tokenizer is None:
            raise EngineInputError("stop strings need a tokenizer: Engine(model, tokenizer)")

    def _check_ids(self, name: str, low: int, high: int) -> None:
        if low < 0 or high >= self.runner.vocab_size:
            wrong = low if low < 0 else high
            raise EngineInputError(f"{name}: token id {wrong} is outside 0..{self.runner.vocab_size - 1}")

    def enqueue(self, request: Request) -> None:
        """Thread-safe; the request starts with the next step that has room."""
        self._inbox.append(request)

    def cancel(self, request: Request) -> None:
        """Thread-safe; the request gives its slot back at the next step, its future ends with reason "abort"."""
        self._cancelled.append(request)

    def _run(self, requests: list[Request]) -> list[list[Completion]]:
        if self._updating:
            raise EngineInputError("generate() and score() cannot run inside updating(): the weights are being written")
        for request in requests:
            self.enqueue(request)
        unfinished = requests[::-1]
        while unfinished:
            if unfinished[-1].future.done():
                unfinished.pop()
            elif not self.step():
                time.sleep(0.001)  # a drain in another thread holds admissions back
        return [request.future.result() for request in requests]

    # living weights

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Write weights inside this block; on exit the version is one higher.

        `drain`: running replies end on the old weights first, waiting ones start on the new ones. `in_flight`: running
        replies pause here and continue with the new weights. Either way no step runs inside the block.
        """
        try:
            if self.config.update_mode == "drain":
                self.scheduler.hold_new = True
                while self.scheduler.started:
                    self.step()
            with self.exclusive():
                self._settle()
                self._updating = True
                try:
                    yield
                finally:
                    self._updating = False
                    self.version += 1
                    self._renew_cache()
                    self.runner.weights_changed()
        finally:
            self.scheduler.hold_new = False

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """No step of another thread runs inside this block: for a trainer's forward and backward beside an EngineThread."""
        me = threading.get_ident()
        self._claims.append(me)  # a loop of steps would take the lock again before a waiting thread wakes up
        try:
            self._lock.acquire()
        finally:
            self._claims.remove(me)
        outer, self._exclusive_thread = self._exclusive_thread, me
        try:
            yield
        finally:
            self._exclusive_thread = outer
            self._lock.release()

    def _renew_cache(self) -> None:
        """Old keys may not serve new prompts; running ones keep or recompute theirs."""
        self.blocks.forget_all()
        if self.config.cached_keys == "recompute":
            self.scheduler.requeue_all()
        for seq in (*self.scheduler.running, *self.scheduler.prefilling):
            seq.cacheable = False

    # the step

    def step(self) -> bool:
        """Schedule, run, sample, finish. False when there was nothing to do."""
        while self._claims and self._exclusive_thread != threading.get_ident():
            time.sleep(0.0002)
        with self._lock:
            self._take_messages()
            if not self._may_run_ahead():
                self._settle()
            plan = self.scheduler.schedule()
            if plan is None:
                return self._settle()
            if isinstance(plan, PrefillPlan):
                # work for the device while the host launches the prefill, which takes it longer than a decode step
                self._decode_ahead(self.runner.decode_ahead(len(self.scheduler.running)))
                before = len(self._in_flight)
                self._prefill(plan)
                self._decode_ahead(1)  # and while it writes results down
            else:
                before = len(self._in_flight)
                self._decode(plan)
            # the steps before, while the device works on this one
            self._settle(keep=len(self._in_flight) - before if self.runner.runs_ahead else 0)
            return True

    def _may_run_ahead(self) -> bool:
        """The next plan does not depend on tokens that are still on their way."""
        if self.scheduler.hold_new or self.scheduler.short_of_blocks:
            return not self._in_flight
        return all(self._unwatched(plan) for plan, _ in self._in_flight)

    def _unwatched(self, plan: DecodePlan) -> bool:
        """Nobody looks at these samples before they end."""
        return bool(self.table.plain[plan.slots].all()) and not self.table.watched[plan.slots].any()

    def _decode_ahead(self, count: int) -> None:
        """Launch up to `count` decode steps before the results of earlier ones are known."""
        if not self.runner.runs_ahead or 2 * len(self.scheduler.running) < self.table.num_slots:
            return  # the sooner the others join, the better
        for _ in range(count):
            plan = self.scheduler.decode() if self._may_run_ahead() and not self.scheduler.short_of_blocks else None
            if plan is None:
                return
            self._decode(plan)

    def _settle(self, keep: int = 0) -> bool:
        """Wait for all but the newest `keep` steps in flight and write their results down."""
        settled = len(self._in_flight) > keep
        while len(self._in_flight) > keep:
            self._finish(*self._in_flight.popleft())
        return settled

    def _take_messages(self) -> None:
        if self._cancelled:
            self._settle()
        while self._cancelled:
            self._abort(self._cancelled.popleft())
        while self._inbox:
            request = self._inbox.popleft()
            if not request.future.cancelled():
                self.scheduler.add(request)

    def _decode(self, plan: DecodePlan) -> None:
        self.scheduler.launched(plan.slots)
        self._in_flight.append((plan, self.runner.decode_step(plan, self.table)))

    def _prefill(self, plan: PrefillPlan) -> None:
        """Read prompts. Those read completely fork into samples, which draw their first token from one row of logits."""
        read = self.runner.prefill(plan, self.table)
        for scored in read.scored:
            collect_scores(scored)
        owners: list[Sequence] = []
        rows: list[int] = []
        for chunk, row in zip(plan.chunks, read.last_rows, strict=True):
            samples = self.scheduler.prefilled(chunk)
            if samples and chunk.seq.params.max_tokens == 0:
                for seq in samples:
                    self._end(seq, 0, Ending("length", None))
            elif samples:
                owners += samples
                rows += [row] * len(samples)
        self.runner.copy_blocks(self.scheduler.block_copies)
        self.scheduler.block_copies.clear()
        if not owners:
            return
        first = self.scheduler.plan_of(np.array([seq.slot for seq in owners], dtype=np.int64))
        self.scheduler.launched(first.slots)
        logits = read.logits[self.runner.to_device(np.array(rows, dtype=np.int64))]
        self._in_flight.append((first, self.runner.sample_first(logits, first, self.table)))

    def _finish(self, plan: DecodePlan, result: StepResult) -> None:
        """Write the results down; end, stream or keep each sample."""
        table = self.table
        values = result.arrays()
        alive = table.epoch[plan.slots] == plan.epochs
        slots, at, values = plan.slots[alive], plan.at[alive], [column[alive] for column in values]
        tokens = values[0]
        self.num_tokens += len(tokens)
        table.record(slots, at, values, self.version)
        stopped, too_long = table.ended(slots, at, tokens)
        for row in np.flatnonzero(table.watched[slots] | stopped | too_long):
            seq = table.sequences[slots[row]]
            assert seq is not None
            count = int(at[row]) + 1
            if seq.params.logprobs and result.top_ids is not None and result.top_logprobs is not None:
                note_top_logprobs(seq, result.top_ids[row], result.top_logprobs[row])
            ending = self.outputs.look(seq, count, Ending("stop", int(tokens[row])) if stopped[row] else None)
            if ending is None and too_long[row]:
                ending = Ending("length", None)
            if ending is not None:
                self._end(seq, count, ending)
            else:
                self.outputs.stream(seq, count)

    def _end(self, seq: Sequence, count: int, ending: Ending) -> None:
        self.outputs.complete(seq, count, ending)
        self.scheduler.finish(seq, count)

    def _abort(self, request: Request) -> None:
        """Give back what the request holds; its samples so far become completions with reason "abort"."""
        if request in self._inbox:
            self._inbox.remove(request)
        for seq in request.sequences:
            if seq.index in request.completions:
                continue
            count = int(self.table.generated[seq.slot]) if seq.slot >= 0 else 0
            self.outputs.complete(seq, count, Ending("abort", None))
            self.scheduler.abort(seq)

    def stats(self) -> dict[str, float]:
        """Numbers for a metrics page; cheap, and safe to read from any thread."""
        used = self.blocks.num_blocks - self.blocks.num_free
        return {
            "running": len(self.scheduler.running),
            "prefilling": len(self.scheduler.prefilling),
            "waiting": len(self.scheduler.waiting) + len(self._inbox),
            "tokens_sampled": self.num_tokens,
            "preemptions": self.scheduler.num_preemptions,
            "cache_used": used / self.blocks.num_blocks,
            "prefix_hits": self.blocks.hits,
            "prefix_lookups": self.blocks.lookups,
            "policy_version": self.version,
        }


def make_runner(model: Any, config: EngineConfig, max_model_len: int) -> ModelRunner:
    """The runner for the model's device."""
    if next(model.parameters()).device.type == "cuda":
        from atlaslib.engine.cuda.runner import CudaRunner

        return CudaRunner(model, config, max_model_len)
    return ModelRunner(model, config, max_model_len)
