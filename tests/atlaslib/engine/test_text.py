"""Streamed text: whole characters only, nothing taken back, stop strings held."""

from __future__ import annotations

from typing import Any

from atlaslib.engine.text import TextStream


def deltas(stream: TextStream, tokenizer: Any, pieces: list[str]) -> list[str]:
    made = []
    for piece in pieces:
        stream.push(tokenizer(piece)["input_ids"])
        made.append(stream.take(final=False))
    return made


def test_bytes_of_one_character_wait_for_each_other(tiny_tokenizer: Any) -> None:
    stream = TextStream(tiny_tokenizer, stops=[])
    made = []
    for token in tiny_tokenizer("aé€b")["input_ids"]:
        stream.push([token])
        made.append(stream.take(final=False))
    assert made == ["a", "", "é", "", "", "€", "b"]


def test_start_of_a_stop_string_is_held_back(tiny_tokenizer: Any) -> None:
    stream = TextStream(tiny_tokenizer, stops=["END"])
    assert deltas(stream, tiny_tokenizer, ["ab", "E", "N", "x", "yEN"]) == ["ab", "", "", "ENx", "y"]
    assert stream.push(tiny_tokenizer("D and more")["input_ids"]) == "END"
    assert stream.take(final=True) == ""
    assert stream.text == "abENxy"


def test_the_end_sends_the_rest(tiny_tokenizer: Any) -> None:
    stream = TextStream(tiny_tokenizer, stops=["zz"])
    assert deltas(stream, tiny_tokenizer, ["az"]) == ["a"]
    assert stream.take(final=True) == "z"
