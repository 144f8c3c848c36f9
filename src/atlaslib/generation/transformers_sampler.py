"""Sampling with ``model.generate`` of transformers: works for every model, quick for none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from atlaslib.generation.protocol import Request, SampledCompletion, SamplingSettings


class TransformersSampler:
    """Left-padded batches through ``generate``; log-probs from the raw logits of each step.

    ``synced_gpus``: the model is sharded, so every process goes on until the last one is done, also one without requests.
    """

    def __init__(
        self,
        model: Any,
        *,
        pad_id: int,
        batch_size: int = 64,
        around_generation: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
        synced_gpus: bool = False,
    ) -> None:
        self._model, self._pad_id, self._batch_size = model, pad_id, batch_size
        self._around = around_generation or contextlib.nullcontext
        self._synced = synced_gpus
        self._version = 0

    def sync(self, version: int) -> None:
        """The model is the trainer's own object: only the number changes."""
        self._version = version

    def generate(self, requests: list[Request], settings: SamplingSettings) -> list[list[SampledCompletion]]:
        """``n`` completions per request; requests of one call share one random stream, seeded by the first of a batch."""
        prompts = [request.prompt_ids for request in requests for _ in range(request.n)]
        seeds = [request.seed for request in requests for _ in range(request.n)]
        starts = range(0, len(prompts), self._batch_size)
        flat: list[SampledCompletion] = []
        with self._around():
            idle = self._most_of_all(len(starts)) - len(starts)
            for start in starts:
                flat += self._generate_batch(prompts[start : start + self._batch_size], seeds[start], settings)
            for _ in range(idle):
                self._generate_batch([[self._pad_id]], 0, replace(settings, max_tokens=1, min_tokens=0))
        results = iter(flat)
        return [[next(results) for _ in range(request.n)] for request in requests]

    def close(self) -> None:
        """Nothing to give back."""

    def _most_of_all(self, batches: int) -> int:
        """Batches of the busiest process: the others' shards are needed for them too."""
        if not self._synced:
            return batches
        most = torch.tensor(batches, device=next(self._model.parameters()).device)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        return int(most)

    def _generate_batch(
        self, prompts: list[list[int]], seed: int, settings: SamplingSettings
    ) -> list[SampledCompletion]:
        device = next(self._model.parameters()).device
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), self._pad_id, dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
            mask[row, width - len(prompt) :] = 1
        with evaluation_mode(self._model), torch.no_grad(), _seeded(seed, device):
            output = self._model.generate(
                input_ids=ids, attention_mask=mask, generation_config=self._config(settings), synced_gpus=self._synced
            )
        completions = output.sequences[:, width:]
        logprobs = self._logprobs(output.logits, completions, settings)
        return [
            self._completion(completions[row].tolist(), logprobs[row].tolist(), settings) for row in range(len(prompts))
        ]

    def _config(self, settings: SamplingSettings) -> Any:
        from transformers import GenerationConfig

        greedy = settings.temperature == 0.0
        sampling: dict[str, Any] = (
            {}
            if greedy
            else {
                "temperature": settings.temperature,
                "top_p": settings.top_p,
                "top_k": settings.top_k or 0,
                "min_p": settings.min_p,
            }
        )
        return GenerationConfig(
            max_new_tokens=settings.max_tokens,
            min_new_tokens=settings.min_tokens or None,
            do_sample=not greedy,
            repetition_penalty=settings.repetition_penalty,
            eos_token_id=list(settings.stop_token_ids) or None,
            pad_token_id=self._pad_id,
            return_dict_in_generate=True,
            output_logits=True,
            use_cache=True,
            **sampling,
        )

    @staticmethod
    def _logprobs(
        logits: tuple[torch.Tensor, ...], completions: torch.Tensor, settings: SamplingSettings
    ) -> torch.Tensor:
        """[B, N] log-probs of the drawn tokens, from the logits before truncation and penalties."""
        divisor = settings.temperature if settings.logprobs_at_temperature and settings.temperature else 1.0
        columns = [
            torch.log_softmax(step.float() / divisor, dim=-1).gather(1, completions[:, i : i + 1])
            for i, step in enumerate(logits)
        ]
        return torch.cat(columns, dim=1)

    def _completion(self, ids: list[int], logprobs: list[float], settings: SamplingSettings) -> SampledCompletion:
        stops = set(settings.stop_token_ids)
        end = next((i + 1 for i, token in enumerate(ids) if token in stops), None)
        kept = ids[: end if end is not None else settings.max_tokens]
        reason = "stop" if end is not None else "length"
        return SampledCompletion(
            token_ids=kept, logprobs=logprobs[: len(kept)], finish_reason=reason, versions=[self._version]
        )


@contextlib.contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """No dropout inside this block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
