"""Language models as judges: several cheap opinions, an arbiter when they disagree, and no reward at all when judging fails.

For every completion and every judge a small model is asked at several temperatures for a JSON verdict
``{"score", "rationale", "uncertainty", "principles"}``. When the scores spread too far, an opinion is uncertain, or none is
valid, a larger model sees all of them and decides. A judge that cannot be reached or read gives None: the sample is
missing a reward, it does not get zero. Verdicts are cached by their whole question.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from atlaslib.errors import ConfigError, unknown_name_message

logger = logging.getLogger(__name__)

AskModel = Callable[[str, str, float], Awaitable[str]]
"""(model, prompt, temperature) -> text; raises when the model cannot answer. An ``aclose()`` it may have ends every round of scoring."""

CACHED_JUDGEMENTS = 10_000
"""A judge remembers so many of its newest judgements."""
VERDICT_FORM = """Answer with one JSON object and nothing else:
{"principles": [{"name": "...", "weight": 0.0, "description": "..."}], "score": 0.0, "rationale": "...", "uncertainty": 0.0}
score and uncertainty are between 0 and 1; the weights of the principles add up to 1."""

JUDGE_TASKS: dict[str, str] = {
    "accuracy": "Judge whether the student's answer is right. Compare it with the reference answer when there is one; "
    "otherwise solve the problem yourself first.",
    "helpfulness": "Judge whether the teacher's guidance addressed what the student lacked, given how the student did before and after it.",
    "process": "Judge whether the student carried out its plan and the guidance soundly, step by step.",
    "diagnostic": "Judge how well the student's first plan saw the kind of problem, its steps and its pitfalls.",
}
SLOTS: dict[str, str] = {
    "question": "Problem",
    "student_plan": "Student's first plan",
    "teacher_trace": "Teacher's guidance",
    "student_baseline_answer": "Student's answer without guidance",
    "student_answer": "Student's answer",
    "ground_truth": "Reference answer",
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Verdict:
    """One opinion, valid by construction."""

    score: float
    rationale: str = ""
    uncertainty: float = 0.0
    principles: tuple[dict[str, Any], ...] = ()


@dataclass(kw_only=True, slots=True, frozen=True)
class Judgement:
    """What one judge decided about one completion; ``score`` None = it could not."""

    judge: str
    score: float | None
    rationale: str = ""
    samples: tuple[Verdict, ...] = ()
    escalated: bool = False
    escalation_reason: str | None = None


@dataclass(kw_only=True, slots=True)
class JudgeStatistics:
    """Counts over the life of a judge reward."""

    num_judgements: int = 0
    num_escalated: int = 0
    num_failed: int = 0
    num_cached: int = 0
    last_errors: list[str] = field(default_factory=list)


class JudgeReward:
    """A reward function that asks language models; usable wherever a reward function is.

    Example: ``JudgeReward(ask=openai_judge("http://localhost:9004/v1"), small_model="small", large_model="large", judges=["accuracy"])``
    """

    __name__ = "judge"

    def __init__(
        self,
        *,
        ask: AskModel,
        small_model: str,
        large_model: str | None = None,
        judges: Sequence[str] = ("helpfulness", "process"),
        temperatures: Sequence[float] = (0.2, 0.5, 0.8),
        max_spread: float = 0.15,
        max_uncertainty: float = 0.3,
        max_concurrent: int = 32,
    ) -> None:
        for name in judges:
            if name not in JUDGE_TASKS:
                raise ConfigError(unknown_name_message("judge", name, JUDGE_TASKS))
        if not judges or not temperatures:
            raise ConfigError("a judge reward needs at least one judge and one temperature")
        self.ask, self.small_model, self.large_model = ask, small_model, large_model
        self.judges, self.temperatures = tuple(judges), tuple(temperatures)
        self.max_spread, self.max_uncertainty = max_spread, max_uncertainty
        self.statistics = JudgeStatistics()
        self.last_judgements: list[dict[str, Judgement]] = []
        self._cache: dict[str, Judgement] = {}
        self._max_concurrent = max_concurrent

    async def __call__(
        self, *, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """The mean of the judges' scores per completion; None where a judge had no valid opinion."""
        gate = asyncio.Semaphore(self._max_concurrent)
        rows = [_slots(index, prompts, completions, columns) for index in range(len(completions))]
        tasks = [[self._judge(name, row, gate) for name in self.judges] for row in rows]
        try:
            flat = await asyncio.gather(*(task for row in tasks for task in row))
        finally:
            if hasattr(self.ask, "aclose"):
                await self.ask.aclose()
        width = len(self.judges)
        self.last_judgements = [
            consistent({judgement.judge: judgement for judgement in flat[start : start + width]})
            for start in range(0, len(flat), width)
        ]
        return [_mean([judgement.score for judgement in row.values()]) for row in self.last_judgements]

    async def _judge(self, name: str, row: Mapping[str, str], gate: asyncio.Semaphore) -> Judgement:
        prompt = judge_prompt(name, row)
        if prompt in self._cache:
            self.statistics.num_cached += 1
            return self._cache[prompt]
        opinions = await asyncio.gather(*(self._opinion(self.small_model, prompt, t, gate) for t in self.temperatures))
        samples = tuple(opinion for opinion in opinions if opinion is not None)
        reason = escalation_reason(samples, max_spread=self.max_spread, max_uncertainty=self.max_uncertainty)
        judgement = await self._decide(name, prompt, samples, reason, gate)
        self.statistics.num_judgements += 1
        self.statistics.num_escalated += judgement.escalated
        self.statistics.num_failed += judgement.score is None
        if judgement.score is not None:
            self._cache[prompt] = judgement
            if len(self._cache) > CACHED_JUDGEMENTS:
                del self._cache[next(iter(self._cache))]
        return judgement

    async def _decide(
        self, name: str, prompt: str, samples: tuple[Verdict, ...], reason: str | None, gate: asyncio.Semaphore
    ) -> Judgement:
        if reason is None:
            best = min(samples, key=lambda verdict: verdict.uncertainty)
            return Judgement(judge=name, score=best.score, rationale=best.rationale, samples=samples)
        final = None
        if self.large_model is not None:
            final = await self._opinion(self.large_model, arbiter_prompt(prompt, samples), 0.3, gate)
        return Judgement(
            judge=name,
            score=final.score if final else None,
            rationale=final.rationale if final else "",
            samples=samples,
            escalated=True,
            escalation_reason=reason,
        )

    async def _opinion(self, model: str, prompt: str, temperature: float, gate: asyncio.Semaphore) -> Verdict | None:
        try:
            async with gate:
                text = await self.ask(model, prompt, temperature)
            return parse_verdict(text)
        except Exception as error:  # a judge that is down or talks nonsense is a missing opinion, never a score
            self.statistics.last_errors = [*self.statistics.last_errors[-4:], f"{model}: {error}"]
            logger.warning("judge model %s gave no valid opinion: %s", model, error)
            return None


def judge_prompt(name: str, row: Mapping[str, str]) -> str:
    """The whole question one judge gets about one completion."""
    sections = [f"{title}:\n{row[slot]}" for slot, title in SLOTS.items() if row.get(slot)]
    return "\n\n".join([JUDGE_TASKS[name], *sections, VERDICT_FORM])


def arbiter_prompt(prompt: str, samples: Sequence[Verdict]) -> str:
    """The question for the larger model: the same, with the opinions so far."""
    opinions = [json.dumps({"score": s.score, "uncertainty": s.uncertainty, "rationale": s.rationale}) for s in samples]
    heading = (
        "Other judges disagreed or were unsure. Their opinions:" if opinions else "No other judge gave a valid opinion."
    )
    return "\n".join(
        [prompt, "", heading, *opinions, "", "Weigh them and give your own final verdict in the same form."]
    )


def escalation_reason(samples: Sequence[Verdict], *, max_spread: float, max_uncertainty: float) -> str | None:
    """Why the opinions do not settle the matter, or None when they do."""
    if not samples:
        return "no valid opinion"
    spread = statistics.pstdev([sample.score for sample in samples])
    if spread > max_spread:
        return f"scores spread by {spread:.2f}"
    worst = max(sample.uncertainty for sample in samples)
    return f"uncertainty {worst:.2f}" if worst > max_uncertainty else None


def parse_verdict(text: str) -> Verdict:
    """The verdict in a model's reply; raises ValueError when there is none or its numbers are out of range."""
    found = re.search(r"\{.*\}", text, re.DOTALL)
    if found is None:
        raise ValueError(f"no JSON object in the reply {text[:80]!r}")
    data = json.loads(found.group(0))
    score, uncertainty = float(data["score"]), float(data.get("uncertainty", 0.0))
    if not (0.0 <= score <= 1.0 and 0.0 <= uncertainty <= 1.0):
        raise ValueError(f"score {score} and uncertainty {uncertainty} must be between 0 and 1")
    return Verdict(
        score=score,
        rationale=str(data.get("rationale", "")),
        uncertainty=uncertainty,
        principles=tuple(data.get("principles") or ()),
    )


def consistent(row: Mapping[str, Judgement]) -> dict[str, Judgement]:
    """Scores that cannot be true together, lowered: a process is hardly better than its result, help hardly better than its diagnosis."""
    scores = {name: judgement.score for name, judgement in row.items()}
    accuracy, process, diagnostic = scores.get("accuracy"), scores.get("process"), scores.get("diagnostic")
    caps: dict[str, list[float]] = {"process": [], "helpfulness": []}
    if accuracy is not None:
        caps["process"].append(accuracy + 0.1)
    if process is not None and process < 0.5:
        caps["helpfulness"].append(0.5)
    if diagnostic is not None:
        caps["helpfulness"].append(diagnostic + 0.1)
    return {name: _capped(judgement, caps.get(name, [])) for name, judgement in row.items()}


def openai_judge(
    base_url: str | None = None, *, api_key: str | None = None, max_tokens: int = 2048, timeout_s: float = 120.0
) -> AskModel:
    """Ask over any OpenAI-compatible endpoint."""
    return _Endpoint(
        {"base_url": base_url, "api_key": api_key or ("x" if base_url else None), "timeout": timeout_s}, max_tokens
    )


class _Endpoint:
    """One client per event loop, from the first question of a round to its end."""

    def __init__(self, options: dict[str, Any], max_tokens: int) -> None:
        self._options, self._max_tokens = options, max_tokens
        self._clients: dict[asyncio.AbstractEventLoop, Any] = {}

    async def __call__(self, model: str, prompt: str, temperature: float) -> str:
        from openai import AsyncOpenAI

        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = AsyncOpenAI(**self._options, max_retries=2)
        messages = [{"role": "user", "content": prompt}]
        reply = await self._clients[loop].chat.completions.create(
            model=model, messages=messages, temperature=temperature, max_tokens=self._max_tokens
        )
        return reply.choices[0].message.content or ""

    async def aclose(self) -> None:
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()


def _slots(
    index: int, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
) -> dict[str, str]:
    row = {
        "question": _text(columns["questions"][index] if "questions" in columns else prompts[index]),
        "student_answer": _text(
            columns["student_responses"][index] if "student_responses" in columns else completions[index]
        ),
    }
    for slot, column in (
        ("student_plan", "student_approaches"),
        ("teacher_trace", "teachings"),
        ("student_baseline_answer", "baseline_responses"),
        ("ground_truth", "ground_truths"),
    ):
        if columns.get(column) is not None and columns[column][index] is not None:
            row[slot] = _text(columns[column][index])
    return row


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(f"{message['role']}: {message['content']}" for message in value)
    return str(value)


def _capped(judgement: Judgement, caps: Sequence[float]) -> Judgement:
    if judgement.score is None or not caps or judgement.score <= min(caps):
        return judgement
    return replace(judgement, score=max(0.0, min(caps)))


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if len(known) == len(scores) else None
