"""The prompts of the teaching dialogue."""

from __future__ import annotations

import pytest

from atlaslib.errors import ConfigError
from atlaslib.trainers.teaching_dialogue import (
    TeachingTemplates,
    as_chat,
    context_values,
    extract_teaching,
    fill,
    question_text,
)


def test_built_in_texts_hold_their_slots() -> None:
    templates = TeachingTemplates.build()
    assert fill(templates.baseline, {"question": "2+2?"}).endswith("Problem:\n2+2?")
    taught = fill(templates.teacher, {"question": "2+2?", "approach": "I would {guess}."})
    assert "2+2?" in taught
    assert taught.endswith("The student's plan:\nI would {guess}.")


def test_given_template_is_used_as_given() -> None:
    templates = TeachingTemplates.build(baseline="Q={question} {{literal}}")
    assert fill(templates.baseline, {"question": "{x}"}) == "Q={x} {literal}"


def test_unknown_placeholder_is_named_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"student_baseline_template: unknown placeholder '\{qestion\}'; did you mean '\{question\}'"
    ):
        TeachingTemplates.build(baseline="{qestion}")
    with pytest.raises(ConfigError, match=r"student_diagnostic_template: unknown placeholder '\{teaching\}'"):
        TeachingTemplates.build(diagnostic="{question} {teaching}")


def test_single_brace_is_explained() -> None:
    with pytest.raises(ConfigError, match="write a brace"):
        TeachingTemplates.build(guided="{question} {teaching} {")


def test_context_is_text() -> None:
    values = context_values({"step_context": {"a": 1}, "tool": "", "validation": "ok"})
    assert values == {
        "step_context": '{\n  "a": 1\n}',
        "guidance_history": "none",
        "validation": "ok",
        "tool": "none",
        "tool_params": "none",
    }


def test_question_of_a_chat() -> None:
    assert question_text("plain") == "plain"
    assert question_text([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]) == "u"
    assert (
        question_text([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        == "user: a\n\nassistant: b"
    )


def test_system_message_of_the_row_stays() -> None:
    assert as_chat("T", [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "T"},
    ]


@pytest.mark.parametrize(
    ("text", "teaching"),
    [
        ("<thinking>x</thinking><teaching> do this </teaching> more", "do this"),
        ("<teaching>never closed", "never closed"),
        ("no tags at all ", "no tags at all"),
        ("<teaching>a</teaching><teaching>b</teaching>", "a"),
    ],
)
def test_extract_teaching(text: str, teaching: str) -> None:
    assert extract_teaching(text) == teaching
