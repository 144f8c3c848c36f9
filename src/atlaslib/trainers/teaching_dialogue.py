"""The prompts of the teaching dialogue, as pure functions: probe, baseline, teaching, guided answer.

A template is text with named placeholders. Which names exist depends on the template; an unknown one is refused when
the templates are built, not in the middle of a run. Values are put in as they are: braces inside a question or a
piece of context mean nothing.

    student_baseline_template       {question}
    student_diagnostic_template     {question}
    teacher_adaptive_template       {question} {approach}  + context slots
    student_with_teaching_template  {question} {teaching}  + context slots

Context slots come from the data set's columns: step_context, guidance_history, validation, tool, tool_params.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from atlaslib.errors import ConfigError, unknown_name_message

CONTEXT_SLOTS = ("step_context", "guidance_history", "validation", "tool", "tool_params")

BASELINE_TEXT = """Solve the following problem. Work it out step by step, then give only the final answer inside <solution></solution>.

Problem:
{question}"""

DIAGNOSTIC_TEXT = """Do not solve the problem yet. In a few sentences say what kind of problem it is, which steps you would take, \
and where you might go wrong.

Problem:
{question}"""

TEACHER_TEXT = """You are a teacher. A student will solve the problem below and has described a plan. Judge the plan, then write what helps this \
student most: correct what is wrong, add what is missing, and keep it short when the plan is already right. Never state the final answer.
Think inside <thinking></thinking>; write what the student shall read inside <teaching></teaching>.

Problem:
{question}

The student's plan:
{approach}"""

GUIDED_TEXT = """Solve the following problem. A teacher has left you advice; use it where it helps. Work it out step by step, then give only the final \
answer inside <solution></solution>.

Problem:
{question}

Advice:
{teaching}"""

_TEACHING = re.compile(r"<teaching>(.*?)(?:</teaching>|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(kw_only=True, slots=True, frozen=True)
class TeachingTemplates:
    """The four templates of a run, checked; None takes the built-in text."""

    baseline: str
    diagnostic: str
    teacher: str
    guided: str

    @classmethod
    def build(
        cls,
        *,
        baseline: str | None = None,
        diagnostic: str | None = None,
        teacher: str | None = None,
        guided: str | None = None,
    ) -> TeachingTemplates:
        """Fill in the built-in texts and refuse placeholders that nothing will fill."""
        question = {"question"}
        chosen = cls(
            baseline=BASELINE_TEXT if baseline is None else baseline,
            diagnostic=DIAGNOSTIC_TEXT if diagnostic is None else diagnostic,
            teacher=TEACHER_TEXT if teacher is None else teacher,
            guided=GUIDED_TEXT if guided is None else guided,
        )
        _check("student_baseline_template", chosen.baseline, question)
        _check("student_diagnostic_template", chosen.diagnostic, question)
        _check("teacher_adaptive_template", chosen.teacher, question | {"approach", *CONTEXT_SLOTS})
        _check("student_with_teaching_template", chosen.guided, question | {"teaching", *CONTEXT_SLOTS})
        return chosen


def fill(template: str, values: Mapping[str, str]) -> str:
    """The template with its placeholders replaced; ``{{`` and ``}}`` stand for single braces."""
    parts: list[str] = []
    for literal, name, _, _ in Formatter().parse(template):
        parts.append(literal)
        if name is not None:
            parts.append(values[name])
    return "".join(parts)


def context_values(row: Mapping[str, Any]) -> dict[str, str]:
    """The five context slots of a data row as text; what a row does not have reads "none"."""
    return {slot: _as_text(row.get(slot)) for slot in CONTEXT_SLOTS}


def question_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """The problem as plain text: a string prompt itself, a chat's only user message, or a chat written out by role."""
    if isinstance(prompt, str):
        return prompt
    turns = [
        (str(message["role"]), _as_text(message.get("content"))) for message in prompt if message["role"] != "system"
    ]
    if len(turns) == 1:
        return turns[0][1]
    return "\n\n".join(f"{role}: {content}" for role, content in turns)


def as_chat(text: str, prompt: str | Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The filled template as one user message, under the system message the row's own chat has."""
    system = (
        []
        if isinstance(prompt, str)
        else [{"role": "system", "content": _as_text(m.get("content"))} for m in prompt if m["role"] == "system"]
    )
    return [*system, {"role": "user", "content": text}]


def extract_teaching(text: str) -> str:
    """What the student gets to read: the first teaching block (an unclosed one runs to the end), else the whole text."""
    found = _TEACHING.search(text)
    return (found.group(1) if found else text).strip()


def _as_text(value: Any) -> str:
    if value is None or value == "" or value == [] or value == {}:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False, default=str)


def _check(option: str, template: str, allowed: set[str]) -> None:
    try:
        names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ConfigError(
            f"{option} cannot be read ({error}); write a brace that is meant as text twice: '{{{{' or '}}}}'"
        ) from error
    for name in sorted(names - allowed):
        raise ConfigError(
            f"{option}: {unknown_name_message('placeholder', '{' + name + '}', ['{' + known + '}' for known in allowed])}"
            " (a brace that is meant as text is written twice)"
        )
