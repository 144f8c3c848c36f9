"""How many numbers each row of `[[1, 2], [3]]` holds, read from the JSON text without making a single number.

The text is known to be valid JSON (msgspec has walked it). What is left to find out is that it is a list of lists of
plain numbers, how long each is, and that no number is too large for a float: brackets by memchr, everything else by a few
vectorised passes over the bytes. Whatever these passes cannot vouch for is `NotPlainError`; a slower reader then decides.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_COMMA, _MINUS, _ZERO, _NINE, _E = b",-09e"
_BLOCK = 128  # a number that overflows by its digits alone has more than 300, so it fills one of these blocks
_BLANK = b" \t\r\n"
_LONGEST = 10  # from one separator to the next: nine digits fit in any case
_MANY = 64  # exponents to look for one by one

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class NotPlainError(Exception):
    """The text is not, or not surely, a list of lists of plain finite numbers."""


def row_lengths(text: bytes, *, floats: bool) -> list[int]:
    """Numbers in each row of a JSON list of lists; `floats` allows fractions and exponents. NotPlainError when unsure."""
    if b'"' in text or (not floats and b"." in text):
        raise NotPlainError
    rows = _rows(text)
    chars = np.frombuffer(text, np.uint8)
    letters = int(np.count_nonzero(chars > _NINE)) - 2 * len(rows) - 2  # brackets are above '9' too
    commas = chars == _COMMA
    if floats:
        _check_range(text, chars, commas, letters)
    elif letters or _is_long(chars):
        raise NotPlainError
    return [_count(text, commas, start, end) for start, end in rows]


def _rows(text: bytes) -> list[tuple[int, int]]:
    """Where the inside of each row begins and ends; NotPlainError unless the brackets are exactly two deep."""
    rows: list[tuple[int, int]] = []
    position, start = 1, text.find(b"[", 1)
    while start >= 0:
        if text[position:start].strip(_BLANK) != (b"," if rows else b""):
            raise NotPlainError
        end = text.find(b"]", start)
        following = text.find(b"[", start + 1)
        if 0 <= following < end:
            raise NotPlainError
        rows.append((start + 1, end))
        position, start = end + 1, following
    if not rows or text[:1] != b"[" or text[position:].strip(_BLANK) != b"]":
        raise NotPlainError
    return rows


def _check_range(text: bytes, chars: Bytes, commas: np.ndarray[Any, np.dtype[np.bool_]], letters: int) -> None:
    """A number is infinite only with a positive exponent or with more than 300 digits; words have other letters than e."""
    if letters > _MANY:
        exponents = np.flatnonzero(chars == _E)
        if exponents.size != letters or (chars[exponents + 1] != _MINUS).any():
            raise NotPlainError
    elif letters:
        position = -1
        for _ in range(letters):
            position = text.find(b"e", position + 1)
            if position < 0 or text[position + 1] != _MINUS:
                raise NotPlainError
    blocks = chars.size // _BLOCK
    if blocks > 1 and not commas[: blocks * _BLOCK].reshape(blocks, _BLOCK).any(axis=1).all():
        raise NotPlainError


def _is_long(chars: Bytes) -> bool:
    """Whether an integer may have so many digits that it does not fit into 32 bits."""
    between = np.flatnonzero(chars < _ZERO)  # commas, blanks, signs
    gaps = np.diff(between, prepend=0, append=chars.size)
    return bool(gaps.max() > _LONGEST)


def _count(text: bytes, commas: np.ndarray[Any, np.dtype[np.bool_]], start: int, end: int) -> int:
    if not text[start : min(start + 16, end)].strip(_BLANK) and not text[start:end].strip(_BLANK):
        return 0
    return int(np.count_nonzero(commas[start:end])) + 1
