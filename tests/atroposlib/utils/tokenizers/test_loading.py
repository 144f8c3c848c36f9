"""The tokenizer environments get keeps the types they expect."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from atroposlib.errors import ConfigError
from atroposlib.utils.tokenizers.loading import load_tokenizer, with_list_chat_template

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def test_chat_templates_give_a_plain_list_of_ids(tiny_tokenizer_dir: Path):
    tokenizer = load_tokenizer(str(tiny_tokenizer_dir))
    ids = tokenizer.apply_chat_template(CHAT)
    assert type(ids) is list
    assert all(type(token) is int for token in ids)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.apply_chat_template(CHAT[:1], tokenize=True, add_generation_prompt=True) == tokenizer.encode(
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )


def test_what_is_asked_for_explicitly_is_given(tiny_tokenizer_dir: Path):
    tokenizer = load_tokenizer(str(tiny_tokenizer_dir))
    ids = tokenizer.apply_chat_template(CHAT)
    assert tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"] == ids
    array = tokenizer.apply_chat_template(CHAT, return_tensors="np")
    assert array.tolist() == [ids]
    several = tokenizer.apply_chat_template([CHAT, CHAT[:1]])
    assert several[0] == ids
    assert type(several[1]) is list


def test_copies_pickles_and_saved_folders_keep_it(tiny_tokenizer_dir: Path, tmp_path: Path):
    tokenizer = load_tokenizer(str(tiny_tokenizer_dir))
    ids = tokenizer.apply_chat_template(CHAT)
    for other in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert other is not tokenizer
        assert other.apply_chat_template(CHAT) == ids
        assert isinstance(other, PreTrainedTokenizerBase)
    tokenizer.save_pretrained(tmp_path)
    plain = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    plain.save_pretrained(tmp_path / "plain")
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (
        saved["tokenizer_class"]
        == json.loads((tmp_path / "plain" / "tokenizer_config.json").read_text())["tokenizer_class"]
    )
    assert load_tokenizer(str(tmp_path)).apply_chat_template(CHAT) == ids


def test_calls_that_newer_versions_dropped_stay(tiny_tokenizer_dir: Path):
    tokenizer = load_tokenizer(str(tiny_tokenizer_dir))
    ids = tokenizer.encode("abc")
    assert tokenizer.encode_plus("abc")["input_ids"] == ids
    assert tokenizer.batch_encode_plus(["abc", "d"])["input_ids"] == [ids, tokenizer.encode("d")]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    assert tokenizer.additional_special_tokens == ["<|tool|>"]
    assert tokenizer.additional_special_tokens_ids == [tokenizer.convert_tokens_to_ids("<|tool|>")]
    with pytest.raises(AttributeError):
        tokenizer.no_such_thing  # noqa: B018 - reading it is the test


def test_giving_it_twice_changes_nothing(tiny_tokenizer_dir: Path):
    tokenizer = load_tokenizer(str(tiny_tokenizer_dir))
    kind = type(tokenizer)
    assert type(with_list_chat_template(tokenizer)) is kind
    assert with_list_chat_template("not a tokenizer") == "not a tokenizer"


def test_a_missing_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="no-such-organisation/no-such-model"):
        load_tokenizer("no-such-organisation/no-such-model")
    with pytest.raises(ConfigError, match="tokenizer_name"):
        load_tokenizer(str(tmp_path / "absent"))
