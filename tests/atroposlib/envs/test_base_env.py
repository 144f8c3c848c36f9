"""``BaseEnv``: construction, checks before sending, logging, evaluation records."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.errors import ConfigError
from simple_env import NumbersEnv, RecordingClient, make_env


def scored(**changes: Any) -> dict[str, Any]:
    return {"tokens": [[5, 6, 7], [5, 8, 9]], "masks": [[-100, 6, 7], [-100, 8, 9]], "scores": [0.0, 1.0], **changes}


def test_start_values_and_positional_order(tiny_tokenizer_dir: Path):
    config = BaseEnvConfig(
        tokenizer_name=str(tiny_tokenizer_dir), use_wandb=False, group_name="ignored", max_num_workers_per_node=3
    )
    servers = [APIServerConfig(base_url="http://127.0.0.1:1/v1", api_key="x") for _ in range(2)]
    env = NumbersEnv(config, servers, False, False)
    assert (env.curr_step, env.max_token_len, env.checkpoint_dir, env.checkpoint_interval) == (0, -1, "", -1)
    assert env.wandb_prepend is None
    assert env.max_num_workers == 6
    assert len(env.server.servers) == 2
    assert env.derived_batch_size == -1
    assert env.config is config
    env.status_dict = {"unallocated_fraction": 0.5}
    env.config.batch_size = 64
    assert env.derived_batch_size == 32


def test_a_missing_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere"):
        make_env(tmp_path / "nowhere")


def test_an_existing_data_file_is_kept(tiny_tokenizer_dir: Path, tmp_path: Path):
    path = tmp_path / "data" / "groups.jsonl"
    for expected in ("groups.jsonl", "groups_1.jsonl", "groups_2.jsonl"):
        env = make_env(tiny_tokenizer_dir, data_path_to_save_groups=str(path))
        assert Path(env.config.data_path_to_save_groups).name == expected
        env.jsonl_writer.write({})
        env.jsonl_writer.close()


async def test_a_group_is_completed_written_and_sent(tiny_tokenizer_dir: Path, tmp_path: Path):
    client = RecordingClient()
    env = make_env(
        tiny_tokenizer_dir, client, data_path_to_save_groups=str(tmp_path / "g.jsonl"), include_messages=True
    )
    env.env_id = 3
    await env.handle_send_to_api(scored(group_overrides=None))
    assert isinstance(client.submissions[0], dict)
    sent = client.groups[0]
    assert sent["env_id"] == 3
    for key in ("ref_logprobs", "overrides", "group_overrides", "distill_token_ids", "distill_logprobs"):
        assert sent[key] is None
    assert sent["messages"] == [
        [{"role": "user", "content": env.tokenizer.decode(ids)}] for ids in ([5, 6, 7], [5, 8, 9])
    ]
    assert json.loads((tmp_path / "g.jsonl").read_text())["scores"] == [0.0, 1.0]
    assert env.completion_lengths == [2, 2]
    assert env.items_sent_this_step == 1
    await env.handle_send_to_api([scored(), None, scored()])
    assert len(client.submissions[1]) == 2
    assert env.items_sent_this_step == 3
    env.jsonl_writer.close()


async def test_rejections_are_counted_by_reason(tiny_tokenizer_dir: Path):
    client = RecordingClient()
    env = make_env(tiny_tokenizer_dir, client)
    env.max_token_len = 4
    await env.handle_send_to_api(scored(scores=[1.0, 1.0]))
    await env.handle_send_to_api(scored(tokens=[[1]], masks=[[1]], scores=[1.0]))
    await env.handle_send_to_api(scored(tokens=[[1] * 4, [1]], masks=[[1] * 4, [1]]))
    await env.handle_send_to_api(scored(scores=[float("nan"), 0.0]))
    assert env.statistics.rejected == {"equal_scores": 1, "wrong_size": 1, "too_long": 1, "not_finite_score": 1}
    assert client.groups == []
    await env.handle_send_to_api(
        scored(tokens=[[1] * 4, [1]], masks=[[1] * 4, [1]]), abort_on_any_max_length_exceeded=False
    )
    await env.handle_send_to_api(
        scored(tokens=[[1]], masks=[[1]], scores=[1.0, 0.0], group_overrides={"group_size": 1})
    )
    assert len(client.groups) == 2


async def test_a_refused_group_is_kept_on_disk_and_does_not_take_others_with_it(
    tiny_tokenizer_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    client = RecordingClient()
    client.refuse = 422
    env = make_env(tiny_tokenizer_dir, client)
    env.checkpoint_dir, env.wandb_prepend = str(tmp_path), "numbers_0"
    await env.handle_send_to_api([scored(), scored(bad=True), scored()])
    await env.handle_send_to_api(scored(bad=True))
    assert len(client.groups) == 2
    assert env.statistics.rejected == {"http_422": 2}
    assert env.statistics.num_groups_sent == 2
    lines = (tmp_path / "env_checkpoints" / "numbers_0" / "rejected_groups.jsonl").read_text().splitlines()
    assert len(lines) == 2
    kept = json.loads(lines[0])
    assert kept["status"] == 422
    assert kept["detail"] == "masks have another length than tokens"
    assert kept["group"]["tokens"] == [[5, 6, 7], [5, 8, 9]]
    assert sum("group rejected (http_422)" in record.getMessage() for record in caplog.records) == 1


async def test_rollouts_for_the_table(tiny_tokenizer_dir: Path):
    env = make_env(
        tiny_tokenizer_dir, use_wandb=True, num_rollouts_to_keep=2, num_rollouts_per_group_for_logging=-1, group_size=4
    )
    for score in range(3):
        await env.add_rollouts_for_wandb(scored(scores=[float(score), 9.0]))
    text = env.tokenizer.decode([5, 6, 7])
    assert [group[0] for group in env.rollouts_for_wandb] == [(text, 1.0), (text, 2.0)]
    assert len(env.rollouts_for_wandb[0]) == 2
    silent = make_env(tiny_tokenizer_dir, use_wandb=False)
    await silent.add_rollouts_for_wandb(scored())
    assert silent.rollouts_for_wandb == []


async def test_metrics_reach_wandb_under_the_name(tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch):
    import wandb

    logged: list[tuple[dict[str, Any], int]] = []
    monkeypatch.setattr(wandb, "log", lambda metrics, step: logged.append((metrics, step)))
    env = make_env(tiny_tokenizer_dir, use_wandb=True)
    env.wandb_prepend, env.curr_step, env.max_token_len = "numbers_0", 4, 100
    env.completion_lengths = [10, 20]
    await env.add_rollouts_for_wandb(scored())
    await env.wandb_log({"train/idx": 3})
    metrics, step = logged[0]
    assert step == 4
    assert metrics["numbers_0_train/idx"] == 3
    assert metrics["numbers_0_train/completion_lengths"] == 15.0
    assert metrics["numbers_0_train/rollouts"].data[0][1] == 0.0
    assert env.completion_lengths == []
    assert env.rollouts_for_wandb == []


async def test_without_wandb_it_is_not_imported(tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would raise
    env = make_env(tiny_tokenizer_dir, RecordingClient(), use_wandb=False)
    await env.setup_wandb()
    await env.add_rollouts_for_wandb(scored())
    await env.wandb_log({})


async def test_wandb_absent_is_one_warning(
    tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    env = make_env(tiny_tokenizer_dir, RecordingClient(), use_wandb=True)
    await env.setup_wandb()
    await env.wandb_log({})
    assert env.config.use_wandb is False
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


async def test_a_real_offline_wandb_run(tiny_tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import wandb

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    env = make_env(tiny_tokenizer_dir, RecordingClient(), use_wandb=True, wandb_name="numbers-run")
    await env.setup_wandb()
    try:
        assert wandb.run is not None
        assert wandb.run.name.startswith("numbers-run-")
        assert wandb.run.project == "p"
        await env.add_rollouts_for_wandb(scored())
        await env.wandb_log({"x": 1})
    finally:
        wandb.finish()
    assert list((tmp_path / "wandb").glob("offline-run-*"))


async def test_evaluation_records(tiny_tokenizer_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    env = make_env(tiny_tokenizer_dir, data_dir_to_save_evals=str(tmp_path), max_token_length=77)
    await env.evaluate_log(
        {"accuracy": 0.5},
        model_name="m",
        start_time=1.0,
        end_time=3.5,
        generation_parameters={"temperature": 0.0},
        samples=[{"question": "2+2", "score": 1.0}],
    )
    assert json.loads((tmp_path / "metrics.json").read_text()) == {
        "config_general": {
            "model_name": "m",
            "total_evaluation_time_seconds": "2.5",
            "generation_parameters": {"max_new_tokens": 77, "temperature": 0.0},
        },
        "results": {"atropos|numbers_eval|0": {"accuracy": 0.5}, "all": {"accuracy": 0.5}},
    }
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {"question": "2+2", "score": 1.0}
    assert "accuracy" in capsys.readouterr().out


async def test_an_evaluation_while_serving_is_on_the_live_page(tiny_tokenizer_dir: Path):
    class Client:
        reports: list[Any] = []  # noqa: RUF012 - one client in this test

        async def report(self, *report: Any) -> None:
            self.reports.append(report)

    env = make_env(tiny_tokenizer_dir)
    env._rollout_client = Client()  # type: ignore[assignment]
    await env.evaluate_log({"eval/accuracy": 1.0})
    assert Client.reports == []  # `evaluate` alone: there is no rollout server
    env.env_id, env.wandb_prepend, env.curr_step = 0, "numbers_0", 7
    await env.evaluate_log({"eval/accuracy": 0.5, "note": "text"})
    assert Client.reports == [("env:numbers_0", 7, {"eval/accuracy": 0.5})]


async def test_evaluate_alone_logs_its_metrics(tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch):
    import wandb

    class Measured(NumbersEnv):
        async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
            await super().wandb_log({**(wandb_metrics or {}), "eval/accuracy": 0.5})

    runs: list[dict[str, Any]] = []
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "init", lambda **settings: runs.append(settings))
    monkeypatch.setattr(wandb, "log", lambda metrics, step: logged.append(metrics))
    env = make_env(tiny_tokenizer_dir, None, Measured, use_wandb=True)
    await env._run_evaluate()
    assert env.evaluations == [0]
    assert runs[0]["name"].startswith("numbers-")
    assert logged[0]["eval/accuracy"] == 0.5
    silent = make_env(tiny_tokenizer_dir, None, Measured, use_wandb=False)
    await silent._run_evaluate()
    assert len(runs) == len(logged) == 1


async def test_the_evaluation_pool_is_bounded_and_in_order(tiny_tokenizer_dir: Path):
    env = make_env(tiny_tokenizer_dir, max_eval_workers=3)
    running = most = 0

    async def work(index: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002 * (10 - index))
        running -= 1
        return index

    assert await env.gather_eval(work(index) for index in range(10)) == list(range(10))
    assert most == 3


async def test_one_failed_rollout_ends_the_others_of_its_group(tiny_tokenizer_dir: Path):
    ended: list[int] = []

    class Failing(NumbersEnv):
        num_started = 0

        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            self.num_started += 1
            if (number := self.num_started) == 2:
                await asyncio.sleep(0.01)
                raise RuntimeError("rollout 2")
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(number)
            raise AssertionError

    env = make_env(tiny_tokenizer_dir, None, Failing, group_size=3)
    with pytest.raises(RuntimeError, match="rollout 2"):
        await env.collect_trajectories(1)
    assert ended == [1, 3]


async def test_an_evaluation_that_fails_leaves_nothing_running(tiny_tokenizer_dir: Path):
    env = make_env(tiny_tokenizer_dir, max_eval_workers=2)
    started: list[int] = []

    async def work(index: int) -> int:
        started.append(index)
        await asyncio.sleep(0.01 if index == 0 else 60)
        raise RuntimeError(f"item {index}")

    with pytest.raises(RuntimeError, match="item 0"):
        await env.gather_eval(work(index) for index in range(8))
    assert len(started) <= 3  # the free place may have been taken before the failure was known
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_default_group_needs_dicts(tiny_tokenizer_dir: Path):
    class Wrong(NumbersEnv):
        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            return None, []

    with pytest.raises(ValueError, match="returned NoneType where a ScoredDataItem"):
        await make_env(tiny_tokenizer_dir, None, Wrong).collect_trajectories(1)


def test_bodies_are_gzipped_when_that_helps(tiny_tokenizer_dir: Path):
    posted: list[dict[str, Any]] = []

    class Session:
        def post(self, url: str, **kwargs: Any) -> str:
            posted.append({"url": url, **kwargs})
            return "context manager"

    env = make_env(tiny_tokenizer_dir)
    assert env._post_json_with_compression(Session(), "http://x/scored_data", {"a": 1}) == "context manager"
    env._post_json_with_compression(Session(), "http://x/scored_data", {"a": [7] * 1000})
    assert json.loads(posted[0]["data"]) == {"a": 1}
    assert "Content-Encoding" not in posted[0]["headers"]
    assert posted[1]["headers"]["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(posted[1]["data"])) == {"a": [7] * 1000}
