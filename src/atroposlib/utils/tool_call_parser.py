"""Find one tool call in a model's text and read it."""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

PARSE_ERROR = "-ERROR-"


def extract_tool_call(text: str, preferred_tags: Sequence[str] | None = None) -> str | None:
    """What stands between the first pair of tags (default ``tool_call``), stripped; None when there is none.

    The tags are tried in order: an earlier name wins over an earlier place in the text.
    """
    for tag in preferred_tags or ("tool_call",):
        name = re.escape(tag)
        if found := re.search(f"<{name}>(.*?)</{name}>", text, flags=re.DOTALL):
            return found.group(1).strip()
    return None


def parse_tool_call(
    response: str,
    available_tools: Sequence[Mapping[str, Any]] | None = None,
    preferred_tags: Sequence[str] | None = None,
) -> tuple[str, dict[str, Any], bool]:
    """Read the first tool call of ``response`` as ``(name, arguments, is_error)``.

    JSON first, else a Python literal (single-quoted keys), so apostrophes inside values stay what they are.
    No call, unreadable text, no name, or a name that ``available_tools`` lacks: ``("-ERROR-", arguments, True)``.

    Example: ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`` gives ``("add", {"a": 1}, False)``.
    """
    content = extract_tool_call(response, preferred_tags)
    call = _read_mapping(content) if content else None
    if call is None:
        logger.debug("no readable tool call in %.200r", response)
        return PARSE_ERROR, {}, True
    name, arguments = call.get("name", ""), call.get("arguments", {})
    if isinstance(arguments, str):  # some models double-encode the arguments
        arguments = _read_mapping(arguments)
    if not isinstance(arguments, dict) or not isinstance(name, str):
        return PARSE_ERROR, {}, True
    if available_tools and name not in {_tool_name(tool) for tool in available_tools}:
        return PARSE_ERROR, arguments, True
    return name, arguments, False


def _read_mapping(text: str) -> dict[str, Any] | None:
    for read in (_read_json, ast.literal_eval):
        try:
            value = read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        return value if isinstance(value, dict) else None
    return None


def _read_json(text: str) -> Any:
    return json.loads(text, strict=False)


def _tool_name(tool: Mapping[str, Any]) -> Any:
    if not isinstance(tool, Mapping):
        return None
    function = tool.get("function")
    return tool["name"] if "name" in tool else function.get("name") if isinstance(function, Mapping) else None
