"""Keep message histories short: strip or shorten thinking blocks, fit trajectories to a token limit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

logger = logging.getLogger(__name__)

_OPEN, _CLOSE = "<think>", "</think>"
_MODEL_ROLES = ("agent", "assistant")
_REQUIRED_KEYS = ("messages", "tokens", "masks", "seed", "parsed_actions")


def strip_thinking(response_text: str) -> str:
    """The text without its first ``<think>...</think>`` block."""
    parts = _split_thinking(response_text)
    return response_text if parts is None else parts[0] + parts[2]


def truncate_thinking(response_text: str, tokenizer: Any, max_think_tokens: int) -> str:
    """Shorten the first think block to ``max_think_tokens`` tokens.

    A block that fits keeps its words. Otherwise its last paragraph stays when that fits, else its last tokens, marked
    by a leading ``... ``. The block's content stands on lines of its own; an empty one becomes ``<think></think>``.
    Text without a complete block, or that cannot be tokenized, comes back unchanged.
    """
    parts = _split_thinking(response_text)
    if parts is None:
        return response_text
    before, thinking, after = parts
    try:
        kept = _shorten(thinking.strip(), tokenizer, max_think_tokens)
    except Exception:  # the tokenizer is foreign code; a history that cannot be shortened is still a history
        logger.exception("could not shorten the thinking of %.200r; keeping it whole", response_text)
        return response_text
    return before + _OPEN + (f"\n{kept}\n" if kept else "") + _CLOSE + after


def _split_thinking(text: str) -> tuple[str, str, str] | None:
    """(before, inside, after) of the first complete think block."""
    before, opened, rest = text.partition(_OPEN)
    inside, closed, after = rest.partition(_CLOSE)
    return (before, inside, after) if opened and closed else None


def _shorten(thinking: str, tokenizer: Any, limit: int) -> str:
    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    tokens = encode(thinking) if thinking else []
    if len(tokens) <= limit:
        return decode(tokens)
    last_paragraph = encode(thinking.rsplit("\n\n", 1)[-1].strip())
    kept = last_paragraph if len(last_paragraph) <= limit else tokens[len(tokens) - max(limit, 0) :]
    shortened = decode(kept)
    return f"... {shortened}" if shortened else ""


def ensure_trajectory_token_limit(
    trajectory: Sequence[dict[str, Any]], tokenizer: Any, max_trajectory_tokens: int
) -> list[dict[str, Any]]:
    """Drop old messages until every alternative of every step fits ``max_trajectory_tokens``.

    A step is a group with ``messages, tokens, masks, seed, parsed_actions``; one that lacks any of them is left out.
    The first message (the system prompt), the last model turn and the environment message before it are kept; from the
    rest the oldest go first, as an environment + model pair where possible, and the same number from every alternative
    that still has some to give. A step that is too long even so is left out.
    """
    kept = []
    for index, step in enumerate(trajectory):
        if any(step.get(key) is None for key in _REQUIRED_KEYS) or not all(
            step[key] for key in ("messages", "tokens", "masks")
        ):
            logger.warning("step %d lacks one of %s; left out", index, ", ".join(_REQUIRED_KEYS))
            continue
        fitted = _fit_step(step, tokenizer, max_trajectory_tokens)
        if fitted is None:
            logger.warning("step %d exceeds %d tokens even when shortened; left out", index, max_trajectory_tokens)
        else:
            kept.append(fitted)
    return kept


def _fit_step(step: dict[str, Any], tokenizer: Any, limit: int) -> dict[str, Any] | None:
    if max(map(len, step["tokens"])) <= limit:
        return step
    alternatives = [list(messages) for messages in step["messages"]]
    tokens, masks = list(step["tokens"]), list(step["masks"])
    while max(map(len, tokens)) > limit:
        removable = [_removable_now(messages) for messages in alternatives]
        if not any(removable):
            return None
        number = min(count for count in removable if count)
        for index, count in enumerate(removable):
            if count:
                del alternatives[index][1 : 1 + number]
                fresh = tokenize_for_trainer(tokenizer, alternatives[index])
                tokens[index], masks[index] = fresh["tokens"], fresh["masks"]
    return {**step, "messages": alternatives, "tokens": tokens, "masks": masks}


def _removable_now(messages: list[dict[str, Any]]) -> int:
    """How many messages after the first one may go in this round: 0, 1, or 2 for a whole turn."""
    roles = [message["role"] for message in messages]
    protected = 0
    if len(roles) > 1 and roles[-1] in _MODEL_ROLES:
        protected = 2 if len(roles) > 2 and roles[-2] == "environment" else 1
    available = len(roles) - 1 - protected
    if available >= 2 and roles[1] == "environment" and roles[2] in _MODEL_ROLES:
        return 2
    return min(available, 1) if available > 0 else 0
