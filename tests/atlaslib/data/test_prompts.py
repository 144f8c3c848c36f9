"""Prompts and their order."""

from __future__ import annotations

from typing import Any

import pytest

from atlaslib.data.prompts import PromptEncoder, PromptOrder, derive_seed
from atlaslib.errors import ConfigError


def test_text_is_cut_on_the_left(tiny_tokenizer: Any) -> None:
    whole = tiny_tokenizer("hello world")["input_ids"]
    prompt = PromptEncoder(tiny_tokenizer, max_length=4).encode({"prompt": "hello world"})
    assert prompt.token_ids == whole[-4:]
    assert PromptEncoder(tiny_tokenizer, max_length=None).encode({"prompt": "hello world"}).token_ids == whole


def test_chat_gets_the_generation_prompt(tiny_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompt = PromptEncoder(tiny_tokenizer, max_length=None).encode({"prompt": messages})
    text = tiny_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt.text == text
    assert prompt.token_ids == tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert prompt.is_chat


def test_a_final_assistant_turn_is_continued_and_the_row_left_alone(tiny_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    row = {"prompt": messages}
    prompt = PromptEncoder(tiny_tokenizer, max_length=None).encode(row)
    assert prompt.text.endswith("well")
    assert prompt.assistant_prefix == "well"
    assert len(messages) == 2


@pytest.mark.parametrize("row", [{"question": "x"}, {"prompt": 3}, {"prompt": ""}])
def test_bad_rows_are_named(row: dict[str, Any], tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="prompt"):
        PromptEncoder(tiny_tokenizer, max_length=None).encode(row)


def test_every_row_once_per_epoch_and_other_orders_later() -> None:
    order = PromptOrder(num_rows=10, prompts_per_round=3, seed=1)
    assert order.rounds_per_epoch == 3
    first = [row for index in range(3) for row in order.rows(index)]
    assert len(set(first)) == 9
    assert [row for index in range(3, 6) for row in order.rows(index)] != first
    assert order.rows(0) == PromptOrder(num_rows=10, prompts_per_round=3, seed=1).rows(0)
    assert order.rows(0) != PromptOrder(num_rows=10, prompts_per_round=3, seed=2).rows(0)


def test_artificial_epochs_chain_permutations() -> None:
    order = PromptOrder(num_rows=5, prompts_per_round=2, seed=0, artificial_epochs=3)
    assert order.rounds_per_epoch == 7
    used = [row for index in range(7) for row in order.rows(index)]
    assert sorted(used[:5]) == list(range(5))
    assert sorted(used[5:10]) == list(range(5))


def test_a_small_data_set_fills_a_round() -> None:
    order = PromptOrder(num_rows=2, prompts_per_round=5, seed=0)
    assert order.rounds_per_epoch == 1
    assert sorted(set(order.rows(0))) == [0, 1]
    assert len(order.rows(0)) == 5


def test_an_empty_data_set_is_an_error() -> None:
    with pytest.raises(ConfigError, match="empty"):
        PromptOrder(num_rows=0, prompts_per_round=1, seed=0)


def test_seeds_differ_and_repeat() -> None:
    seeds = {derive_seed(42, step, row) for step in range(50) for row in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2) == derive_seed(1, 2) != derive_seed(2, 1)
