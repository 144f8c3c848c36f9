"""``ToolCallTranslator``: tool calls as text (what the model writes) and as objects (what the OpenAI API carries).

The text a model wrote is remembered by call id, so when a caller sends the call back as an object the prompt contains
exactly that text again. Nothing here needs vLLM.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import uuid
from dataclasses import asdict, dataclass
from typing import Any

from atroposlib.envs.server_handling.tool_formats import CallText, tool_format

logger = logging.getLogger(__name__)

VLLM_AVAILABLE = importlib.util.find_spec("vllm") is not None
"""Whether vLLM is installed; tool calls are parsed either way."""


@dataclass(kw_only=True, slots=True)
class FunctionCall:
    """Name and JSON text of the arguments."""

    name: str
    arguments: str


@dataclass(kw_only=True, slots=True)
class ToolCall:
    """A tool call as the OpenAI API carries it."""

    id: str
    function: FunctionCall
    type: str = "function"

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """As a plain dict: id, type, function."""
        return {"id": self.id, "type": self.type, "function": asdict(self.function)}


class ToolCallTranslator:
    """Turns completions into tool calls and tool calls back into the text of the prompt.

    Example: ``ToolCallTranslator(tokenizer).parse_model_output(text, tools=tools)``
    """

    def __init__(self, tokenizer: Any, parser_name: str = "hermes") -> None:
        self.tokenizer = tokenizer
        self.parser_name = parser_name
        self.parser = tool_format(parser_name)
        self.call_id_to_raw_text: dict[str, str] = {}
        self._calls_of_id: dict[str, list[tuple[str, str]]] = {}

    def parse_model_output(
        self, raw_text: str, tool_choice: Any = None, tools: list[Any] | None = None
    ) -> tuple[str | None, list[ToolCall] | None, str]:
        """Content, tool calls (None when there are none) and finish reason of a completion."""
        if tool_choice == "none" or not tools:
            return raw_text, None, "stop"
        content, parsed = self.parser.parse(raw_text, tools)
        if not parsed:
            return raw_text, None, "stop"
        calls = [
            ToolCall(id=self._new_id(), function=FunctionCall(name=call.name, arguments=call.arguments_json()))
            for call in parsed
        ]
        signature = [_signature(call.function.name, call.function.arguments) for call in calls]
        for call in calls:
            self.call_id_to_raw_text[call.id] = raw_text
            self._calls_of_id[call.id] = signature
        return content, calls, "tool_calls"

    def _new_id(self) -> str:
        # Mistral's chat templates accept ids of exactly nine letters and digits.
        return uuid.uuid4().hex[:9] if self.parser_name == "mistral" else f"call_{uuid.uuid4().hex[:24]}"

    def reconstruct_raw_text_from_tool_calls(self, tool_calls: list[Any]) -> str:
        """The text of these calls: the model's own when they are its unchanged calls, else written in the format."""
        return self._raw_text(tool_calls)[0]

    def _raw_text(self, tool_calls: list[Any]) -> tuple[str, bool]:
        if not tool_calls:
            return "", False
        calls = [_as_dict(call) for call in tool_calls]
        first_id = calls[0].get("id") or ""
        given = [_signature(call["function"]["name"], call["function"].get("arguments")) for call in calls]
        if first_id in self.call_id_to_raw_text and self._calls_of_id[first_id] == given:
            return self.call_id_to_raw_text[first_id], True
        texts = [
            CallText(name=call["function"]["name"], arguments=call["function"].get("arguments") or {}) for call in calls
        ]
        return self.parser.render(texts), False

    def convert_messages_for_template(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with every assistant's tool calls written out as text; all others are passed on unchanged."""
        return [self._as_text(message) for message in messages]

    def _as_text(self, message: dict[str, Any]) -> dict[str, Any]:
        if message.get("role") != "assistant" or not message.get("tool_calls"):
            return message
        text, is_exact = self._raw_text(message["tool_calls"])
        content = message.get("content")
        if not is_exact and isinstance(content, str) and content:
            text = f"{content}\n{text}"
        return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}

    def decode_with_tool_awareness(self, token_ids: list[int], has_tools: bool = False) -> str:
        """Decode ids; with tools the control tokens stay, because some formats use them as markers."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=not has_tools))


def _as_dict(call: Any) -> dict[str, Any]:
    value: dict[str, Any] = call if isinstance(call, dict) else call.model_dump()
    return value


def _signature(name: str, arguments: Any) -> tuple[str, str]:
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        value = arguments
    return name, json.dumps(value, sort_keys=True)
