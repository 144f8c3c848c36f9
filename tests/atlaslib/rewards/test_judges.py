"""Language models as judges: agreement, escalation, failure."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from atlaslib.errors import ConfigError
from atlaslib.rewards import judges
from atlaslib.rewards.judges import Judgement, JudgeReward, consistent, openai_judge, parse_verdict


def verdict(score: float, uncertainty: float = 0.0) -> str:
    return "Sure: " + json.dumps({"score": score, "uncertainty": uncertainty, "rationale": f"r{score}"})


class Scripted:
    """A judge model that answers from a script and remembers what it was asked (a fake: no language model runs here)."""

    def __init__(self, small: list[str | Exception], large: str | Exception | None = None) -> None:
        self.small, self.large, self.calls = list(small), large, []

    async def __call__(self, model: str, prompt: str, temperature: float) -> str:
        self.calls.append((model, temperature, prompt))
        reply = self.small.pop(0) if model == "small" else self.large
        if isinstance(reply, Exception):
            raise reply
        assert reply is not None
        return reply


async def judge(ask: Scripted, **kwargs: object) -> tuple[JudgeReward, list[float | None]]:
    reward = JudgeReward(ask=ask, small_model="small", large_model="large", judges=["accuracy"])
    return reward, await reward(prompts=["2+2?"], completions=["4"], ground_truths=["4"], **kwargs)


async def test_agreement_takes_the_surest_opinion() -> None:
    ask = Scripted([verdict(0.8, 0.2), verdict(0.9, 0.1), verdict(0.85, 0.3)])
    reward, scores = await judge(ask)
    assert scores == [0.9]
    assert [temperature for _, temperature, _ in ask.calls] == [0.2, 0.5, 0.8]
    assert "Reference answer:\n4" in ask.calls[0][2]
    assert reward.statistics.num_escalated == 0


async def test_disagreement_goes_to_the_arbiter() -> None:
    ask = Scripted([verdict(0.0), verdict(1.0), verdict(0.5)], verdict(0.25))
    reward, scores = await judge(ask)
    assert scores == [0.25]
    assert "scores spread by 0.41" in (reward.last_judgements[0]["accuracy"].escalation_reason or "")
    assert '"score": 1.0' in ask.calls[-1][2]


async def test_uncertainty_goes_to_the_arbiter() -> None:
    _, scores = await judge(Scripted([verdict(0.5, 0.9), verdict(0.5), verdict(0.5)], verdict(1.0)))
    assert scores == [1.0]


async def test_failed_judge_is_missing_not_zero() -> None:
    down = ConnectionError("refused")
    reward, scores = await judge(Scripted([down, down, "no json here"], down))
    assert scores == [None]
    assert reward.statistics.num_failed == 1
    assert any("refused" in error for error in reward.statistics.last_errors)


async def test_same_question_is_asked_once() -> None:
    ask = Scripted([verdict(0.5)] * 3)
    reward = JudgeReward(ask=ask, small_model="small", judges=["accuracy"])
    assert await reward(prompts=["q"], completions=["a"]) == [0.5]
    assert await reward(prompts=["q"], completions=["a"]) == [0.5]
    assert len(ask.calls) == 3
    assert reward.statistics.num_cached == 1


async def test_only_the_newest_judgements_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "CACHED_JUDGEMENTS", 2)
    ask = Scripted([verdict(0.5)] * 4)
    reward = JudgeReward(ask=ask, small_model="small", judges=["accuracy"], temperatures=[0.2])
    for completion in ("a", "b", "c", "b", "a"):
        await reward(prompts=["q"], completions=[completion])
    assert len(ask.calls) == 4
    assert reward.statistics.num_cached == 1


class JudgeServer(ThreadingHTTPServer):
    """An OpenAI-compatible endpoint that gives one verdict and counts the connections that are open."""

    daemon_threads = True

    def __init__(self) -> None:
        self.open = 0
        self.asked: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    class Handler(BaseHTTPRequestHandler):
        server: JudgeServer
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            self.server.open += 1

        def finish(self) -> None:
            super().finish()
            self.server.open -= 1

        def do_POST(self) -> None:
            self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            message = {"role": "assistant", "content": verdict(0.75)}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            body = {"id": "1", "object": "chat.completion", "created": 1, "model": "small", "choices": [choice]}
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass


def test_an_endpoint_is_asked_and_every_round_closes_its_connections() -> None:
    with JudgeServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        reward = JudgeReward(ask=openai_judge(server.url), small_model="small", judges=["accuracy"], temperatures=[0.2])
        for number in range(3):  # as the trainer calls it: every round in an event loop of its own
            assert asyncio.run(reward(prompts=["q", "r"], completions=[f"a{number}", "b"])) == [0.75, 0.75]
        deadline = time.monotonic() + 5.0
        while server.open and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.open == 0
        assert {(asked["model"], asked["temperature"]) for asked in server.asked} == {("small", 0.2)}
        assert len(server.asked) == 4
        server.shutdown()


def test_scores_that_cannot_be_true_together_are_lowered() -> None:
    row = {
        name: Judgement(judge=name, score=score)
        for name, score in {"accuracy": 0.2, "process": 0.9, "helpfulness": 0.9}.items()
    }
    assert {name: judgement.score for name, judgement in consistent(row).items()} == {
        "accuracy": 0.2,
        "process": pytest.approx(0.3),
        "helpfulness": 0.9,
    }


@pytest.mark.parametrize("text", ["nothing", '{"score": 7}', '{"rationale": "x"}', "{broken"])
def test_invalid_verdicts_raise(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse_verdict(text)


def test_unknown_judge_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        JudgeReward(ask=Scripted([]), small_model="s", judges=["acuracy"])
