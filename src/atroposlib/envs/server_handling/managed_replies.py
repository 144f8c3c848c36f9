"""OpenAI reply objects of a managed session, with tool calls as dicts."""

from __future__ import annotations

import time
import uuid
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

OPENAI_FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})


def finish_reason_text(reason: Any) -> str:
    """The finish reason as one word; servers send a word, a mapping with ``type``, or nothing."""
    if isinstance(reason, dict):
        reason = reason.get("type")
    return str(reason) if reason else "stop"


@cache
def _reply_types() -> tuple[Any, Any]:
    # Tool calls stay dicts, as callers index them; the types would warn about that on every dump.
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.chat.chat_completion_message import ChatCompletionMessage

    class ManagedMessage(ChatCompletionMessage):
        def model_dump(self, **kwargs: Any) -> dict[str, Any]:
            return super().model_dump(**{"warnings": False, **kwargs})

    class ManagedChatCompletion(ChatCompletion):
        def model_dump(self, **kwargs: Any) -> dict[str, Any]:
            return super().model_dump(**{"warnings": False, **kwargs})

        def model_dump_json(self, **kwargs: Any) -> str:
            return super().model_dump_json(**{"warnings": False, **kwargs})

    return ManagedChatCompletion, ManagedMessage


def chat_reply(
    model: str, messages: list[dict[str, Any]], finish_reasons: list[str], num_prompt_tokens: int, num_sampled: int
) -> ChatCompletion:
    """A ``ChatCompletion`` of these assistant messages."""
    from openai.types.chat.chat_completion import Choice

    completion_type, message_type = _reply_types()
    choices = []
    for index, (fields, reason) in enumerate(zip(messages, finish_reasons, strict=True)):
        message = message_type(role="assistant", content=fields.get("content"))
        if fields.get("tool_calls"):
            message.tool_calls = fields["tool_calls"]
        known: Any = reason if reason in OPENAI_FINISH_REASONS else "stop"
        choices.append(Choice(index=index, finish_reason=known, message=message, logprobs=None))
    return completion_type(  # type: ignore[no-any-return]
        id=str(uuid.uuid4()),
        object="chat.completion",
        created=int(time.time()),
        model=model,
        choices=choices,
        usage=_usage(num_prompt_tokens, num_sampled),
    )


def completion_reply(
    model: str, texts: list[str], finish_reasons: list[str], num_prompt_tokens: int, num_sampled: int
) -> Completion:
    """A ``Completion`` of these texts."""
    from openai.types.completion import Completion
    from openai.types.completion_choice import CompletionChoice

    choices = []
    for index, (text, reason) in enumerate(zip(texts, finish_reasons, strict=True)):
        known: Any = "length" if reason == "length" else "stop"
        choices.append(CompletionChoice(index=index, finish_reason=known, text=text, logprobs=None))
    return Completion(
        id=str(uuid.uuid4()),
        object="text_completion",
        created=int(time.time()),
        model=model,
        choices=choices,
        usage=_usage(num_prompt_tokens, num_sampled),
    )


def _usage(num_prompt_tokens: int, num_sampled: int) -> Any:
    from openai.types.completion_usage import CompletionUsage

    return CompletionUsage(
        prompt_tokens=num_prompt_tokens, completion_tokens=num_sampled, total_tokens=num_prompt_tokens + num_sampled
    )


def managed_chat_from(data: dict[str, Any]) -> ChatCompletion:
    """The ``ChatCompletion`` of a proxy's reply, in the shape a local session gives."""
    from openai.types.completion_usage import CompletionUsage

    reply = chat_reply(
        data["model"],
        [choice["message"] for choice in data["choices"]],
        [choice["finish_reason"] for choice in data["choices"]],
        0,
        0,
    )
    reply.id = data["id"]
    reply.usage = CompletionUsage(**data["usage"]) if data.get("usage") else None
    return reply
