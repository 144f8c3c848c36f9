"""Sample several answers to one prompt whose first tokens differ."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)


async def generate_with_diverse_first_tokens(
    self: Any,
    messages: Sequence[dict[str, Any]],
    prefill: str = "",
    n: int = 8,
    max_tokens: int = 4096,
    temperature: float = 1.0,
) -> list[str]:
    """``n`` answers as text (prefill included), each opening with another first token where the model knows so many.

    ``self`` is an environment: its ``tokenizer`` renders the chat and its ``server`` completes it. The first tokens are
    the most likely ones (``logprobs`` of a one-token completion); a server that reports none is sampled instead. When
    fewer than ``n`` distinct openings exist the remaining answers are ordinary samples.
    """
    if n < 1:
        raise ValueError(f"n ({n}) must be at least 1")
    prompt = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True) + prefill
    openings = await _distinct_openings(self.server, prompt, n, temperature)
    openings += [""] * (n - len(openings))

    async def answer(opening: str) -> str:
        completion = await self.server.completion(
            prompt=prompt + opening, n=1, max_tokens=max(1, max_tokens - bool(opening)), temperature=temperature
        )
        return prefill + opening + str(completion.choices[0].text)

    return list(await asyncio.gather(*map(answer, openings)))


async def _distinct_openings(server: Any, prompt: str, n: int, temperature: float) -> list[str]:
    probe = await server.completion(prompt=prompt, n=n, max_tokens=1, temperature=temperature, logprobs=n)
    ranked: dict[str, float] = {}
    for choice in probe.choices:
        for token, logprob in _first_position(choice).items():
            ranked[token] = max(logprob, ranked.get(token, float("-inf")))
    likely = sorted(ranked, key=lambda token: -ranked[token])
    sampled = [choice.text for choice in probe.choices]
    distinct = [token for token in dict.fromkeys([*likely, *sampled]) if token]
    if len(distinct) < n:
        logger.info("only %d distinct first tokens for %d samples", len(distinct), n)
    return distinct[:n]


def _first_position(choice: Any) -> dict[str, float]:
    positions = getattr(getattr(choice, "logprobs", None), "top_logprobs", None)
    return dict(positions[0] or {}) if positions else {}
