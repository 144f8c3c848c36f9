"""The student a teacher teaches: a frozen model that answers chats, in this process or behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from atlaslib.data.prompts import PromptEncoder, derive_seed
from atlaslib.errors import ConfigError, StudentError
from atlaslib.generation.protocol import Request, Sampler, SamplingSettings

Chat = list[dict[str, str]]


@dataclass(kw_only=True, slots=True, frozen=True)
class StudentReply:
    """One answer of the student."""

    text: str
    num_tokens: int


class Student(Protocol):
    """Answers chats; its weights never change during a run."""

    def answer(
        self, chats: Sequence[Chat], settings: SamplingSettings, *, seed: int, positions: Sequence[int] | None = None
    ) -> list[StudentReply]:
        """One reply per chat, in order. ``positions`` (may be left out of an own student) number the chats over all processes."""


class ModelStudent:
    """A student in this process, sampled by any :class:`Sampler` over a frozen model."""

    def __init__(
        self, sampler: Sampler, tokenizer: Any, *, max_prompt_length: int | None, stop_token_ids: tuple[int, ...]
    ) -> None:
        self._sampler, self._tokenizer, self._stop = sampler, tokenizer, stop_token_ids
        self._encoder = PromptEncoder(tokenizer, max_length=max_prompt_length)

    def answer(
        self, chats: Sequence[Chat], settings: SamplingSettings, *, seed: int, positions: Sequence[int] | None = None
    ) -> list[StudentReply]:
        """One reply per chat; the same seed and position give the same reply."""
        requests = [
            Request(prompt_ids=self._encoder.encode({"prompt": self._prompt(chat)}).token_ids, seed=own_seed)
            for chat, own_seed in zip(chats, _seeds(seed, chats, positions), strict=True)
        ]
        outputs = self._sampler.generate(requests, with_stops(settings, self._stop))
        return [
            StudentReply(
                text=self._tokenizer.decode(output[0].token_ids, skip_special_tokens=True),
                num_tokens=len(output[0].token_ids),
            )
            for output in outputs
        ]

    def _prompt(self, chat: Chat) -> Any:
        """A tokenizer without a chat template gets the messages as plain text."""
        if getattr(self._tokenizer, "chat_template", None):
            return chat
        return "\n\n".join(message["content"] for message in chat) + "\n\n"


class EndpointStudent:
    """A student behind any OpenAI-compatible endpoint.

    Example: ``EndpointStudent("http://localhost:9004/v1", model="student")``
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str = "default",
        api_key: str | None = None,
        max_concurrent: int = 64,
        timeout_s: float = 300.0,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"the student's address {base_url!r} must start with http:// or https://")
        self.base_url, self.model = base_url.rstrip("/"), model
        self._api_key, self._max_concurrent, self._timeout_s = api_key, max_concurrent, timeout_s

    def answer(
        self, chats: Sequence[Chat], settings: SamplingSettings, *, seed: int, positions: Sequence[int] | None = None
    ) -> list[StudentReply]:
        """One reply per chat, asked concurrently; transient failures are retried, a lasting one raises :class:`StudentError`."""
        return asyncio.run(self._answer(chats, settings, _seeds(seed, chats, positions)))

    async def _answer(
        self, chats: Sequence[Chat], settings: SamplingSettings, seeds: Sequence[int]
    ) -> list[StudentReply]:
        from openai import AsyncOpenAI, OpenAIError

        gate = asyncio.Semaphore(self._max_concurrent)

        async def ask(chat: Chat, seed: int) -> StudentReply:
            async with gate:
                reply = await client.chat.completions.create(
                    model=self.model,
                    messages=chat,  # type: ignore[arg-type]
                    max_tokens=settings.max_tokens,
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                    seed=seed % (1 << 31),
                )
            text = reply.choices[0].message.content or ""
            return StudentReply(
                text=text, num_tokens=reply.usage.completion_tokens if reply.usage else len(text.split())
            )

        async with AsyncOpenAI(
            base_url=self.base_url, api_key=self._api_key or "x", timeout=self._timeout_s, max_retries=4
        ) as client:
            try:
                return list(await asyncio.gather(*map(ask, chats, seeds)))
            except OpenAIError as error:
                raise StudentError(
                    f"the student at {self.base_url} (model {self.model!r}) did not answer: {error}"
                ) from error


def _seeds(seed: int, chats: Sequence[Chat], positions: Sequence[int] | None) -> list[int]:
    """Per chat; one that depends on its number over all processes, not on who asks."""
    return [derive_seed(seed, position) for position in (range(len(chats)) if positions is None else positions)]


def with_stops(settings: SamplingSettings, stop_token_ids: tuple[int, ...]) -> SamplingSettings:
    """The same settings, ending at the student's own end tokens."""
    return replace(settings, stop_token_ids=stop_token_ids)
