"""Chats become plain ids with the right masks, under every container transformers may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atroposlib.utils import tokenize_for_trainer as tokenize_module
from atroposlib.utils.tokenize_for_trainer import plain_ids, tokenize_for_trainer, tokenize_for_trainer_dpo

CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


def trained_text(tokenizer: Any, result: dict[str, Any]) -> str:
    return str(
        tokenizer.decode([token for token, mask in zip(result["tokens"], result["masks"], strict=True) if mask != -100])
    )


def test_last_turn_only(tiny_tokenizer: Any) -> None:
    result = tokenize_for_trainer(tiny_tokenizer, CHAT)
    assert type(result["tokens"]) is list
    assert all(type(token) is int for token in result["tokens"])
    assert tiny_tokenizer.decode(result["tokens"]) == tiny_tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert trained_text(tiny_tokenizer, result) == "yes<|im_end|>\n"
    assert "messages" not in result


def test_all_assistant_turns(tiny_tokenizer: Any) -> None:
    result = tokenize_for_trainer(tiny_tokenizer, CHAT, include_messages=True, train_on_all_assistant_turns=True)
    assert trained_text(tiny_tokenizer, result) == "2<|im_end|>\nyes<|im_end|>\n"
    assert result["messages"] is CHAT


def test_agent_role_counts_as_the_model(tiny_tokenizer: Any) -> None:
    chat = [{"role": "environment", "content": "go"}, {"role": "agent", "content": "left"}]
    result = tokenize_for_trainer(tiny_tokenizer, chat, train_on_all_assistant_turns=True)
    # the generation prompt says "assistant", the turn says "agent": what both share is prompt
    assert trained_text(tiny_tokenizer, result).endswith("left<|im_end|>\n")


class EosTokenizer:
    """A template that ends in the end-of-sequence token, as Llama's do."""

    eos_token_id = 9

    def apply_chat_template(
        self, chat: list[dict[str, str]], tokenize: bool, return_dict: bool, add_generation_prompt: bool
    ) -> Any:
        ids = [token for message in chat for token in (1, *map(int, message["content"].split()), 9)]
        return {"input_ids": [*ids, 1] if add_generation_prompt else ids}  # a mapping although a list was asked for


def test_length_drops_the_end_token_nobody_sampled() -> None:
    chat = [{"role": "user", "content": "5"}, {"role": "assistant", "content": "6 7"}]
    assert tokenize_for_trainer(EosTokenizer(), chat) == {
        "tokens": [1, 5, 9, 1, 6, 7, 9],
        "masks": [-100] * 4 + [6, 7, 9],
    }
    assert tokenize_for_trainer(EosTokenizer(), chat, finish_reason="length") == {
        "tokens": [1, 5, 9, 1, 6, 7],
        "masks": [-100] * 4 + [6, 7],
    }


def test_a_template_that_rewrites_the_past_trains_only_the_model_and_is_named_once(
    tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize_module, "_said_not_append_only", False)
    tiny_tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:<think>{% endif %}"
    )
    for _ in range(2):
        result = tokenize_for_trainer(
            tiny_tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        )
        assert trained_text(tiny_tokenizer, result) == "b;"
    assert caplog.text.count("not append-only") == 1


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), [[1, 2]], np.array([1, 2]), np.array([[1, 2]]), {"input_ids": [1, 2]}])
def test_plain_ids(ids: Any) -> None:
    assert plain_ids(ids) == [1, 2]


def test_dpo_pair_of_chats(tiny_tokenizer: Any) -> None:
    good, bad = CHAT, [*CHAT[:-1], {"role": "assistant", "content": "no idea"}]
    pair = tokenize_for_trainer_dpo(tiny_tokenizer, good, bad)
    assert pair["chosen_tokens"] == tokenize_for_trainer(tiny_tokenizer, good)["tokens"]
    assert pair["rejected_masks"] == tokenize_for_trainer(tiny_tokenizer, bad)["masks"]
    assert tiny_tokenizer.decode(pair["prompt_tokens"]) == tiny_tokenizer.apply_chat_template(
        CHAT[:-1], tokenize=False, add_generation_prompt=True
    )


def test_dpo_mapping_of_texts_with_a_limit(tiny_tokenizer: Any) -> None:
    pair = tokenize_for_trainer_dpo(
        tiny_tokenizer, {"prompt": "hi", "chosen": "good", "rejected": "x" * 200}, max_length=60
    )
    assert len(pair["rejected_input_ids"]) == 60 == len(pair["rejected_attention_mask"])
    assert pair["chosen_labels"] == pair["chosen_masks"]
    with pytest.raises(ValueError, match="rejected"):
        tokenize_for_trainer_dpo(tiny_tokenizer, CHAT)
