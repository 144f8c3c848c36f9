"""Final answers: finding and comparing them."""

from __future__ import annotations

import pytest

from atlaslib.rewards.answers import answers_match, extract_answer, normalize_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} and then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("<solution>the sum is 1,234.</solution>", "1,234"),
        ("<solution>Paris</solution>", "Paris"),
        ("<answer>7", "7"),
        ("steps... #### 42", "42"),
        ("The answer is 3.5.", "3.5"),
        ("I counted 3 apples", ""),
        ("", ""),
    ],
)
def test_extract_answer(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


def test_normalize() -> None:
    assert [normalize_answer(a) for a in ("42.0", " 1,000 ", "$5$", "3.14159265", "Paris.", "A  B", "1/2")] == [
        "42", "1000", "5", "3.141593", "paris", "a b", "0.5",
    ]  # fmt: skip


def test_match() -> None:
    assert answers_match("42.0", "42")
    assert answers_match(r"\frac{1}{2}", "0.5")
    assert not answers_match("41", "42")
    assert not answers_match("", "")
