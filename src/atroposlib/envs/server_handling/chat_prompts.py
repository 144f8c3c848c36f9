"""From messages to prompt text, and what a chat template does to earlier turns when a conversation goes on."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Hashable, Sequence
from typing import Any

logger = logging.getLogger(__name__)

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
# Private-use characters: no template looks for them, so what is between them passes through untouched.
HIDDEN_OPEN, HIDDEN_CLOSE = "\ue0f0think\ue0f1", "\ue0f0/think\ue0f1"
PROBE_REPLY = "Probe4reply"


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as dicts, whatever objects the caller keeps them in."""
    return [message if isinstance(message, dict) else message.model_dump(exclude_none=True) for message in messages]


def has_chat_template(tokenizer: Any) -> bool:
    """Whether messages can be rendered with a template."""
    if not hasattr(tokenizer, "apply_chat_template"):
        return False
    return getattr(tokenizer, "chat_template", "assumed") is not None


def render_chat(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Any] | None = None,
    keep_thinking: bool = True,
    template_kwargs: dict[str, Any] | None = None,
) -> str:
    """The prompt text of a conversation; without a template one ``role: content`` line per message."""
    if not has_chat_template(tokenizer):
        return "\n".join(f"{message['role']}: {message.get('content')}" for message in messages)
    prepared = [_for_template(message, keep_thinking) for message in messages]
    options: dict[str, Any] = dict(template_kwargs or {})
    if tools:
        options["tools"] = list(tools)
    text = tokenizer.apply_chat_template(
        prepared, tokenize=False, add_generation_prompt=add_generation_prompt, **options
    )
    return str(text).replace(HIDDEN_OPEN, THINK_OPEN).replace(HIDDEN_CLOSE, THINK_CLOSE)


def _for_template(message: dict[str, Any], keep_thinking: bool) -> dict[str, Any]:
    prepared = dict(message)
    content = prepared.get("content")
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        prepared["content"] = content = "".join(_text_of(part) for part in content)
    if message.get("role") != "assistant":
        return prepared
    if keep_thinking and isinstance(content, str):
        prepared["content"] = content.replace(THINK_OPEN, HIDDEN_OPEN).replace(THINK_CLOSE, HIDDEN_CLOSE)
    if prepared.get("tool_calls"):
        prepared["tool_calls"] = [_with_argument_object(call) for call in prepared["tool_calls"]]
    return prepared


def _is_text_part(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text")


def _text_of(part: Any) -> str:
    return part if isinstance(part, str) else str(part.get("text", ""))


def _with_argument_object(call: Any) -> dict[str, Any]:
    # Templates write arguments with `tojson`; JSON text would come out quoted twice.
    plain: dict[str, Any] = dict(call) if isinstance(call, dict) else call.model_dump()
    function = dict(plain.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # a model's malformed arguments are shown to it as they were
            function["arguments"] = json.loads(arguments)
    return {**plain, "function": function}


def with_reasoning_in_content(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put reasoning that callers hand back in a field of its own into the content, as a think block."""
    restored = []
    for message in messages:
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        content = message.get("content") or ""
        if message.get("role") == "assistant" and isinstance(reasoning, str) and isinstance(content, str):
            if THINK_OPEN not in content:
                content = f"{THINK_OPEN}{reasoning}{THINK_CLOSE}{content}"
            left_out = ("reasoning_content", "reasoning")
            message = {**{key: value for key, value in message.items() if key not in left_out}, "content": content}
        restored.append(message)
    return restored


def conversation_keys(messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None) -> list[Hashable]:
    """One key per prefix of the conversation: entry k stands for the first k + 1 messages.

    Keys do not see white space round a text: callers often strip replies before they send them back.
    """
    key: int = hash(json.dumps(list(tools), sort_keys=True, default=str)) if tools else 0
    keys: list[Hashable] = []
    for message in messages:
        key = hash((key, *_identity(message)))
        keys.append(key)
    return keys


def _identity(message: dict[str, Any]) -> tuple[Hashable, ...]:
    content = message.get("content")
    if isinstance(content, list):
        text = (
            "".join(_text_of(part) for part in content)
            if all(_is_text_part(part) for part in content)
            else json.dumps(content, sort_keys=True, default=str)
        )
    else:
        text = content if isinstance(content, str) else ""
    calls = tuple(_call_identity(call) for call in message.get("tool_calls") or ())
    return str(message.get("role")), text.strip(), calls


def _call_identity(call: Any) -> tuple[str, str]:
    plain = call if isinstance(call, dict) else call.model_dump()
    function = plain.get("function") or {}
    arguments = function.get("arguments")
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        value = arguments
    return str(function.get("name")), json.dumps(value, sort_keys=True, default=str)


_turn_ends: dict[tuple[int, int], tuple[Any, str | None]] = {}


def turn_end_of(tokenizer: Any) -> str | None:
    """What the tokenizer's template writes after an assistant's reply, e.g. ``"<|im_end|>\\n"``; None when it cannot be told.

    Found out once per tokenizer and template.
    """
    key = (id(tokenizer), hash(str(getattr(tokenizer, "chat_template", None))))
    known = _turn_ends.get(key)
    if known is not None and known[0] is tokenizer:
        return known[1]
    if len(_turn_ends) > 64:
        _turn_ends.clear()
    _turn_ends[key] = (tokenizer, _probe_turn_end(tokenizer))
    return _turn_ends[key][1]


def _probe_turn_end(tokenizer: Any) -> str | None:
    probe = [{"role": "user", "content": "Probe question"}, {"role": "assistant", "content": PROBE_REPLY}]
    try:
        finished = render_chat(tokenizer, probe, add_generation_prompt=False)
    except Exception as error:  # boundary: templates are user-supplied programs and may raise anything
        logger.debug("the chat template could not be probed: %s", error)
        return None
    _, found, end = finished.rpartition(PROBE_REPLY)
    return end if found else None
