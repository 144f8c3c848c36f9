"""Generated and GSM8K-style problems, and the check that their answers are not in their prompts."""

from __future__ import annotations

import pytest

from atlaslib.data.problem_sets import arithmetic_rows, check_no_leak, gsm8k_rows
from atlaslib.errors import ConfigError


def test_arithmetic_is_right_distinct_and_reproducible() -> None:
    rows = arithmetic_rows(100, seed=3, operations="+-", high=9)
    assert rows == arithmetic_rows(100, seed=3, operations="+-", high=9)
    assert rows != arithmetic_rows(100, seed=4, operations="+-", high=9)
    questions = [row["prompt"][0]["content"] for row in rows]
    assert len(set(questions)) == 100
    for question, row in zip(questions, rows, strict=True):
        assert str(eval(question.removeprefix("What is ").removesuffix("?"))) == row["ground_truth"]


def test_more_rows_than_problems_repeat() -> None:
    assert len(arithmetic_rows(10, low=0, high=1)) == 10


def test_text_prompts() -> None:
    assert arithmetic_rows(1, low=2, high=2, chat=False, system="Be short.") == [
        {"prompt": "Be short.\nWhat is 2+2?", "ground_truth": "4"}
    ]


def test_gsm8k_takes_the_marked_answer() -> None:
    rows = gsm8k_rows([{"question": "Q?", "answer": "3*400=1200\n#### 1,200"}])
    assert rows[0]["ground_truth"] == "1200"
    assert rows[0]["prompt"] == [{"role": "user", "content": "Q?"}]


def test_gsm8k_without_mark_is_refused() -> None:
    with pytest.raises(ConfigError, match="record 0 has no '#### value'"):
        gsm8k_rows([{"question": "Q?", "answer": "12"}])


@pytest.mark.parametrize(
    "row",
    [
        {
            "prompt": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "It is 12."}],
            "ground_truth": "12",
        },
        {"prompt": "Q #### 12", "ground_truth": "12"},
        {"prompt": "Q. First add, then 12.", "ground_truth": "12", "solution": "First add, then 12."},
    ],
)
def test_leaks_are_refused(row: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="row 0"):
        check_no_leak([row])


def test_number_in_the_question_is_no_leak() -> None:
    check_no_leak([{"prompt": "She has 3 apples and 0 pears. How many fruits?", "ground_truth": "3"}])
