"""The service loop: order of hooks, boundaries, evaluation, restarts, failures."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs import env_runner
from atroposlib.envs.server_handling.policy_versions import note_policy_versions
from atroposlib.errors import ConfigError, InferenceUnavailableError, RolloutRejectedError
from simple_env import NumbersEnv, RecordingClient, make_env, some_groups, some_rounds, wait_until


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_runner, "STATUS_INTERVAL_S", 0.01)
    monkeypatch.setattr(env_runner, "REPORT_INTERVAL_S", 0.05)
    monkeypatch.setattr(env_runner, "TRAINER_POLL_S", 0.01)
    monkeypatch.setattr(env_runner, "FIRST_RETRY_S", 0.01)


@asynccontextmanager
async def serving(env: Any) -> AsyncIterator[asyncio.Task[None]]:
    """Run the loop in the background and end it, however the test ends."""
    task = asyncio.create_task(env.env_manager())
    try:
        yield task
    finally:
        if not task.done():
            task.cancel()
        await asyncio.wait([task])


async def test_told_to_stop_while_it_waits_for_a_trainer_it_closes_its_connections(tiny_tokenizer_dir: Path):
    class NoTrainer(RecordingClient):
        async def wandb_info(self) -> dict[str, Any]:
            asked.set()
            return {"group": None, "project": None}

        async def aclose(self) -> None:
            closed.append("rollout server")

    class Waiting(NumbersEnv):
        async def setup_wandb(self) -> None:
            await self.runner.wait_for_wandb_info()

        async def close_servers(self) -> None:
            closed.append("inference servers")

    asked, closed = asyncio.Event(), list[str]()
    async with serving(make_env(tiny_tokenizer_dir, NoTrainer(), Waiting)):
        await asked.wait()
    assert closed == ["rollout server", "inference servers"]


async def test_hooks_are_called_in_order_and_through_the_environment(tiny_tokenizer_dir: Path):
    class Traced(NumbersEnv):
        async def setup_wandb(self) -> None:
            self.calls.append("setup_wandb")

        async def register_env(self) -> None:
            self.calls.append("register_env")
            await super().register_env()

        async def get_server_info(self) -> None:
            self.calls.append("get_server_info")
            await super().get_server_info()

        async def get_status(self) -> None:
            self.calls.append("get_status")
            await super().get_status()

        async def env_step_checks(self) -> None:
            self.calls.append("env_step_checks")
            await super().env_step_checks()

        async def add_train_workers(self) -> None:
            self.calls.append("add_train_workers")
            await super().add_train_workers()

        async def handle_env(self, item_uuid: str) -> Any:
            self.calls.append("handle_env")
            return await super().handle_env(item_uuid)

        async def postprocess_histories(self, trajectories: Any) -> Any:
            self.calls.append("postprocess_histories")
            return trajectories

        async def handle_send_to_api(self, *args: Any, **kwargs: Any) -> None:
            self.calls.append("handle_send_to_api")
            await super().handle_send_to_api(*args, **kwargs)

        async def _send_scored_data_to_api(self, scored_data: Any) -> None:
            self.calls.append("_send_scored_data_to_api")
            await super()._send_scored_data_to_api(scored_data)

        async def cleanup(self) -> None:
            self.calls.append("cleanup")

    client = RecordingClient()
    env = make_env(tiny_tokenizer_dir, client, Traced, max_num_workers=1)
    async with serving(env):
        await wait_until(lambda: "cleanup" in env.calls)
    assert env.calls[:7] == [
        "setup",
        "setup_wandb",
        "register_env",
        "get_server_info",
        "get_status",
        "env_step_checks",
        "add_train_workers",
    ]
    first = env.calls.index("handle_env")
    flow = [call for call in env.calls[first:] if call not in ("get_status", "env_step_checks", "add_train_workers")]
    assert flow[:5] == [
        "handle_env",
        "postprocess_histories",
        "handle_send_to_api",
        "_send_scored_data_to_api",
        "cleanup",
    ]
    assert client.disconnected


async def test_registration_waits_for_server_and_trainer(tiny_tokenizer_dir: Path, caplog: pytest.LogCaptureFixture):
    client = RecordingClient()
    client.unreachable, client.waits_for_trainer = 2, 2
    env = make_env(tiny_tokenizer_dir, client, max_token_length=99, inference_weight=2.0, min_batch_allocation=0.25)
    async with serving(env):
        await wait_until(lambda: client.groups)
    assert len(client.registrations) == 5
    assert client.registrations[-1] == {
        "name": "numbers",
        "max_token_length": 99,
        "weight": 2.0,
        "group_size": 2,
        "min_batch_allocation": 0.25,
    }
    assert env.wandb_prepend == "numbers_0"
    assert sum("does not answer" in record.getMessage() for record in caplog.records) == 1


async def test_an_unnamed_environment_uses_its_class_name(tiny_tokenizer_dir: Path):
    class Nameless(NumbersEnv):
        name = None

    env = make_env(tiny_tokenizer_dir, client := RecordingClient(), Nameless, total_steps=0)
    await env.env_manager()
    assert client.registrations[0]["name"] == "Nameless"


@pytest.mark.parametrize(
    ("interval", "steps", "expected"), [(1, range(1, 15), 14), (5, (3, 8, 13, 20), 3), (0, range(1, 9), 0)]
)
async def test_evaluations_fire_at_every_boundary(tiny_tokenizer_dir: Path, interval: int, steps: Any, expected: int):
    client = RecordingClient()
    env = make_env(tiny_tokenizer_dir, client, steps_per_eval=interval, eval_handling="NONE")
    async with serving(env):
        await wait_until(lambda: client.groups)
        for step in steps:
            client.step = step
            await wait_until(lambda step=step: env.curr_step == step)
            await asyncio.sleep(0)
        await wait_until(lambda: env.eval_runner is None or env.eval_runner.done())
    assert len(env.evaluations) == expected


async def test_an_evaluation_due_during_another_runs_afterwards(tiny_tokenizer_dir: Path):
    class Slow(NumbersEnv):
        gate = asyncio.Event()

        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            self.evaluations.append(self.curr_step)
            await self.gate.wait()

    client = RecordingClient()
    env = make_env(tiny_tokenizer_dir, client, Slow, steps_per_eval=1, eval_handling="NONE")
    async with serving(env):
        for step in (1, 2, 3):
            client.step = step
            await wait_until(lambda step=step: env.curr_step == step)
        assert len(env.evaluations) == 1
        env.gate.set()
        await wait_until(lambda: len(env.evaluations) == 2)


async def test_a_failing_evaluation_is_counted_and_training_goes_on(
    tiny_tokenizer_dir: Path, caplog: pytest.LogCaptureFixture
):
    class Broken(NumbersEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no test set")

    client = RecordingClient()
    env = make_env(tiny_tokenizer_dir, client, Broken, steps_per_eval=1)
    async with serving(env):
        for step in (1, 2):
            client.step = step
            await wait_until(lambda step=step: env.curr_step == step)
        count = len(client.groups)
        await wait_until(lambda: len(client.groups) > count)
    assert env.statistics.failures.by_place["evaluate"] == 2
    assert caplog.text.count("\nRuntimeError: no test set") == 1


async def test_stop_train_returns_items_and_starts_none_until_the_end(tiny_tokenizer_dir: Path):
    class Slow(NumbersEnv):
        gate = asyncio.Event()

        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            await self.gate.wait()

    client = RecordingClient(batch_size=64)
    env = make_env(tiny_tokenizer_dir, client, Slow, steps_per_eval=1, eval_handling="STOP_TRAIN")
    env.rollout_s = 60.0
    async with serving(env):
        await wait_until(lambda: env.running == 8)
        client.step = 1
        await wait_until(lambda: env.running == 0)
        assert env.backlog == [0, 1, 2, 3]
        await some_rounds(client)
        assert env.workers == set()
        env.rollout_s = 0.0
        env.gate.set()
        await wait_until(lambda: len(client.groups) >= 4)
    texts = [env.tokenizer.decode(group["tokens"][0]) for group in client.groups[:4]]
    assert texts == ["item 0", "item 1", "item 2", "item 3"]


async def test_limit_train_lets_running_groups_finish_and_halves_new_ones(tiny_tokenizer_dir: Path):
    class Slow(NumbersEnv):
        gate = asyncio.Event()

        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            await self.gate.wait()

    client = RecordingClient(batch_size=64)
    env = make_env(
        tiny_tokenizer_dir, client, Slow, steps_per_eval=1, eval_handling="LIMIT_TRAIN", eval_limit_ratio=0.5
    )
    env.rollout_s = 0.05
    async with serving(env):
        await wait_until(lambda: len(env.workers) == 4)
        client.step = 1
        await wait_until(lambda: env.curr_step == 1)
        await wait_until(lambda: len(env.workers) <= 2)
        env.most_running = 0
        await some_groups(client, 6)
        assert env.most_running == 4  # two groups of two
        assert env.statistics.num_worker_cancellations == 0
        env.gate.set()
        await wait_until(lambda: env.most_running == 8)


async def test_a_full_queue_stops_new_groups_but_cancels_none(tiny_tokenizer_dir: Path):
    client = RecordingClient(batch_size=8)
    env = make_env(tiny_tokenizer_dir, client, max_batches_offpolicy=2)
    env.rollout_s = 0.1
    async with serving(env):
        await wait_until(lambda: len(env.workers) == 4)
        client.queue_size = 100
        await wait_until(lambda: len(client.groups) == 4)
        await some_rounds(client)
        assert len(client.groups) == 4
        assert env.workers == set()
        assert env.backlog == []
        assert env.statistics.num_worker_cancellations == 0
        client.queue_size = 0
        await wait_until(lambda: len(client.groups) > 4)


async def test_checkpoints_fire_at_every_boundary_and_are_found_again(tiny_tokenizer_dir: Path, tmp_path: Path):
    class Saving(NumbersEnv):
        def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
            super().save_checkpoint(step, {"position": self.position})

    client = RecordingClient(checkpoint_dir=str(tmp_path), checkpoint_interval=1)
    env = make_env(tiny_tokenizer_dir, client, Saving)
    async with serving(env):
        await wait_until(lambda: client.groups)
        for step in range(1, 6):
            client.step = step
            await wait_until(lambda step=step: env.curr_step == step)
    folder = tmp_path / "env_checkpoints" / "numbers_0"
    assert sorted(path.name for path in folder.glob("step-*.json")) == [f"step-{step}.json" for step in range(1, 6)]
    saved = json.loads((folder / "step-5.json").read_text())["position"]

    client.starting_step = client.step = 7  # the trainer went on while this environment was away
    again = make_env(tiny_tokenizer_dir, client, Saving, total_steps=7)
    await again.env_manager()
    assert again.position == saved


async def test_a_new_rollout_server_is_joined_under_the_same_name(tiny_tokenizer_dir: Path):
    client = RecordingClient()
    env = make_env(tiny_tokenizer_dir, client)
    async with serving(env):
        await wait_until(lambda: client.groups)
        client.step = 3
        await wait_until(lambda: env.curr_step == 3)
        client.unreachable = 5
        client.forgets = 1
        await wait_until(lambda: len(client.registrations) == 2)
        count = len(client.groups)
        await wait_until(lambda: len(client.groups) > count)
    assert [entry["name"] for entry in client.registrations] == ["numbers", "numbers"]
    assert env.env_id == 1
    assert client.groups[-1]["env_id"] == 1
    assert env.curr_step == 3


async def test_failures_of_user_code_are_counted_shown_once_and_never_a_score(
    tiny_tokenizer_dir: Path, caplog: pytest.LogCaptureFixture
):
    class Flaky(NumbersEnv):
        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            if item % 2:
                raise ZeroDivisionError("the grader divides by zero")
            return await super().collect_trajectory(item)

    client = RecordingClient()
    env = make_env(tiny_tokenizer_dir, client, Flaky)
    async with serving(env):
        await wait_until(lambda: len(client.groups) >= 5)
    assert env.statistics.failures.by_place["collect_trajectories"] >= 4
    assert caplog.text.count("\nZeroDivisionError: the grader divides by zero") == 1
    assert all("item" in env.tokenizer.decode(group["tokens"][0]) for group in client.groups)
    assert all(int(env.tokenizer.decode(group["tokens"][0]).split()[1]) % 2 == 0 for group in client.groups)


async def test_a_failing_item_source_does_not_spin(tiny_tokenizer_dir: Path):
    class Dry(NumbersEnv):
        async def get_next_item(self) -> Any:
            raise OSError("data set gone")

    client = RecordingClient()
    env = make_env(tiny_tokenizer_dir, client, Dry)
    async with serving(env):
        await wait_until(lambda: env.statistics.failures.by_place["get_next_item"] >= 4)
        await asyncio.sleep(0.1)
    assert env.statistics.failures.by_place["get_next_item"] < 15


async def test_items_return_when_no_inference_server_answers(tiny_tokenizer_dir: Path):
    class Outage(NumbersEnv):
        up = False

        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            if not self.up:
                raise InferenceUnavailableError("no server answers", url="http://127.0.0.1:1")
            return await super().collect_trajectory(item)

    client = RecordingClient()
    env = make_env(tiny_tokenizer_dir, client, Outage, max_num_workers=2)
    async with serving(env):
        await wait_until(lambda: env.statistics.failures.by_place["inference_unavailable"] >= 2)
        env.up = True
        await wait_until(lambda: len(client.groups) >= 2)
    items = {env.tokenizer.decode(group["tokens"][0]) for group in client.groups}
    assert {"item 0", "item 1"} <= items


async def test_overdue_groups_are_tried_once_more(tiny_tokenizer_dir: Path, caplog: pytest.LogCaptureFixture):
    class Stuck(NumbersEnv):
        tries: list[int] = []  # noqa: RUF012 - one environment in this test

        async def get_next_item(self) -> Any:
            return "stuck" if self.position == 0 and not await super().get_next_item() else None

        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            self.tries.append(1)
            await asyncio.sleep(60)
            return None, []

    client = RecordingClient()
    env = make_env(tiny_tokenizer_dir, client, Stuck, worker_timeout=0.05)
    async with serving(env):
        await wait_until(lambda: env.statistics.num_timeouts == 2)
        await some_rounds(client)
    assert len(env.tries) == 2
    assert env.backlog == []
    assert "given up" in caplog.text


async def test_the_backlog_is_first_in_first_out(tiny_tokenizer_dir: Path):
    class Forking(NumbersEnv):
        seen: list[Any] = []  # noqa: RUF012 - one environment in this test

        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            self.seen.append(item)
            return None, ["a", "b", "c"] if item == 0 else []

    env = make_env(tiny_tokenizer_dir, RecordingClient(), Forking, max_num_workers=1)
    async with serving(env):
        await wait_until(lambda: len(env.seen) >= 5)
    assert env.seen[:5] == [0, "a", "b", "c", 1]


async def test_policy_versions_of_the_replies_reach_the_group(tiny_tokenizer_dir: Path):
    class Versioned(NumbersEnv):
        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            note_policy_versions([item, item + 1])
            return await super().collect_trajectory(item)

    class WholeGroup(Versioned):
        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            group, backlog = await super().collect_trajectories(item)
            del group["policy_versions"]
            return [group], backlog

    for env_class in (Versioned, WholeGroup):
        client = RecordingClient()
        env = make_env(tiny_tokenizer_dir, client, env_class)
        async with serving(env):
            await wait_until(lambda client=client: client.groups)
        assert client.groups[0]["policy_versions"] == [[0, 1], [0, 1]]


async def test_total_steps_of_the_trainer(tiny_tokenizer_dir: Path):
    client = RecordingClient()
    client.num_steps = 3
    env = make_env(tiny_tokenizer_dir, client, total_steps=-1)
    async with serving(env) as task:
        await wait_until(lambda: client.groups)
        assert not task.done()
        client.step = 3
        await asyncio.wait_for(task, 5)
    assert env.config.total_steps == 3

    client = RecordingClient()
    client.num_steps = -1
    with pytest.raises(ConfigError, match="total_steps is -1"):
        await make_env(tiny_tokenizer_dir, client, total_steps=-1).env_manager()


async def test_no_group_is_started_for_steps_that_never_come(tiny_tokenizer_dir: Path):
    client = RecordingClient(batch_size=8)
    env = make_env(tiny_tokenizer_dir, client, total_steps=5, max_batches_offpolicy=100)
    client.step, client.queue_size = 3, 12  # three batches wait: more than the two steps left
    async with serving(env) as task:
        await some_rounds(client)
        assert client.groups == []
        assert not task.done()  # checkpoints and evaluations of the last steps are still to come
        client.step, client.queue_size = 5, 4
        await asyncio.wait_for(task, 5)


async def test_the_evaluation_of_the_last_step_is_completed_and_logged(tiny_tokenizer_dir: Path):
    class Thorough(NumbersEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            await asyncio.sleep(0.1)
            self.calls.append("evaluated")

        async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
            self.calls.append("logged")

    client = RecordingClient()
    env = make_env(tiny_tokenizer_dir, client, Thorough, total_steps=4, steps_per_eval=4)
    async with serving(env) as task:
        await wait_until(lambda: client.groups)
        client.step = 4
        await asyncio.wait_for(task, 5)
    assert env.calls[-2:] == ["evaluated", "logged"]


async def test_metrics_are_reported_while_it_runs(tiny_tokenizer_dir: Path):
    client = RecordingClient()
    env = make_env(tiny_tokenizer_dir, client)
    async with serving(env):
        await wait_until(lambda: any(metrics.get("rollout/num_groups_sent") for _, _, metrics in client.reports))
    source, _, metrics = client.reports[-1]
    assert source == "env:numbers_0"
    assert metrics["rollout/reward_mean"] == 0.5
    assert metrics["rollout/num_groups_sent"] >= 1


async def test_logging_waits_for_enough_groups(tiny_tokenizer_dir: Path):
    class Logging(NumbersEnv):
        logged: list[int] = []  # noqa: RUF012 - one environment in this test

        async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
            self.logged.append(self.curr_step)
            await super().wandb_log(wandb_metrics)

    client = RecordingClient(batch_size=8)
    env = make_env(tiny_tokenizer_dir, client, Logging, min_items_sent_before_logging=1000)
    async with serving(env):
        await wait_until(lambda: client.groups)
        client.step = 1
        await wait_until(lambda: env.curr_step == 1)
        assert env.logged == []
        env.config.min_items_sent_before_logging = 0
        client.step = 2
        await wait_until(lambda: env.logged == [2])
    assert env.items_sent_this_step < 1000


async def test_a_group_larger_than_the_batch_is_refused_at_once(tiny_tokenizer_dir: Path):
    with pytest.raises(ConfigError, match=r"group_size \(16\) is larger than the trainer's batch_size \(8\)"):
        await make_env(tiny_tokenizer_dir, RecordingClient(batch_size=8), group_size=16).env_manager()


async def test_the_own_batch_size_serves_when_the_trainer_gives_none(tiny_tokenizer_dir: Path):
    client = RecordingClient(batch_size=-1, max_token_len=-1)
    env = make_env(tiny_tokenizer_dir, client, batch_size=4)
    async with serving(env):
        await wait_until(lambda: client.groups)
    assert env.config.batch_size == 4
    assert env.max_token_len == -1


async def test_nothing_is_said_every_loop(tiny_tokenizer_dir: Path, caplog: pytest.LogCaptureFixture):
    client = RecordingClient()
    env = make_env(tiny_tokenizer_dir, client)
    with caplog.at_level(logging.INFO):
        async with serving(env):
            await wait_until(lambda: len(client.groups) > 20)
    assert len([record for record in caplog.records if record.name.startswith("atroposlib")]) < 6


async def test_a_refused_registration_closes_the_connection(tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch):
    class Refused(NumbersEnv):
        async def register_env(self) -> None:
            raise RolloutRejectedError("refused with 401", status=401)

    env = make_env(tiny_tokenizer_dir, RecordingClient(), Refused)
    closed: list[bool] = []

    async def aclose() -> None:
        closed.append(True)

    monkeypatch.setattr(env.rollout_client, "aclose", aclose)
    with pytest.raises(RolloutRejectedError):
        await env.env_manager()
    assert closed == [True]
