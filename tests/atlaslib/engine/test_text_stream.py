"""Streamed text: whole characters only, nothing taken back, stop strings held."""

from __future__ import annotations

from typing import Any

from atlaslib.engine.text_stream import TextStream


def test_bytes_of_one_character_wait_for_each_other(tiny_tokenizer: Any) -> None:
    stream = TextStream(tiny_tokenizer)
    ids = tiny_tokenizer("aé€b")["input_ids"]
    deltas = [stream.add([token]) for token in ids]
    assert deltas == ["a", "", "é", "", "", "€", "b"]


def test_start_of_a_stop_string_is_held_back(tiny_tokenizer: Any) -> None:
    stream = TextStream(tiny_tokenizer, stop=["END"])
    assert [stream.add(tiny_tokenizer(piece)["input_ids"]) for piece in ["ab", "E", "N", "x"]] == ["ab", "", "", "ENx"]
    assert stream.add(tiny_tokenizer("yEN")["input_ids"]) == "y"
    assert stream.finish("abENxy") == ""


def test_finish_sends_the_rest(tiny_tokenizer: Any) -> None:
    stream = TextStream(tiny_tokenizer, stop=["zz"])
    assert stream.add(tiny_tokenizer("az")["input_ids"]) == "a"
    assert stream.finish("az") == "z"
