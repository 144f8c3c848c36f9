"""Questions to a run log, and the routes that answer them over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from atroposlib.api.middleware import OPEN_PATHS
from atroposlib.api.observer import GroupEvent
from atroposlib.api.run_log import RunLog
from atroposlib.api.server import ServerSettings, build_app
from atroposlib.frontend.live.attach import attach_live_page, open_run_log
from atroposlib.frontend.live.history import GroupFilter, RunHistory
from atroposlib.frontend.live.routes import create_view_app


def add(log: RunLog, key: int, *, env: str, score: float, archived: bool = True) -> None:
    content = {
        "tokens": [[36, 2]],
        "masks": [[36, 2]],
        "scores": [score],
        "messages": [[{"role": "user", "content": "B"}]],
    }
    event = GroupEvent(
        key=key, group_id=f"g{key}", env_id=0, env_name=env, size=1, num_tokens=2, scores=[score], policy_versions=[[key]],
        reward_components={"right": [score]}, payload=json.dumps(content).encode(), binary=False,
    )  # fmt: skip
    log._archive_tokens = 10.0 if archived else -1e9
    log.group_accepted(event)


@pytest.fixture
def history(tmp_path: Path) -> RunHistory:
    log = RunLog(tmp_path / "server" / "run_log.sqlite", flush_s=0.01)
    add(log, 1, env="a", score=0.1)
    add(log, 2, env="b", score=0.9)
    add(log, 3, env="a", score=0.6, archived=False)
    log.batch_formed(1, ["g1", "g2"])
    log.batch_acked(1)
    log.reported("trainer", 5, 10.0, {"reward": 0.5, "batch_seq": 1.0})
    log.committed(1, 5)
    log.close()
    return RunHistory(tmp_path)


def keys(history: RunHistory, **wanted: object) -> list[int]:
    return [group["key"] for group in history.groups(GroupFilter(**wanted))]  # type: ignore[arg-type]


def test_filters(history: RunHistory) -> None:
    assert keys(history) == [3, 2, 1]
    assert keys(history, env="a") == [3, 1]
    assert keys(history, min_score=0.5) == [3, 2]
    assert keys(history, max_score=0.6) == [3, 1]
    assert keys(history, step=5) == [2, 1]
    assert keys(history, step=6) == []
    assert keys(history, before=3, limit=1) == [2]


def test_a_group_with_and_without_its_content(history: RunHistory) -> None:
    whole = history.group(1)
    assert whole is not None
    assert (whole["step"], whole["batch_seq"], whole["content"]["tokens"]) == (5, 1, [[36, 2]])
    assert whole["samples"] == [
        {
            "sample_id": "g1/0",
            "group_id": "g1",
            "idx": 0,
            "score": 0.1,
            "policy_versions": [1],
            "components": {"right": 0.1},
        }
    ]
    thin = history.group(3)
    assert thin is not None
    assert (thin["content"], thin["step"], thin["samples"][0]["score"]) == (None, None, 0.6)
    assert history.group(99) is None


def test_lineage_both_ways(history: RunHistory) -> None:
    step = history.trace_step(5)
    assert step is not None
    assert [group["group_id"] for group in step["groups"]] == ["g1", "g2"]
    assert step["batches"][0]["committed"] is not None
    assert history.trace_step(4) is None
    assert history.trace_sample("g2/0")["step"] == 5  # type: ignore[index]
    assert history.trace_sample("g2")["batch_seq"] == 1  # type: ignore[index]
    assert history.trace_sample("g2/7") is None
    assert history.trace_sample("nobody") is None
    assert history.known_steps() == (5, 5)


def test_overview_gives_only_what_is_new(history: RunHistory) -> None:
    first = history.overview()
    assert first["counts"] == {"groups": 3, "samples": 3, "tokens": 6, "queued": 1, "newest_key": 3}
    assert first["batches"]["step"] == 5
    assert first["envs"] == ["a", "b"]
    last = max(row[0] for row in first["metrics"])
    assert history.overview(after=last)["metrics"] == []


async def test_routes(
    history: RunHistory, tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_PAGE_TOKENIZER", str(tiny_tokenizer_dir))
    transport = httpx.ASGITransport(app=create_view_app(tmp_path))
    async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
        for path in OPEN_PATHS - {"/healthz"}:
            reply = await client.get(path)
            assert reply.status_code == 200
            assert "script-src 'self'" in reply.headers["content-security-policy"]
        assert (await client.get("/")).headers["location"] == "/live"
        assert (await client.get("/live/api/overview")).json()["live"] is False
        assert [group["key"] for group in (await client.get("/live/api/groups", params={"env": "b"})).json()] == [2]
        whole = (await client.get("/live/api/groups/1")).json()
        assert whole["token_texts"] == [["B", "<|im_end|>"]]
        assert (await client.get("/live/api/groups/99")).status_code == 404
        assert (await client.get("/live/api/trace/step/5")).json()["step"] == 5
        assert (await client.get("/live/api/trace/sample/g1/0")).json()["group_id"] == "g1"
        assert (await client.get("/live/api/trace/step/77")).status_code == 404
        assert (await client.get("/live/api/groups", params={"min_score": "x"})).status_code == 422


def test_the_tokenizer_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATROPOS_PAGE_TOKENIZER", "model")
    open_run_log(tmp_path).close()
    assert RunHistory(tmp_path).meta()["tokenizer"] == str(tmp_path / "model")


async def test_metrics_count_the_routes_of_the_page_not_what_was_looked_at() -> None:
    log = open_run_log(None)
    app = build_app(ServerSettings(), observers=[log])
    attach_live_page(app, log)
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://page") as client,
    ):
        for number in range(3):
            group = {"tokens": [[1]], "masks": [[1]], "scores": [0.5], "group_id": f'a "{number}"'}
            assert (await client.post("/scored_data", json=group)).status_code == 200
        log.flush()
        for number in range(3):
            assert (await client.get(f"/live/api/groups/{number + 1}")).status_code == 200
            assert (await client.get(f"/live/api/trace/sample/a%20%22{number}%22")).status_code == 200
        text = (await client.get("/metrics")).text
    assert 'http_requests_total{path="/live/api/groups/{key}",status="200"} 3' in text
    assert 'http_requests_total{path="/live/api/trace/sample/{sample_id:path}",status="200"} 3' in text
    assert 'a "' not in text
    assert not log.path.exists()
