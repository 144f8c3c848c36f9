"""Every way of writing tool calls: read, refuse what is malformed, write back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atroposlib.envs.server_handling.tool_call_translator import ToolCallTranslator
from atroposlib.envs.server_handling.tool_formats import ALIASES, FORMATS, CallText, tool_format
from atroposlib.errors import ConfigError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {"properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}},
        },
    }
]
SEARCH = ("search", {"query": "cats", "limit": 3})
CLOCK = ("clock.now", {})

EXAMPLES = {
    "hermes": [
        ('<tool_call>{"name": "search", "arguments": {"query": "cats", "limit": 3}}</tool_call>', None, [SEARCH]),
        (
            'Let me look.\n<tool_call>\n{"name": "search", "arguments": {"query": "cats", "limit": 3}}\n</tool_call>\n'
            '<tool_call>{"name": "clock.now"}</tool_call>',
            "Let me look.\n",
            [SEARCH, CLOCK],
        ),
        ('<tool_call>{"name": "clock.now", "arguments": {}}', None, [CLOCK]),
        (
            '<think>maybe <tool_call>{"name": "no"}</tool_call></think>\n<tool_call>{"name": "clock.now"}</tool_call>',
            '<think>maybe <tool_call>{"name": "no"}</tool_call></think>\n',
            [CLOCK],
        ),
    ],
    "llama3_json": [
        ('{"name": "search", "parameters": {"query": "cats", "limit": 3}}', None, [SEARCH]),
        (
            '<|python_tag|>{"name": "clock.now", "parameters": {}}; {"name": "clock.now", "arguments": {}}',
            None,
            [CLOCK, CLOCK],
        ),
        ('Sure.<|python_tag|>{"name": "clock.now", "parameters": {}}', "Sure.", [CLOCK]),
    ],
    "mistral": [
        ('[TOOL_CALLS][{"name": "search", "arguments": {"query": "cats", "limit": 3}}]', None, [SEARCH]),
        ('Ok [TOOL_CALLS] [{"name": "clock.now", "arguments": {}}]', "Ok ", [CLOCK]),
        ('[TOOL_CALLS]search{"query": "cats", "limit": 3}[TOOL_CALLS]clock.now[ARGS]{}', None, [SEARCH, CLOCK]),
    ],
    "pythonic": [
        ('[search(query="cats", limit=3)]', None, [SEARCH]),
        ("<|python_start|>[clock.now(), search(limit=3, query='cats')]<|python_end|>", None, [CLOCK, SEARCH]),
        ("I will call [clock.now()]", "I will call ", [CLOCK]),
    ],
    "qwen3_coder": [
        (
            "<tool_call>\n<function=search>\n<parameter=query>\ncats\n</parameter>\n<parameter=limit>\n3\n</parameter>\n"
            "</function>\n</tool_call>",
            None,
            [SEARCH],
        ),
        ("Now:\n<tool_call>\n<function=clock.now>\n</function>\n</tool_call>", "Now:\n", [CLOCK]),
    ],
}
MALFORMED = {
    "hermes": [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>[1]</tool_call>",
    ],
    "llama3_json": ['{"name": "search", "parameters": ', '{"answer": 3}', "[1, 2]", "just text"],
    "mistral": ["[TOOL_CALLS] oops", "[TOOL_CALLS]", "no marker"],
    "pythonic": ["[search(cats)]", "[1, 2, 3]", "[search(query=open('x'))]", "see [1]", "[search(query=", "[]"],
    "qwen3_coder": ["<tool_call></tool_call>", "plain"],
}


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [(name, *example) for name, examples in EXAMPLES.items() for example in examples],
)
def test_calls_are_read(name: str, text: str, content: str | None, calls: list[tuple[str, dict[str, Any]]]) -> None:
    shown, parsed = tool_format(name).parse(text, TOOLS)
    assert [(call.name, call.arguments) for call in parsed] == calls
    assert shown == content


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
def test_malformed_calls_stay_text(name: str, text: str) -> None:
    assert tool_format(name).parse(text, TOOLS) == (text, [])


@pytest.mark.parametrize("name", list(FORMATS))
def test_written_calls_are_read_again(name: str) -> None:
    calls = [CallText(name="search", arguments={"query": 'a "b"', "limit": 3}), CallText(name="now")]
    _, parsed = tool_format(name).parse(tool_format(name).render(calls), TOOLS)
    assert parsed == calls


def test_names_known_from_vllm_work_and_others_are_refused() -> None:
    assert all(tool_format(alias) is FORMATS[name] for alias, name in ALIASES.items())
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        tool_format("hermess")


# -- the translator -------------------------------------------------------------------------------------------------

RAW = 'Searching.\n<tool_call>{"name": "search", "arguments": {"query":"cats"}}</tool_call>'


@pytest.fixture
def translator(tiny_tokenizer: Any) -> ToolCallTranslator:
    return ToolCallTranslator(tiny_tokenizer)


def test_calls_become_objects(translator: ToolCallTranslator) -> None:
    content, calls, reason = translator.parse_model_output(RAW, tool_choice="auto", tools=TOOLS)
    assert (content, reason) == ("Searching.\n", "tool_calls")
    assert calls is not None
    assert calls[0].function.name == "search"
    assert json.loads(calls[0].function.arguments) == {"query": "cats"}
    assert calls[0].model_dump() == {
        "id": calls[0].id,
        "type": "function",
        "function": {"name": "search", "arguments": '{"query": "cats"}'},
    }
    assert translator.call_id_to_raw_text == {calls[0].id: RAW}


@pytest.mark.parametrize(("choice", "tools"), [("none", TOOLS), ("auto", None), ("auto", [])])
def test_without_tools_text_is_text(translator: ToolCallTranslator, choice: str, tools: Any) -> None:
    assert translator.parse_model_output(RAW, tool_choice=choice, tools=tools) == (RAW, None, "stop")


def test_unchanged_calls_come_back_as_the_models_own_text(translator: ToolCallTranslator) -> None:
    _, calls, _ = translator.parse_model_output(RAW, tools=TOOLS)
    assert calls is not None
    given = [call.model_dump() for call in calls]
    assert translator.reconstruct_raw_text_from_tool_calls(given) == RAW
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Searching.\n", "tool_calls": given}]
    converted = translator.convert_messages_for_template(messages)
    assert converted == [messages[0], {"role": "assistant", "content": RAW}]
    given[0]["function"]["arguments"] = '{"query": "dogs"}'
    assert "dogs" in translator.reconstruct_raw_text_from_tool_calls(given)


def test_calls_of_others_are_written_in_the_format(translator: ToolCallTranslator) -> None:
    foreign = [{"id": "x", "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}} for name in "fg"]
    assert translator.reconstruct_raw_text_from_tool_calls(foreign) == (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>'
    )
    message = {"role": "assistant", "content": "Hm.", "tool_calls": foreign[:1]}
    converted = translator.convert_messages_for_template([message])[0]
    assert converted["content"] == 'Hm.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert "tool_calls" not in converted
    assert translator.reconstruct_raw_text_from_tool_calls([]) == ""


def test_control_tokens_stay_with_tools(translator: ToolCallTranslator) -> None:
    ids = translator.tokenizer.encode("hi<|im_end|>")
    assert translator.decode_with_tool_awareness(ids) == "hi"
    assert translator.decode_with_tool_awareness(ids, has_tools=True) == "hi<|im_end|>"


def test_mistral_ids_have_nine_characters(tiny_tokenizer: Any) -> None:
    translator = ToolCallTranslator(tiny_tokenizer, "mistral")
    _, calls, _ = translator.parse_model_output("[TOOL_CALLS]search{}", tools=TOOLS)
    assert calls is not None
    assert len(calls[0].id) == 9
    assert calls[0].id.isalnum()
