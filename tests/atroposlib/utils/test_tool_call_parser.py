"""Tool calls: apostrophes survive, single-quoted calls still parse, unknown tools are errors."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.utils.tool_call_parser import extract_tool_call, parse_tool_call

TOOLS = [{"name": "search"}, {"type": "function", "function": {"name": "add"}}]


def call(body: str) -> str:
    return f"Let me see.<tool_call>\n{body}\n</tool_call> done"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            '{"name": "search", "arguments": {"q": "what\'s it\'s price"}}',
            ("search", {"q": "what's it's price"}, False),
        ),
        ("{'name': 'search', 'arguments': {'q': 'today'}}", ("search", {"q": "today"}, False)),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', ("add", {"a": 1}, False)),
        ('{"name": "add"}', ("add", {}, False)),
        ('{"name": "rm", "arguments": {"a": 1}}', ("-ERROR-", {"a": 1}, True)),
        ('{"arguments": {"a": 1}}', ("-ERROR-", {"a": 1}, True)),
        ('{"name": "add", "arguments": [1]}', ("-ERROR-", {}, True)),
        ('{"name": ', ("-ERROR-", {}, True)),
        ("[1, 2]", ("-ERROR-", {}, True)),
    ],
)
def test_parse(body: str, expected: tuple[str, dict[str, Any], bool]) -> None:
    assert parse_tool_call(call(body), TOOLS) == expected


def test_no_call() -> None:
    assert parse_tool_call("just text") == ("-ERROR-", {}, True)


def test_extract_first_match_and_preferred_tags() -> None:
    text = "<tool_call> a </tool_call><tool_call>b</tool_call><call>c</call>"
    assert extract_tool_call(text) == "a"
    assert extract_tool_call(text, ["call", "tool_call"]) == "c"
    assert extract_tool_call("none") is None
