"""A task a tiny model learns in seconds, for both sources of rollouts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LETTERS = set("abcdefghijklm")


def letter_share(completions: list[str], **_: Any) -> list[float]:
    """Share of the characters that lie between a and m."""
    return [sum(character in LETTERS for character in text) / max(len(text), 6) for text in completions]


@pytest.fixture
def letters() -> Callable[..., list[float]]:
    return letter_share


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return [{"prompt": f"say {character}:", "letter": character} for character in "abcdefgh"]


@pytest.fixture
def small_model(tiny_tokenizer: Any) -> Callable[..., Any]:
    """Makes a tiny Llama for the tiny tokenizer."""
    from atlaslib.models.tiny import tiny_llama

    def make(seed: int = 0, **options: Any) -> Any:
        settings = {"hidden": 32, "layers": 2, "eos_token_id": tiny_tokenizer.eos_token_id, **options}
        return tiny_llama(len(tiny_tokenizer), seed=seed, **settings)

    return make


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Any]:
    from atlaslib.trainers import GRPOConfig

    def make(**options: Any) -> Any:
        settings: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 16,
            "num_generations": 8,
            "max_completion_length": 6,
            "max_steps": 2,
            "beta": 0.0,
            "temperature": 1.0,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0.0,
            "weight_decay": 0.0,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        }
        return GRPOConfig(**settings)

    return make


class LetterEnvironment(threading.Thread):
    """A small environment: samples from a policy server, scores, submits to the rollout server; ends with the run."""

    def __init__(
        self, rollout_url: str, policy_url: Callable[[], str | None], tokenizer: Any, group_size: int = 8
    ) -> None:
        super().__init__(daemon=True)
        self._rollout_url, self._policy_url, self._tokenizer, self._group_size = (
            rollout_url,
            policy_url,
            tokenizer,
            group_size,
        )
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self.sent = 0

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # shown by the test
            if not self.stopping.is_set():
                self.error = error

    async def _serve(self) -> None:
        import aiohttp

        from atroposlib.api.client import EnvClient

        client = EnvClient(self._rollout_url, give_up_after_s=20.0)
        try:
            async with aiohttp.ClientSession() as session:
                await self._work(client, session)
        finally:
            await client.aclose()

    async def _work(self, client: Any, session: Any) -> None:
        while not self.stopping.is_set():
            reply = await client.register(name="letters", max_token_length=64, weight=1.0, group_size=self._group_size)
            if reply.get("status") == "success" and self._policy_url() is not None:
                break
            await asyncio.sleep(0.05)
        while not self.stopping.is_set():
            status = await client.status()
            if status["queue_size"] >= 6:
                await asyncio.sleep(0.01)
                continue
            await client.submit(await self._group(session))
            self.sent += 1

    async def _group(self, session: Any) -> dict[str, Any]:
        prompt = self._tokenizer(f"say {'abcdefgh'[self.sent % 8]}:")["input_ids"]
        body = {
            "prompt": {"prompt_token_ids": prompt},
            "logprobs": 0,
            "n": self._group_size,
            "max_tokens": 6,
            "temperature": 1.0,
        }
        async with session.post(f"{self._policy_url()}/generate", json=body) as response:
            reply = await response.json()
        tokens, masks, logprobs, scores = [], [], [], []
        for sequence in reply["logprobs"]:
            pairs = [next(iter(position[0].items())) for position in sequence]
            ids = [int(token) for token, _ in pairs]
            tokens.append([*prompt, *ids])
            masks.append([-100] * len(prompt) + ids)
            logprobs.append([1.0] * len(prompt) + [value for _, value in pairs])
            scores.append(letter_share([self._tokenizer.decode(ids, skip_special_tokens=True)])[0])
        return {
            "tokens": tokens,
            "masks": masks,
            "scores": scores,
            "inference_logprobs": logprobs,
            "policy_versions": reply["policy_versions"],
            "generation_params": {"temperature": 1.0},
        }


@pytest.fixture
def letter_environment() -> Iterator[Callable[..., LetterEnvironment]]:
    started: list[LetterEnvironment] = []

    def start(*args: Any, **kwargs: Any) -> LetterEnvironment:
        environment = LetterEnvironment(*args, **kwargs)
        environment.start()
        started.append(environment)
        return environment

    yield start
    for environment in started:
        environment.stopping.set()
    for environment in started:
        environment.join(5)
