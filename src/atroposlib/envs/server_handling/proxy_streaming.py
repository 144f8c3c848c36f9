"""A finished chat completion as the chunks of a streamed one (server-sent events)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

CONTENT_PIECE_CHARS = 24


def completion_chunks(reply: dict[str, Any], include_usage: bool = False) -> Iterator[dict[str, Any]]:
    """The chunks of a reply: role, content in pieces, tool calls, finish reason, and the usage when asked for."""
    head = {key: reply[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    if "policy_versions" in reply:
        head["policy_versions"] = reply["policy_versions"]

    def chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason, **more}
        return {**head, "choices": [choice]}

    for choice in reply["choices"]:
        index, message = choice["index"], choice["message"]
        yield chunk(index, {"role": "assistant", "content": ""})
        text = message.get("content") or ""
        for start in range(0, len(text), CONTENT_PIECE_CHARS):
            yield chunk(index, {"content": text[start : start + CONTENT_PIECE_CHARS]})
        for number, call in enumerate(message.get("tool_calls") or []):
            yield chunk(index, {"tool_calls": [{"index": number, **call}]})
        details = {key: choice[key] for key in ("logprobs", "token_ids") if choice.get(key) is not None}
        yield chunk(index, {}, choice["finish_reason"], **details)
    if include_usage:
        yield {**head, "choices": [], "usage": reply.get("usage")}


def event_lines(reply: dict[str, Any], include_usage: bool = False) -> Iterator[str]:
    """The chunks as server-sent events, ended by ``[DONE]``."""
    for chunk in completion_chunks(reply, include_usage):
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"
