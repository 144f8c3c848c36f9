"""One teaching round: student baseline and probe once per prompt, the teacher's completions, the taught student, and what came of it.

The teacher is the policy. What it is trained on is exactly the prompt and the tokens it was sampled with; the student's texts only decide
the reward.
"""

from __future__ import annotations

import inspect
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlaslib.data.prompts import derive_seed
from atlaslib.generation.protocol import SamplingSettings
from atlaslib.generation.students import Chat, Student, StudentReply
from atlaslib.rewards.answers import answers_match, extract_answer
from atlaslib.trainers.rollouts import Rollout
from atlaslib.trainers.teaching_dialogue import (
    TeachingTemplates,
    as_chat,
    context_values,
    extract_teaching,
    fill,
    question_text,
)

SUCCESS_REWARD = 1.0
CONFIDENCE_Z = 1.959964  # 95 %


@dataclass(kw_only=True, slots=True)
class StudentStart:
    """What the student says before any teaching; shared by all completions of a prompt."""

    question: str
    baseline: StudentReply
    probe: StudentReply


@dataclass(kw_only=True, slots=True)
class TeachingRound:
    """The dialogue of one call, with everything that stays the same between calls."""

    templates: TeachingTemplates
    student: Student
    answer_settings: SamplingSettings
    probe_settings: SamplingSettings

    def ask_student(self, rows: Sequence[dict[str, Any]], *, seed: int, positions: Sequence[int]) -> list[StudentStart]:
        """Baseline and probe, one of each per row; ``positions`` number the rows over all processes."""
        questions = [question_text(row["prompt"]) for row in rows]
        chats = [
            [
                as_chat(fill(template, {"question": question}), row["prompt"])
                for question, row in zip(questions, rows, strict=True)
            ]
            for template in (self.templates.baseline, self.templates.diagnostic)
        ]
        baselines = self._answers(chats[0], self.answer_settings, derive_seed(seed, 1), positions)
        probes = self._answers(chats[1], self.probe_settings, derive_seed(seed, 2), positions)
        return [
            StudentStart(question=question, baseline=baseline, probe=probe)
            for question, baseline, probe in zip(questions, baselines, probes, strict=True)
        ]

    def teacher_rows(self, rows: Sequence[dict[str, Any]], starts: Sequence[StudentStart]) -> list[dict[str, Any]]:
        """The rows the teacher is sampled from: the same columns, the teacher's own prompt."""
        made = []
        for row, start in zip(rows, starts, strict=True):
            text = fill(
                self.templates.teacher,
                {"question": start.question, "approach": start.probe.text, **context_values(row)},
            )
            made.append({**row, "prompt": as_chat(text, row["prompt"])})
        return made

    def teach(
        self,
        rows: Sequence[dict[str, Any]],
        starts: Sequence[StudentStart],
        made: Sequence[Rollout],
        *,
        tokenizer: Any,
        seed: int,
        positions: Sequence[int],
    ) -> None:
        """Let the student answer with each teaching and put every role's text and length into the rollouts.

        ``made`` holds the teacher's rollouts, grouped by row in the order of ``rows``.
        """
        per_row = len(made) // max(len(rows), 1)
        owners = [(rows[index // per_row], starts[index // per_row]) for index in range(len(made))]
        teachings = [extract_teaching(rollout.completion_text) for rollout in made]
        chats = [
            as_chat(
                fill(self.templates.guided, {"question": start.question, "teaching": teaching, **context_values(row)}),
                row["prompt"],
            )
            for (row, start), teaching in zip(owners, teachings, strict=True)
        ]
        numbers = [position * per_row + number for position in positions for number in range(per_row)]
        answers = self._answers(chats, self.answer_settings, derive_seed(seed, 3), numbers)
        for rollout, (row, start), teaching, answer in zip(made, owners, teachings, answers, strict=True):
            rollout.extra = role_columns(row, start, rollout.completion_text, teaching, answer)
            rollout.extra["teaching_lengths"] = len(tokenizer(teaching, add_special_tokens=False)["input_ids"])
            rollout.extra["teacher_response_lengths"] = len(rollout.completion_ids)

    def _answers(
        self, chats: list[Chat], settings: SamplingSettings, seed: int, positions: Sequence[int]
    ) -> list[StudentReply]:
        """A student that takes no positions gets a seed that differs between processes."""
        if "positions" in inspect.signature(self.student.answer).parameters:
            return self.student.answer(chats, settings, seed=seed, positions=positions)
        return self.student.answer(chats, settings, seed=derive_seed(seed, *positions[:1]))


def role_columns(
    row: dict[str, Any], start: StudentStart, response: str, teaching: str, answer: StudentReply
) -> dict[str, Any]:
    """The columns reward functions get beside the data set's own."""
    truth = row.get("ground_truth")
    return {
        "questions": start.question,
        "student_approaches": start.probe.text,
        "teachings": teaching,
        "teacher_responses": response,
        "baseline_responses": start.baseline.text,
        "student_responses": answer.text,
        "baseline_solutions": extract_answer(start.baseline.text),
        "solutions": extract_answer(answer.text),
        "ground_truths": None if truth is None else str(truth),
        "approach_lengths": start.probe.num_tokens,
        "baseline_lengths": start.baseline.num_tokens,
        "student_lengths": answer.num_tokens,
    }


def teaching_metrics(made: Sequence[Rollout]) -> dict[str, float]:
    """Accuracy with and without teaching, how often it helped or harmed (with 95 % intervals), and what it cost."""
    if not made:
        return {}
    lengths = [float(rollout.extra["teacher_response_lengths"]) for rollout in made]
    rewards = [rollout.reward for rollout in made if not math.isnan(rollout.reward)]
    metrics = {
        "teaching_length_mean": statistics.fmean(lengths),
        "teaching_length_std": statistics.pstdev(lengths),
        "student_approach_length": statistics.fmean(rollout.extra["approach_lengths"] for rollout in made),
        "token_efficiency": statistics.fmean(rewards) / max(statistics.fmean(lengths) / 100.0, 1e-9)
        if rewards
        else math.nan,
    }
    judged = [
        (correct(r, "baseline_solutions"), correct(r, "solutions"))
        for r in made
        if r.extra["ground_truths"] is not None
    ]
    if judged:
        count = len(judged)
        before, after = sum(base for base, _ in judged) / count, sum(taught for _, taught in judged) / count
        metrics |= {"student_accuracy": after, "baseline_accuracy": before, "accuracy_delta": after - before}
        metrics |= _rate("improvement_rate", sum(taught and not base for base, taught in judged), count)
        metrics |= _rate("degradation_rate", sum(base and not taught for base, taught in judged), count)
    return metrics


def correct(rollout: Rollout, column: str) -> bool:
    """Whether the student's answer in ``column`` is the right one."""
    return answers_match(rollout.extra[column], rollout.extra["ground_truths"])


def wilson_interval(successes: int, count: int, z: float = CONFIDENCE_Z) -> tuple[float, float]:
    """The Wilson score interval of a rate."""
    rate = successes / count
    centre = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def save_successes(made: Sequence[Rollout], folder: Path, step: int) -> int:
    """Write every teaching with a reward of at least 1 as a JSON file; returns how many."""
    saved = 0
    for number, rollout in enumerate(made):
        if math.isnan(rollout.reward) or rollout.reward < SUCCESS_REWARD:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        path = folder / f"step_{step:06d}_sample_{number}_{int(now * 1e6)}.json"
        path.write_text(
            json.dumps(success_record(rollout, number, step, now), indent=2, ensure_ascii=False, default=str)
        )
        saved += 1
    return saved


def save_dialogues(made: Sequence[Rollout], folder: Path, step: int, *, share: float, seed: int) -> int:
    """Write a random ``share`` of the dialogues to ``step_<n>.jsonl``; returns how many."""
    chooser = random.Random(derive_seed(seed, step, 4))
    chosen = [(number, rollout) for number, rollout in enumerate(made) if chooser.random() < share]
    if chosen:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"step_{step:06d}.jsonl").open("w") as file:
            for number, rollout in chosen:
                file.write(
                    json.dumps(success_record(rollout, number, step, time.time()), ensure_ascii=False, default=str)
                    + "\n"
                )
    return len(chosen)


def success_record(rollout: Rollout, number: int, step: int, timestamp: float) -> dict[str, Any]:
    """One successful teaching, with everything needed to learn from it later."""
    row, extra = rollout.row, rollout.extra
    return {
        "step": step,
        "timestamp": timestamp,
        "sample_index": number,
        "prompt": extra["questions"],
        "student_approach": extra["student_approaches"],
        "teaching_content": extra["teachings"],
        "full_teacher_response": extra["teacher_responses"],
        "student_solution": extra["solutions"],
        "baseline_solution": extra["baseline_solutions"],
        "ground_truth": extra["ground_truths"],
        "reward": rollout.reward,
        "prior_reward": row.get("reward_score"),
        "reward_breakdown": row.get("reward_breakdown") or rollout.rewards,
        "guidance_history": row.get("guidance_history"),
        "step_context": row.get("step_context"),
        "student_full_response": extra["student_responses"],
        "baseline_full_response": extra["baseline_responses"],
    }


def _rate(name: str, successes: int, count: int) -> dict[str, float]:
    low, high = wilson_interval(successes, count)
    return {name: successes / count, f"{name}_low": low, f"{name}_high": high}
