"""The repaired Qwen template appends only: every prefix of a conversation renders to a prefix of its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from atroposlib.utils.tokenizers.qwen_fixed_tokenizer import QwenFixedTokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
    {
        "role": "assistant",
        "content": "<think>\neasy\n</think>\n\n",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "2"},
    {"role": "tool", "content": "two"},
    {"role": "assistant", "content": "<think>\nok\n</think>\n\n2"},
]


@pytest.fixture
def tokenizer(tiny_tokenizer_dir: Path) -> QwenFixedTokenizer:
    return QwenFixedTokenizer(str(tiny_tokenizer_dir))


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_append_only(tokenizer: QwenFixedTokenizer, tools: list[dict[str, object]] | None) -> None:
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False, tools=tools)
    for length in (2, 3, 5, 6):  # not between the two tool answers: those share one turn
        assert whole.startswith(tokenizer.apply_chat_template(CHAT[:length], tokenize=False, tools=tools))
    assert whole.startswith(
        tokenizer.apply_chat_template(CHAT[:2], tokenize=False, tools=tools, add_generation_prompt=True)
    )
    assert "<think>\neasy\n</think>" in whole
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in whole


def test_exact_text_and_plain_ids(tokenizer: QwenFixedTokenizer) -> None:
    chat = [{"role": "user", "content": "hi"}]
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == expected
    ids = tokenizer.apply_chat_template(chat, tokenize=True, add_generation_prompt=True)
    assert type(ids) is list
    assert tokenizer.decode(ids) == expected
    assert tokenizer("a")["input_ids"] == tokenizer.encode("a")
    assert len(tokenizer) == len(tokenizer.tokenizer)


def test_thinking_can_be_switched_off(tokenizer: QwenFixedTokenizer) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert text.endswith("assistant\n<think>\n\n</think>\n\n")
