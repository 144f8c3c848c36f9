"""Counting failures, rejections and timings."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs import env_metrics
from atroposlib.envs.env_metrics import EnvStatistics, FailureLog


def fail(kind: type[Exception]) -> Exception:
    try:
        raise kind("grader broke")
    except kind as error:
        return error


def test_a_traceback_is_shown_once_per_kind(caplog: pytest.LogCaptureFixture):
    failures = FailureLog()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            failures.record("collect_trajectories", fail(KeyError))
        failures.record("collect_trajectories", fail(ValueError))
    shown = [record.getMessage() for record in caplog.records]
    assert len(shown) == 2
    assert "Traceback" in shown[0]
    assert "grader broke" in shown[0]
    assert sorted(failures.counts.values()) == [1, 3]
    assert failures.by_place == {"collect_trajectories": 4}


def test_a_rejection_is_counted_and_its_reason_shown_once(caplog: pytest.LogCaptureFixture):
    statistics = EnvStatistics()
    for _ in range(3):
        statistics.note_rejected("equal_scores", "all 4 scores are 0.0")
    statistics.note_rejected("too_long", "a sequence of 9 tokens does not fit")
    assert statistics.rejected == {"equal_scores": 3, "too_long": 1}
    assert len(caplog.records) == 2


def test_the_report_has_rewards_counts_and_reasons():
    statistics = EnvStatistics()
    statistics.note_sent({"tokens": [[1], [2]], "scores": [0.0, 1.0]})
    statistics.note_rejected("equal_scores", "...")
    statistics.recent_seconds.extend([1.0, 3.0])
    report = statistics.report(num_workers=5, num_backlog=2)
    assert report["rollout/reward_mean"] == 0.5
    assert report["rollout/reward_std"] == 0.5
    assert report["rollout/num_groups_sent"] == 1
    assert report["rollout/num_sequences_sent"] == 2
    assert report["rollout/num_groups_rejected_equal_scores"] == 1
    assert report["rollout/num_workers"] == 5
    assert report["rollout/seconds_mean"] == 2.0


async def test_metrics_of_all_servers_are_kept():
    class Server:
        async def wandb_metrics(self, metrics: dict[str, Any], name: str) -> dict[str, Any]:
            return {**metrics, f"server/{name}_request_time_avg": 1.0}

    assert sorted(await env_metrics.server_metrics([Server(), Server(), Server(), object()])) == [
        "server/server_0_request_time_avg",
        "server/server_1_request_time_avg",
        "server/server_2_request_time_avg",
    ]


def test_perf_stats_empties_what_it_reports_and_leaves_single_entries():
    env = SimpleNamespace(
        task_duration=[1.0, 3.0],
        succeeded_task_duration=[1.0, 3.0],
        failed_task_duration=[1.0],
        mainloop_timings=[],
        workers_added_list=[2, 4],
    )
    metrics = env_metrics.perf_stats(env, {})
    assert metrics["train_perf/task_duration_mean"] == 2.0
    assert metrics["train/items_sent_to_api"] == 2
    assert metrics["train_perf/workers_added_per_attempt_max"] == 4
    assert "train/items_rejected" not in metrics
    assert env.task_duration == []
    assert env.failed_task_duration == [1.0]


def test_length_stats():
    metrics: dict[str, Any] = {}
    env_metrics.length_stats([10, 96, 100, 2], 100, metrics)
    assert metrics["train/completion_lengths"] == 52.0
    assert metrics["train/completion_lengths_max"] == 100
    assert metrics["train/completion_lengths_p95"] == 0.5
    env_metrics.length_stats([], 100, empty := {})
    assert empty == {}


def test_wandb_that_cannot_start_is_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    import sys

    class Broken:
        @staticmethod
        def init(**_: Any) -> None:
            raise RuntimeError("api key not configured")

    monkeypatch.setitem(sys.modules, "wandb", Broken)
    monkeypatch.setattr(env_metrics, "is_wandb_installed", lambda: True)
    assert env_metrics.start_wandb(name="x") is False
    assert len(caplog.records) == 1
    assert "api key not configured" in caplog.text


def test_wandb_without_a_key_is_not_asked_to_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    import sys

    class Keyless:
        class api:  # noqa: N801 - as wandb calls it
            api_key = None

        @staticmethod
        def init(**_: Any) -> None:
            raise AssertionError("would have asked for a key")

    monkeypatch.setitem(sys.modules, "wandb", Keyless)
    monkeypatch.setenv("WANDB_MODE", "online")
    assert env_metrics.start_wandb(name="x") is False
    assert "no API key" in caplog.text


def test_run_name_has_prefix_date_and_letters():
    assert env_metrics.run_name(None) is None
    parts = (env_metrics.run_name("math") or "").split("-")
    assert parts[0] == "math"
    assert len(parts) == 5
    assert len(parts[-1]) == 6
