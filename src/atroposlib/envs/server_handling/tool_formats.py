"""How models write tool calls as text: each format reads them from a completion and writes them back.

hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>
llama3_json   {"name": "f", "parameters": {...}}; {...}
mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}]   or   [TOOL_CALLS]f{...}
pythonic      [f(x=1), g(y="a")]
qwen3_coder   <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from atroposlib.errors import ConfigError, unknown_name_message


@dataclass(kw_only=True, slots=True)
class CallText:
    """One tool call: the function's name and its arguments (an object, or the text the model wrote)."""

    name: str
    arguments: Any = field(default_factory=dict)

    def arguments_json(self) -> str:
        """The arguments as the OpenAI API carries them: JSON text."""
        if isinstance(self.arguments, str):
            return self.arguments
        return json.dumps(self.arguments, ensure_ascii=False)


Parsed = tuple[str | None, list[CallText]]
"""Text outside the calls (None when empty), and the calls; no calls means the text is plain text."""


class ToolFormat(Protocol):
    """Reads and writes one way of writing tool calls."""

    def parse(self, text: str, tools: Sequence[Any] = ()) -> Parsed:
        """Split a completion into content and calls; malformed calls leave the text as it is."""

    def render(self, calls: Sequence[CallText]) -> str:
        """The text a model would have written for these calls."""


def _call(value: Any) -> CallText:
    name = value["name"]
    if not isinstance(name, str) or not name:
        raise ValueError("a tool call without a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    return CallText(name=name, arguments={} if arguments is None else arguments)


def _content(text: str) -> str | None:
    return text if text.strip() else None


def _after_thinking(text: str) -> int:
    # Calls a model only thinks about are not made.
    end = text.rfind("</think>")
    return 0 if end < 0 else end + len("</think>")


class HermesFormat:
    """JSON in ``<tool_call>`` tags; a last tag may be left open."""

    _block = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

    def parse(self, text: str, tools: Sequence[Any] = ()) -> Parsed:
        """See ``ToolFormat``."""
        start = text.find("<tool_call>", _after_thinking(text))
        if start < 0:
            return text, []
        try:
            calls = [_call(json.loads(block.strip())) for block in self._block.findall(text[start:])]
        except (ValueError, KeyError, TypeError, AttributeError):
            return text, []
        return _content(text[:start]), calls

    def render(self, calls: Sequence[CallText]) -> str:
        """See ``ToolFormat``."""
        return "\n".join(f"<tool_call>{_object(call, 'arguments')}</tool_call>" for call in calls)


class Llama3JsonFormat:
    """One or more JSON objects, separated by semicolons or white space, after an optional ``<|python_tag|>``."""

    _tag = "<|python_tag|>"

    def parse(self, text: str, tools: Sequence[Any] = ()) -> Parsed:
        """See ``ToolFormat``."""
        start = _after_thinking(text)
        tag = text.find(self._tag, start)
        body = text[tag + len(self._tag) :] if tag >= 0 else text[start:]
        before = text[:tag] if tag >= 0 else text[:start]
        try:
            calls = [_call(value) for value in _json_objects(body)]
        except (ValueError, KeyError, TypeError, AttributeError):
            return text, []
        return (_content(before), calls) if calls else (text, [])

    def render(self, calls: Sequence[CallText]) -> str:
        """See ``ToolFormat``."""
        return "; ".join(_object(call, "parameters") for call in calls)


class MistralFormat:
    """``[TOOL_CALLS]`` followed by a JSON list, or by name and JSON object (newer models)."""

    _marker = "[TOOL_CALLS]"
    _named = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(?:\[ARGS\])?\s*(?=\{)")

    def parse(self, text: str, tools: Sequence[Any] = ()) -> Parsed:
        """See ``ToolFormat``."""
        start = text.find(self._marker)
        if start < 0:
            return text, []
        try:
            calls = self._calls(text[start:])
        except (ValueError, KeyError, TypeError, AttributeError):
            return text, []
        return (_content(text[:start]), calls) if calls else (text, [])

    def _calls(self, text: str) -> list[CallText]:
        calls: list[CallText] = []
        for part in text.split(self._marker):
            body = part.strip()
            if not body:
                continue
            named = self._named.match(body)
            if named is None:
                values = json.JSONDecoder().raw_decode(body)[0]
                calls.extend(_call(value) for value in (values if isinstance(values, list) else [values]))
            else:
                arguments, _ = json.JSONDecoder().raw_decode(body[named.end() :])
                calls.append(CallText(name=named.group(1), arguments=arguments))
        return calls

    def render(self, calls: Sequence[CallText]) -> str:
        """See ``ToolFormat``."""
        return f"{self._marker}[{', '.join(_object(call, 'arguments') for call in calls)}]" if calls else ""


class PythonicFormat:
    """A Python list of calls with keyword arguments."""

    _wrappers = re.compile(r"<\|python_(?:start|end|tag)\|>")

    def parse(self, text: str, tools: Sequence[Any] = ()) -> Parsed:
        """See ``ToolFormat``."""
        start = _after_thinking(text)
        body = self._wrappers.sub("", text[start:]).strip()
        opening = body.find("[")
        if opening < 0:
            return text, []
        try:
            tree = ast.parse(body[opening:], mode="eval").body
            calls = [self._call(element) for element in tree.elts] if isinstance(tree, ast.List) else []
        except (SyntaxError, ValueError):
            return text, []
        return (_content(text[:start] + body[:opening]), calls) if calls else (text, [])

    @staticmethod
    def _call(node: ast.expr) -> CallText:
        if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
            raise ValueError("not a call with keyword arguments")
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        return CallText(name=ast.unparse(node.func), arguments=arguments)

    def render(self, calls: Sequence[CallText]) -> str:
        """See ``ToolFormat``."""
        return f"[{', '.join(self._one(call) for call in calls)}]" if calls else ""

    @staticmethod
    def _one(call: CallText) -> str:
        arguments = _arguments_object(call)
        return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


class Qwen3CoderFormat:
    """Tags for the function and for each parameter; values are text, read by the tool's parameter types."""

    _function = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
    _parameter = re.compile(r"<parameter=([^>\s]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)

    def parse(self, text: str, tools: Sequence[Any] = ()) -> Parsed:
        """See ``ToolFormat``."""
        after = _after_thinking(text)
        first = self._function.search(text, after)
        if first is None:
            return text, []
        tag = text.rfind("<tool_call>", after, first.start())
        types = _parameter_types(tools)
        calls = []
        for name, body in self._function.findall(text[first.start() :]):
            arguments = {
                key: self._value(value, types.get(name, {}).get(key)) for key, value in self._parameter.findall(body)
            }
            calls.append(CallText(name=name, arguments=arguments))
        return _content(text[: tag if tag >= 0 else first.start()]), calls

    @staticmethod
    def _value(text: str, kind: str | None) -> Any:
        value = text.removeprefix("\n").removesuffix("\n")
        if kind == "string":
            return value
        try:
            return json.loads(value)
        except ValueError:
            return value

    def render(self, calls: Sequence[CallText]) -> str:
        """See ``ToolFormat``."""
        return "\n".join(self._one(call) for call in calls)

    @staticmethod
    def _one(call: CallText) -> str:
        parameters = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n</parameter>\n"
            for key, value in _arguments_object(call).items()
        )
        return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


def _arguments_object(call: CallText) -> dict[str, Any]:
    value = json.loads(call.arguments) if isinstance(call.arguments, str) and call.arguments.strip() else call.arguments
    return value if isinstance(value, dict) else {}


def _object(call: CallText, arguments_key: str) -> str:
    arguments = call.arguments
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # what the model wrote is not JSON: keep its text
            arguments = json.loads(arguments)
    return json.dumps({"name": call.name, arguments_key: arguments}, ensure_ascii=False)


def _json_objects(text: str) -> list[Any]:
    decoder, values, position = json.JSONDecoder(), [], 0
    text = text.strip()
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        values.append(value)
        while position < len(text) and text[position] in "; \n\t,":
            position += 1
    return values


def _parameter_types(tools: Sequence[Any]) -> dict[str, dict[str, str]]:
    types: dict[str, dict[str, str]] = {}
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, dict) else {}
        properties = (function.get("parameters") or {}).get("properties") or {}
        types[function.get("name", "")] = {
            key: str(schema.get("type")) for key, schema in properties.items() if isinstance(schema, dict)
        }
    return types


FORMATS: dict[str, ToolFormat] = {
    "hermes": HermesFormat(),
    "llama3_json": Llama3JsonFormat(),
    "mistral": MistralFormat(),
    "pythonic": PythonicFormat(),
    "qwen3_coder": Qwen3CoderFormat(),
}
ALIASES = {
    "qwen": "hermes",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "nous": "hermes",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "llama3_2_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
}


def tool_format(name: str) -> ToolFormat:
    """The format called ``name``; the names vLLM uses for the same formats are known, too."""
    key = ALIASES.get(name, name)
    if key not in FORMATS:
        raise ConfigError(unknown_name_message("tool parser", name, [*FORMATS, *ALIASES]))
    return FORMATS[key]
