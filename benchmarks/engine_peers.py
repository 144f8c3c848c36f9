"""transformers' own ways of sampling, for benchmarks/engine.py: generate, generate with a compiled static cache, continuous batching.

Each measured run has a time limit: a way that is slow is measured over fewer new tokens, and its row says over how many. That
favours the slow ones a little (shorter contexts, and of a mixed load fewer finished rows that are only padding).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Row:
    """One line of the result: `tokens` sampled in `seconds`."""

    what: str
    load: str
    tokens: int
    seconds: float
    note: str = ""
    shape: str = ""
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Load:
    """Prompts and the number of new tokens of each."""

    name: str
    prompts: list[list[int]]
    new_tokens: list[int]
    slots: int
    group: int = 1  # samples of every prompt; the lists above hold one entry per prompt

    @property
    def mixed(self) -> bool:
        return len(set(self.new_tokens)) > 1


def timed(run: Callable[[], Any], device: str) -> tuple[float, Any]:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def padded_batches(load: Load) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """Left-padded ids and mask of `slots` prompts at a time, and their reply lengths."""
    longest = max(map(len, load.prompts))
    for start in range(0, len(load.prompts), load.slots):
        prompts = load.prompts[start : start + load.slots]
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        yield ids, mask, load.new_tokens[start : start + load.slots]


def run_generate(
    model: Any, load: Load, device: str, *, limit_s: float = 1e9, max_steps: int = 1 << 30, **how: Any
) -> Row:
    """transformers.generate on left-padded batches, each to its longest reply, until done or `limit_s` is over."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Stop(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            done = time.perf_counter() > end or input_ids.shape[1] >= last
            return torch.full((input_ids.shape[0],), done, device=input_ids.device)

    seconds, tokens, steps = 0.0, 0, 0
    for ids, mask, new in padded_batches(load):
        end, last = time.perf_counter() + limit_s - seconds, ids.shape[1] + min(max(new), max_steps)
        longest = max(load.new_tokens)  # of all batches, so that a static cache keeps its shape
        kwargs = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": longest, "pad_token_id": 0, **how}
        kwargs["min_new_tokens"] = longest
        stop = StoppingCriteriaList([Stop()])
        batch = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        spent, out = timed(lambda: model.generate(**batch, **kwargs, stopping_criteria=stop), device)  # noqa: B023
        made = out.shape[1] - ids.shape[1]
        seconds, steps = seconds + spent, max(steps, made)
        tokens += sum(min(count, made) for count in new)
        if seconds >= limit_s or made < max(new):
            break
    row = Row("transformers.generate" + (" static + compile" if how else ""), load.name, tokens, seconds)
    row.note = f"{steps} new tokens" if not load.mixed else f"{tokens} of {sum(load.new_tokens)} tokens"
    return row


def run_compiled(model: Any, load: Load, limit_s: float) -> Row:
    """generate with a static cache, which transformers compiles; the first call compiles and is not measured."""
    first, _ = timed(lambda: run_generate(model, load, "cuda", max_steps=6, cache_implementation="static"), "cuda")
    row = run_generate(model, load, "cuda", limit_s=limit_s, cache_implementation="static")
    row.extra["first_run_s"] = first
    return row


@contextmanager
def continuous_batching(model: Any) -> Iterator[Callable[[Load, float], Row]]:
    """transformers' continuous batching manager; start and warm-up are not measured."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=512, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(generation_config=config, block=True, timeout=5) as manager:
        yield lambda load, limit_s: _run_managed(manager, load, limit_s)


def _run_managed(manager: Any, load: Load, limit_s: float) -> Row:
    """A short run to see the speed, then one over as many new tokens as the limit allows."""

    def run(cut: int) -> int:
        for prompt, new in zip(load.prompts, load.new_tokens, strict=True):
            manager.add_request(prompt, max_new_tokens=min(new, cut))
        tokens = finished = 0
        while finished < len(load.prompts):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("the continuous batching thread has ended")
            if result is not None and result.is_finished():
                finished, tokens = finished + 1, tokens + len(result.generated_tokens)
        return tokens

    short = 4
    seconds, _ = timed(lambda: run(short), "cuda")
    cut = min(max(load.new_tokens), max(short, int(short * limit_s / seconds)))
    seconds, tokens = timed(lambda: run(cut), "cuda")
    return Row("transformers continuous batching", load.name, tokens, seconds, f"at most {cut} new tokens")


def run_peers(
    model: Any,
    loads: list[Load],
    which: list[str],
    limit_s: float,
    out_of_time: Callable[[], bool],
    show: Callable[[Row], None],
) -> list[Row]:
    """Every way on every load; one that fails is a printed line, not the end of the benchmark."""
    rows: list[Row] = []

    def note(name: str, load: Load, run: Callable[[], Row]) -> None:
        if out_of_time():
            print(f"  no time left for {name} on {load.name}")
            return
        try:
            rows.append(run())
            show(rows[-1])
        except Exception as error:  # see the docstring
            print(f"  {name} on {load.name} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
        torch.cuda.empty_cache()

    def limit(load: Load) -> float:  # a mixed load says little before the longest reply of a batch has ended
        return 3 * limit_s if load.mixed else limit_s

    if "generate" in which:
        run_generate(model, loads[0], "cuda", max_steps=4)  # loads kernels
        for load in loads:
            note("generate", load, lambda: run_generate(model, load, "cuda", limit_s=limit(load)))  # noqa: B023
    if "continuous" in which:
        with continuous_batching(model) as managed:
            for load in loads:
                note("continuous batching", load, lambda: managed(load, limit_s))  # noqa: B023
        torch.cuda.empty_cache()
    if "compile" in which:
        for load in loads:
            note("static + compile", load, lambda: run_compiled(model, load, limit(load)))  # noqa: B023
    return rows
