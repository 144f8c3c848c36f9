"""transformers' own ways of sampling, for benchmarks/engine.py: generate, generate with a compiled static cache, continuous batching.

Each measured run has a time limit. A way that is slow is measured over fewer new tokens, and the rest is added at the pace of
those; its row says over how many. That favours the slow ones a little: later steps have longer contexts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_PATIENCE_S = 60.0  # for a part of a run that cannot be cut short


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


def run_generate(model: Any, load: Load, device: str, *, limit_s: float = 1e9, steps: int = 1 << 30, **how: Any) -> Row:
    """transformers.generate on left-padded batches, each to its longest reply.

    A batch is cut `limit_s` after its first token (or after `steps`); it and the batches after it then count with the
    time they would have taken.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Stop(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            if not first:
                if device == "cuda":
                    torch.cuda.synchronize()
                first.append(time.perf_counter())
            done = time.perf_counter() > first[0] + limit_s or input_ids.shape[1] >= last
            return torch.full((input_ids.shape[0],), done, device=input_ids.device)

    longest = max(load.new_tokens)  # of all batches, so that a static cache keeps its shape
    kwargs = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": longest, "min_new_tokens": longest, **how}
    seconds, made = 0.0, longest
    for ids, mask, new in padded_batches(load):
        if made >= longest:  # not cut yet
            first: list[float] = []
            last = ids.shape[1] + min(max(new), steps)
            batch = {"input_ids": ids.to(device), "attention_mask": mask.to(device), "pad_token_id": 0, **kwargs}
            stop = StoppingCriteriaList([Stop()])
            spent, out = timed(lambda: model.generate(**batch, stopping_criteria=stop), device)  # noqa: B023
            begun = time.perf_counter() - first[0]
            made = out.shape[1] - ids.shape[1]
            pace = begun / max(1, made - 1)
            made = longest if made >= max(new) else made
        seconds += spent - begun + pace * (max(new) - 1)
    name = "transformers.generate" + (" static + compile" if how else "")
    return Row(name, load.name, sum(load.new_tokens), seconds, "" if made >= longest else f"from {made} tokens each")


def run_compiled(model: Any, load: Load, limit_s: float) -> Row:
    """generate with a static cache, which transformers compiles; the first call compiles and is not measured."""
    first, _ = timed(lambda: run_generate(model, load, "cuda", steps=6, cache_implementation="static"), "cuda")
    row = run_generate(model, load, "cuda", limit_s=limit_s, cache_implementation="static")
    row.extra["first_run_s"] = first
    return row


def run_continuous(model: Any, load: Load, limit_s: float) -> Row:
    """transformers' continuous batching; start and warm-up of its manager are not measured."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=512, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(generation_config=config, block=True, timeout=5) as manager:
        return _run_managed(manager, load, limit_s)


def _run_managed(manager: Any, load: Load, limit_s: float) -> Row:
    """A short run to see the speed, then one over as many new tokens as the limit allows."""

    def run(cut: int) -> int:
        for prompt, new in zip(load.prompts, load.new_tokens, strict=True):
            manager.add_request(prompt, max_new_tokens=min(new, cut))
        tokens = finished = 0
        end = time.perf_counter() + _PATIENCE_S
        while finished < len(load.prompts):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("the continuous batching thread has ended")
            if time.perf_counter() > end:
                raise TimeoutError(f"{cut} new tokens of {len(load.prompts)} requests took more than {_PATIENCE_S} s")
            if result is not None and result.is_finished():
                finished, tokens = finished + 1, tokens + len(result.generated_tokens)
        return tokens

    full, short = max(load.new_tokens), 4
    run(2)
    short_s, _ = timed(lambda: run(short), "cuda")
    cut = min(full, max(4 * short, int(short * limit_s / short_s)))
    seconds, tokens = timed(lambda: run(cut), "cuda")
    note = "" if cut == full else f"from {cut} tokens each"
    if not load.mixed:  # the rest of the reply at the pace of its measured part
        seconds += (full - cut) * (seconds - short_s) / (cut - short)
        tokens = sum(load.new_tokens)
    return Row("transformers continuous batching", load.name, tokens, seconds, note)


def run_peers(
    model: Any,
    loads: list[Load],
    which: list[str],
    limit_s: float,
    out_of_time: Callable[[], bool],
    note: Callable[[Row], None],
) -> None:
    """Every way on every load; one that fails is a printed line, not the end of the benchmark."""

    def attempt(name: str, load: Load, run: Callable[[], Row]) -> None:
        if out_of_time():
            print(f"  no time left for {name} on {load.name}")
            return
        try:
            note(run())
        except Exception as error:  # see the docstring
            print(f"  {name} on {load.name} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
        torch.cuda.empty_cache()

    if "generate" in which:
        run_generate(model, loads[0], "cuda", steps=4)  # loads kernels
        for load in loads:
            attempt("generate", load, lambda: run_generate(model, load, "cuda", limit_s=limit_s))  # noqa: B023
    if "continuous" in which:
        for load in loads:
            attempt("continuous batching", load, lambda: run_continuous(model, load, limit_s))  # noqa: B023
    if "compile" in which:
        for load in loads:
            attempt("static + compile", load, lambda: run_compiled(model, load, limit_s))  # noqa: B023
