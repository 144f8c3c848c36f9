"""Turn a finished chat into the token ids and masks a trainer takes (mask -100 = not trained).

For data whose exact sampled ids are known (ManagedServer) use those instead: tokenizing text again need not
give back what was sampled. This module is for chats that exist only as text.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

UNMASKED_ROLES = ["assistant", "agent"]
IGNORED = -100
_said_not_append_only = False


def tokenize_for_trainer(
    tokenizer: Any,
    chat: Sequence[Mapping[str, Any]],
    include_messages: bool = False,
    train_on_all_assistant_turns: bool = False,
    finish_reason: str = "",
) -> dict[str, Any]:
    """Tokenize ``chat`` and mask everything but the model's own words.

    Trains on the last message only, or on every assistant and agent turn with ``train_on_all_assistant_turns``.
    With ``finish_reason="length"`` a closing end-of-sequence token is dropped: the model never said it.
    Returns ``{"tokens": [int], "masks": [int]}`` plus ``"messages"`` when asked for; the lists have equal length.
    """
    messages = list(chat)
    tokens = template_ids(tokenizer, messages)
    spans = (
        _all_turn_spans(tokenizer, messages, tokens)
        if train_on_all_assistant_turns
        else [(_prompt_end(tokenizer, messages[:-1], tokens), len(tokens))]
    )
    masks = [IGNORED] * len(tokens)
    for start, end in spans:
        masks[start:end] = tokens[start:end]
    if finish_reason == "length" and tokens and tokens[-1] == getattr(tokenizer, "eos_token_id", None):
        tokens, masks = tokens[:-1], masks[:-1]
    result: dict[str, Any] = {"tokens": tokens, "masks": masks}
    if include_messages:
        result["messages"] = chat
    return result


def template_ids(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
) -> list[int]:
    """The chat template's token ids as a plain list, whatever container the installed transformers returns."""
    if not messages and not add_generation_prompt:
        return []
    ids = tokenizer.apply_chat_template(
        list(messages), tokenize=True, return_dict=False, add_generation_prompt=add_generation_prompt
    )
    return plain_ids(ids)


def plain_ids(ids: Any) -> list[int]:
    """A flat list of ints from a list, a batch of one, an array, an Encoding or a mapping with ``input_ids``."""
    if isinstance(ids, Mapping) or hasattr(ids, "input_ids"):
        ids = ids["input_ids"]
    if hasattr(ids, "ids"):
        ids = ids.ids
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = ids[0]
    return [int(token) for token in ids]


def _prompt_end(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tokens: list[int]) -> int:
    """How many of ``tokens`` come from ``messages`` and the header that opens the next answer."""
    try:
        prefix = template_ids(tokenizer, messages, add_generation_prompt=True)
    except Exception:  # templates are user code: some refuse an empty chat, all that is certain then is position 0
        if messages:
            raise
        return 0
    return _agreement(prefix, tokens)


def _all_turn_spans(tokenizer: Any, messages: list[Mapping[str, Any]], tokens: list[int]) -> list[tuple[int, int]]:
    spans = []
    for index, message in enumerate(messages):
        if message["role"] in UNMASKED_ROLES:
            start = _prompt_end(tokenizer, messages[:index], tokens)
            end = (
                len(tokens)
                if index == len(messages) - 1
                else _agreement(template_ids(tokenizer, messages[: index + 1]), tokens)
            )
            spans.append((start, end))
    return spans


def _agreement(prefix: list[int], tokens: list[int]) -> int:
    """Length of ``prefix`` when ``tokens`` starts with it, else how far the two agree.

    A template that rewrites earlier turns (dropping their thinking, say) disagrees; then only what is certain counts.
    """
    if tokens[: len(prefix)] == prefix:
        return len(prefix)
    shared = next(
        (i for i, (a, b) in enumerate(zip(prefix, tokens, strict=False)) if a != b), min(len(prefix), len(tokens))
    )
    global _said_not_append_only
    logger.log(
        logging.DEBUG if _said_not_append_only else logging.WARNING,
        "the chat template is not append-only here: %d of %d prompt tokens agree; the rest counts as the answer"
        " (shown once)",
        shared,
        len(prefix),
    )
    _said_not_append_only = True
    return shared


def tokenize_for_trainer_dpo(
    tokenizer: Any,
    chosen: Sequence[Mapping[str, Any]] | Mapping[str, Any],
    rejected: Sequence[Mapping[str, Any]] | None = None,
    *,
    max_length: int | None = None,
    include_messages: bool = False,
    train_on_all_assistant_turns: bool = False,
) -> dict[str, Any]:
    """Tokenize a preference pair: two chats, or one mapping ``{"prompt", "chosen", "rejected"}`` of texts or chats.

    For each side s in (chosen, rejected): ``{s}_tokens`` and ``{s}_masks`` as ``tokenize_for_trainer`` gives them, and
    the names preference trainers use: ``{s}_input_ids``, ``{s}_attention_mask``, ``{s}_labels``. ``prompt_tokens``
    (also ``prompt_input_ids``, ``prompt_attention_mask``) is what both sides share before the first trained token.
    ``max_length`` cuts both sides on the right.
    """
    if isinstance(chosen, Mapping):
        chosen, rejected = _pair_from_mapping(chosen)
    if rejected is None:
        raise ValueError(
            "tokenize_for_trainer_dpo needs a rejected chat: pass it third, or a mapping with prompt, chosen, rejected"
        )
    result: dict[str, Any] = {}
    for side, chat in (("chosen", chosen), ("rejected", rejected)):
        one = tokenize_for_trainer(tokenizer, chat, train_on_all_assistant_turns=train_on_all_assistant_turns)
        tokens, masks = one["tokens"][:max_length], one["masks"][:max_length]
        result |= {
            f"{side}_tokens": tokens,
            f"{side}_masks": masks,
            f"{side}_input_ids": tokens,
            f"{side}_labels": masks,
        }
        result[f"{side}_attention_mask"] = [1] * len(tokens)
        if include_messages:
            result[f"{side}_messages"] = chat
    prompt = _shared_prompt(result)
    return result | {"prompt_tokens": prompt, "prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}


def _pair_from_mapping(pair: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    prompt = pair.get("prompt", [])
    opening = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    def side(answer: Any) -> list[Mapping[str, Any]]:
        if isinstance(answer, str):
            return [*opening, {"role": "assistant", "content": answer}]
        return [*opening, answer] if isinstance(answer, Mapping) else [*opening, *answer]

    return side(pair["chosen"]), side(pair["rejected"])


def _shared_prompt(pair: Mapping[str, list[int]]) -> list[int]:
    trained = (
        next((i for i, mask in enumerate(pair[f"{side}_masks"]) if mask != IGNORED), None)
        for side in ("chosen", "rejected")
    )
    limit = min(len(pair["chosen_tokens"]) if start is None else start for start in trained)
    shared = 0
    for left, right in zip(pair["chosen_tokens"][:limit], pair["rejected_tokens"][:limit], strict=False):
        if left != right:
            break
        shared += 1
    return pair["chosen_tokens"][:shared]
