"""Sampling with the embedded engine, which runs the very module the trainer optimises: no copy, no push."""

from __future__ import annotations

from typing import Any

from atlaslib.generation.protocol import Request, SampledCompletion, SamplingSettings


class EngineSampler:
    """Requests go to ``engine.generate``, or through an :class:`EngineThread` when one runs (policy server, overlap)."""

    def __init__(self, engine: Any, *, thread: Any = None) -> None:
        self.engine, self.thread = engine, thread

    def sync(self, version: int) -> None:
        """Weights are shared and the engine counts versions itself, in ``updating()``: nothing to do."""

    def generate(self, requests: list[Request], settings: SamplingSettings) -> list[list[SampledCompletion]]:
        """``n`` completions per request, in order."""
        prompts = [request.prompt_ids for request in requests]
        params = [self._params(settings, request) for request in requests]
        if self.thread is None:
            outputs = self.engine.generate(prompts, params)
        else:
            futures = [self.thread.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
            outputs = [future.result() for future in futures]
        return [[_to_sampled(completion, settings) for completion in output] for output in outputs]

    def close(self) -> None:
        """The engine belongs to the trainer; nothing to give back here."""

    @staticmethod
    def _params(settings: SamplingSettings, request: Request) -> Any:
        from atlaslib.engine import SamplingParams

        return SamplingParams(
            n=request.n,
            max_tokens=settings.max_tokens,
            min_tokens=settings.min_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k or 0,
            min_p=settings.min_p or 0.0,
            repetition_penalty=settings.repetition_penalty,
            stop_token_ids=list(settings.stop_token_ids),
            seed=request.seed,
        )


def _to_sampled(completion: Any, settings: SamplingSettings) -> SampledCompletion:
    logprobs = completion.temperature_logprobs if settings.logprobs_at_temperature else completion.raw_logprobs
    return SampledCompletion(
        token_ids=list(completion.token_ids),
        logprobs=list(logprobs),
        finish_reason="length" if completion.finish_reason == "length" else "stop",
        versions=sorted(set(completion.versions)),
    )
