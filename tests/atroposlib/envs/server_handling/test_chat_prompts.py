"""Rendering messages, and what templates do to earlier turns."""

from __future__ import annotations

from typing import Any

from atroposlib.envs.server_handling.chat_prompts import (
    conversation_keys,
    render_chat,
    turn_end_of,
    with_reasoning_in_content,
)

USER, REPLY, MORE = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("user", "r"))
)
DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_end_of_a_turn_changes_with_the_template(tiny_tokenizer: Any) -> None:
    assert turn_end_of(tiny_tokenizer) == "<|im_end|>\n"
    tiny_tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    assert turn_end_of(tiny_tokenizer) == "</s>"
    tiny_tokenizer.chat_template = "{{ messages[0].content }}"
    assert turn_end_of(tiny_tokenizer) is None
    tiny_tokenizer.chat_template = "{{ raise_exception('never') }}"
    assert turn_end_of(tiny_tokenizer) is None


def test_think_blocks_survive_templating(tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = DROPS_THINKING
    messages = [USER, {"role": "assistant", "content": "<think>why</think>a"}, MORE]
    assert "<think>why</think>a" in render_chat(tiny_tokenizer, messages, add_generation_prompt=True)
    assert "why" not in render_chat(tiny_tokenizer, messages, add_generation_prompt=True, keep_thinking=False)


def test_without_a_template_there_are_lines(tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = None
    assert render_chat(tiny_tokenizer, [USER, REPLY], add_generation_prompt=True) == "user: q\nassistant: a"


def test_text_parts_are_joined_and_arguments_are_objects(tiny_tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "q"}, {"type": "text", "text": "!"}]
    shown = render_chat(tiny_tokenizer, [{"role": "user", "content": parts}], add_generation_prompt=False)
    assert shown == "<|im_start|>user\nq!<|im_end|>\n"
    tiny_tokenizer.chat_template = (
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert (
        render_chat(tiny_tokenizer, [{"role": "assistant", "tool_calls": [call]}], add_generation_prompt=False)
        == '{"a": 1}'
    )


def test_keys_of_conversations() -> None:
    base = conversation_keys([USER, REPLY, MORE], None)
    assert len(set(base)) == 3
    assert conversation_keys([USER, {"role": "assistant", "content": " a\n"}], None) == base[:2]
    assert conversation_keys([{"role": "user", "content": [{"type": "text", "text": "q"}]}], None) == base[:1]
    assert conversation_keys([USER, {"role": "assistant", "content": "b"}], None)[1] != base[1]
    assert conversation_keys([USER], [{"function": {"name": "f"}}]) != base[:1]
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a":1}'}}
    same = {"id": "2", "function": {"name": "f", "arguments": '{"a": 1}'}}
    one, two = (
        {"role": "assistant", "content": content, "tool_calls": [c]} for content, c in ((None, call), ("", same))
    )
    assert conversation_keys([one], None) == conversation_keys([two], None)


def test_reasoning_in_its_own_field_is_put_back() -> None:
    restored = with_reasoning_in_content([USER, {"role": "assistant", "content": "a", "reasoning_content": "why"}])
    assert restored == [USER, {"role": "assistant", "content": "<think>why</think>a"}]
