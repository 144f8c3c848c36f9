"""Row lengths from text against Python's JSON reader, for anything that could be written as a list of lists."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.api.number_rows import NotPlainError, row_lengths

ints = st.integers(-(10**6), 10**6).map(str)
floats = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr), ints, st.sampled_from(["1e-5", "-2.5E-3", "1e5", "0.0"])
)
odd = st.sampled_from(
    [
        "null",
        "true",
        "false",
        '"7"',
        "[1]",
        "[]",
        "{}",
        '{"a": 1}',
        "1e400",
        "-1e+999",
        "9" * 400,
        "1" * 308 + ".5",
        "1.5",
    ]
)
blanks = st.sampled_from(["", " ", "  ", "\n", "\t", " " * 40])


@st.composite
def texts(draw: st.DrawFn, cell: st.SearchStrategy[str]) -> str:
    rows = draw(st.lists(st.lists(cell, max_size=6), max_size=4))
    blank = draw(blanks)
    row_texts = [f"[{blank}{f',{blank}'.join(row)}{draw(blanks)}]" for row in rows]
    return f"[{draw(blanks)}{f',{blank}'.join(row_texts)}{blank}]"


def expected(text: str, *, whole_numbers: bool) -> list[int] | None:
    """What a careful reader says: the lengths, or None when some entry is not a finite number of the right kind and size."""
    value: Any = json.loads(text)
    if not value or not all(isinstance(row, list) for row in value):
        return None
    kinds = (int,) if whole_numbers else (int, float)
    for cell in (cell for row in value for cell in row):
        if isinstance(cell, bool) or not isinstance(cell, kinds):
            return None
        if whole_numbers and not -(2**31) <= cell < 2**31:
            return None
        if not whole_numbers and not (abs(cell) < 10**308 and math.isfinite(cell)):
            return None
    return [len(row) for row in value]


def found(text: str, *, floats: bool) -> list[int] | None:
    try:
        return row_lengths(text.encode(), floats=floats)
    except NotPlainError:
        return None


@settings(max_examples=300)
@given(text=texts(st.one_of(ints, ints, odd)))
def test_whole_numbers_are_counted_or_refused(text: str) -> None:
    assert found(text, floats=False) == expected(text, whole_numbers=True)


@settings(max_examples=400)
@given(text=texts(st.one_of(floats, floats, odd)))
def test_what_passes_as_numbers_is_finite_and_counted(text: str) -> None:
    lengths = found(text, floats=True)
    if lengths is not None:  # being unsure is allowed, being wrong is not
        assert lengths == [len(row) for row in json.loads(text)]
        assert all(
            math.isfinite(float(cell)) and not isinstance(cell, bool) for row in json.loads(text) for cell in row
        )


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("[[1.5, -2.5e-05, 1.0], [0.25]]", [3, 1]),
        ("[[], [1]]", [0, 1]),
        ("[[ ]]", [0]),
        ("[[" + " " * 200 + "]]", [0]),
        ("[[" + " " * 100 + "1.0, 2.0]]", [2]),
    ],
)
def test_usual_texts_are_read(text: str, lengths: list[int]) -> None:
    assert found(text, floats=True) == lengths


@pytest.mark.parametrize(
    "text",
    ["[]", "[1]", "1", "{}", "[[1], 2]", "[2, [1]]", "[[[1]]]", "[[1], [[2]]]", "[[null]]", "[[1e999]]", "[[NaN]]"],
)
def test_what_is_not_a_list_of_number_lists_is_refused(text: str) -> None:
    assert found(text, floats=True) is None
    assert found(text, floats=False) is None


def test_long_digits_are_refused_wherever_they_stand() -> None:
    for before in (0, 1, 50, 127, 300):
        text = "[[" + "0.5," * before + "9" * 400 + ",0.5" * 40 + "]]"
        assert found(text, floats=True) is None
