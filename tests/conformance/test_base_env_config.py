"""Every parameter of ``BaseEnvConfig``, changed in code, in YAML and by flag, and the effect one can see."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from atroposlib.envs import env_cli, env_runner
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.envs.env_config import EvalHandlingEnum
from atroposlib.errors import ConfigError
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer
from simple_env import NumbersEnv, RecordingClient, some_groups, some_rounds, wait_until

Make = Callable[..., Any]
SOURCES = ("code", "yaml", "flag")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_runner, "STATUS_INTERVAL_S", 0.01)


@pytest.fixture(params=SOURCES)
def make(request: pytest.FixtureRequest, tiny_tokenizer_dir: Path, tmp_path: Path) -> Make:
    """Build an environment whose parameters come from the source under test; ``base`` are fixed in config_init."""

    def build(
        parameters: dict[str, Any], *, env_class: type[NumbersEnv] = NumbersEnv, testing: bool = True, **base: Any
    ) -> Any:
        fixed = {
            "group_size": 2,
            "use_wandb": False,
            "max_num_workers": 4,
            "tokenizer_name": str(tiny_tokenizer_dir),
            **base,
        }
        servers = [APIServerConfig(base_url="http://127.0.0.1:1/v1", api_key="x") for _ in range(2)]
        if request.param == "code":
            config = env_class.env_config_cls(**{**fixed, **parameters})
            return env_class(config, servers, False, testing)

        class Configured(env_class):  # type: ignore[misc, valid-type]
            @classmethod
            def config_init(cls) -> tuple[Any, Any]:
                return env_class.env_config_cls(**fixed), servers

        argv = ["--slurm", "false", "--testing", str(testing).lower()]
        if request.param == "yaml":
            path = tmp_path / "parameters.yaml"
            path.write_text(yaml.safe_dump({"env": parameters}))
            argv += ["--config", str(path)]
        else:
            for name, value in parameters.items():
                argv += [f"--env.{name}", str(value)]
        return env_cli.build_env(Configured, env_cli.resolve(Configured, "serve", argv))

    return build


@asynccontextmanager
async def serving(env: Any, client: RecordingClient) -> AsyncIterator[asyncio.Task[None]]:
    env._rollout_client = client
    task = asyncio.create_task(env.env_manager())
    try:
        yield task
    finally:
        if not task.done():
            task.cancel()
        await asyncio.wait([task])


def group_of(env: Any, scores: list[float]) -> dict[str, Any]:
    ids = env.tokenizer.encode("abc")
    return {"tokens": [ids for _ in scores], "masks": [ids for _ in scores], "scores": scores}


def test_the_documented_defaults():
    documented = {
        "group_size": 4,
        "max_num_workers": -1,
        "max_eval_workers": 16,
        "max_num_workers_per_node": 8,
        "steps_per_eval": 100,
        "max_token_length": 2048,
        "eval_handling": EvalHandlingEnum.STOP_TRAIN,
        "eval_limit_ratio": 0.5,
        "inference_weight": 1.0,
        "batch_size": -1,
        "max_batches_offpolicy": 3,
        "tokenizer_name": "NousResearch/DeepHermes-3-Llama-3-3B-Preview",
        "use_wandb": True,
        "rollout_server_url": "http://localhost:8000",
        "total_steps": 1000,
        "wandb_name": None,
        "num_rollouts_to_keep": 32,
        "num_rollouts_per_group_for_logging": 1,
        "ensure_scores_are_not_same": True,
        "data_path_to_save_groups": None,
        "data_dir_to_save_evals": None,
        "min_items_sent_before_logging": 2,
        "include_messages": False,
        "min_batch_allocation": None,
        "worker_timeout": 600,
        "thinking_mode": False,
        "reasoning_effort": None,
        "max_reasoning_tokens": None,
        "custom_thinking_prompt": None,
    }
    assert BaseEnvConfig().model_dump() == documented


def test_unknown_arguments_are_ignored_and_fields_stay_mutable():
    config = BaseEnvConfig(group_name="old", max_gen_per_turn=3)  # type: ignore[call-arg]
    config.batch_size = 12
    assert config.batch_size == 12
    assert not hasattr(config, "group_name")


async def test_group_size(make: Make):
    env, client = make({"group_size": 3}), RecordingClient(batch_size=12)
    async with serving(env, client):
        await wait_until(lambda: client.groups)
    assert client.registrations[0]["group_size"] == 3
    assert {len(group["tokens"]) for group in client.groups} == {3}
    assert env.rollouts % 3 == 0


@pytest.mark.parametrize(
    ("parameters", "most"), [({"max_num_workers": 3}, 3), ({"max_num_workers": -1, "max_num_workers_per_node": 2}, 4)]
)
async def test_max_num_workers_and_per_node(make: Make, parameters: dict[str, int], most: int):
    env = make(parameters, testing=False)  # two servers
    assert env.max_num_workers == most
    env.rollout_s = 0.01
    client = RecordingClient(batch_size=1000)
    async with serving(env, client):
        await wait_until(lambda: len(client.groups) > 20)
    assert env.most_running == most * 2


async def test_max_eval_workers(make: Make):
    env = make({"max_eval_workers": 2})
    running = most = 0

    async def task() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1

    await env.gather_eval(task() for _ in range(8))
    assert most == 2


@pytest.mark.parametrize(("interval", "evaluations"), [(1, 4), (2, 2), (0, 0), (-1, 0)])
async def test_steps_per_eval(make: Make, interval: int, evaluations: int):
    env, client = make({"steps_per_eval": interval}), RecordingClient()
    async with serving(env, client):
        for step in (1, 2, 3, 4):
            client.step = step
            await wait_until(lambda step=step: env.curr_step == step)
            await asyncio.sleep(0.01)
    assert len(env.evaluations) == evaluations


async def test_max_token_length(make: Make):
    env, client = make({"max_token_length": 123}), RecordingClient(max_token_len=5)
    async with serving(env, client):
        await wait_until(lambda: env.statistics.rejected["too_long"] > 2)
    assert client.registrations[0]["max_token_length"] == 123
    assert client.groups == []  # "item 0" has six tokens: not cut, not sent, counted


class SlowEval(NumbersEnv):
    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        await asyncio.sleep(60)


@pytest.mark.parametrize(("handling", "running"), [("STOP_TRAIN", 0), ("LIMIT_TRAIN", 2), ("NONE", 8)])
async def test_eval_handling_and_limit_ratio(make: Make, handling: str, running: int):
    env = make(
        {"eval_handling": handling, "eval_limit_ratio": 0.25}, env_class=SlowEval, steps_per_eval=1, max_num_workers=8
    )
    env.rollout_s = 0.02
    client = RecordingClient(batch_size=1000)
    async with serving(env, client):
        await wait_until(lambda: len(env.workers) == 8)
        client.step = 1
        await wait_until(lambda: env.curr_step == 1)
        await wait_until(lambda: len(env.workers) <= running)
        assert env.statistics.num_worker_cancellations == (8 if handling == "STOP_TRAIN" else 0)
        env.most_running = 0
        await (some_groups(client, 24) if running else some_rounds(client))
        assert env.most_running == running * 2  # two rollouts in each group


@pytest.mark.parametrize(("weight", "share"), [(2.0, 0.25), (-1.0, 1.0)])
async def test_inference_weight(make: Make, weight: float, share: float):
    env = make({"inference_weight": weight}, testing=False)
    client = RecordingClient()
    client.env_weight = 0.25
    async with serving(env, client):
        await wait_until(lambda: client.groups)
    assert client.registrations[0]["weight"] == weight
    assert {server.sem.weight for server in env.server.servers} == {share}


@pytest.mark.parametrize(("announced", "used"), [(-1, 6), (20, 20)])
async def test_batch_size(make: Make, announced: int, used: int):
    env, client = make({"batch_size": 6}), RecordingClient(batch_size=announced)
    async with serving(env, client):
        await wait_until(lambda: client.groups)
    assert env.config.batch_size == used


@pytest.mark.parametrize("batches", [1, 2])
async def test_max_batches_offpolicy(make: Make, batches: int):
    env = make({"max_batches_offpolicy": batches}, max_num_workers=50)

    class Queue(RecordingClient):
        async def status(self) -> dict[str, Any]:
            self.queue_size = len(self.groups)
            return await super().status()

    client = Queue(batch_size=8)
    async with serving(env, client):
        await wait_until(lambda: len(client.groups) >= 4 * batches)
        await some_rounds(client)
    assert len(client.groups) == 4 * batches  # groups of two, batches of eight


async def test_tokenizer_name(make: Make, tmp_path: Path):
    folder = make_tiny_tokenizer(tmp_path / "another")
    assert make({"tokenizer_name": str(folder)}).tokenizer.name_or_path == str(folder)
    with pytest.raises(ConfigError, match="absent"):
        make({"tokenizer_name": str(tmp_path / "absent")})


@pytest.mark.parametrize("use", [True, False])
async def test_use_wandb(make: Make, monkeypatch: pytest.MonkeyPatch, use: bool):
    begun: list[dict[str, Any]] = []

    class Wandb:
        @staticmethod
        def init(**settings: Any) -> None:
            begun.append(settings)

    monkeypatch.setitem(sys.modules, "wandb", Wandb if use else None)  # None: importing it would raise
    env = make({"use_wandb": use, "total_steps": 0, "wandb_name": "name"}, use_wandb=not use)
    env._rollout_client = RecordingClient()
    await env.env_manager()
    assert [entry["project"] for entry in begun] == (["p"] if use else [])
    assert all(entry["name"].startswith("name-") for entry in begun)


async def test_rollout_server_url(make: Make):
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.path)
        if request.path == "/register-env":
            return web.json_response(
                {
                    "status": "success",
                    "env_id": 0,
                    "wandb_name": "n_0",
                    "checkpoint_dir": "",
                    "starting_step": 0,
                    "checkpoint_interval": -1,
                    "num_steps": 1,
                }
            )
        return web.json_response({"batch_size": 8, "max_token_len": 64, "current_step": 1, "queue_size": 0})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        env = make({"rollout_server_url": str(server.make_url("")).rstrip("/"), "total_steps": 1})
        await env.env_manager()
    assert seen[:3] == ["/register-env", "/info", "/status-env"]


@pytest.mark.parametrize(("total", "last"), [(3, 3), (-1, 5)])
async def test_total_steps(make: Make, total: int, last: int):
    env, client = make({"total_steps": total}), RecordingClient()
    client.num_steps = 5
    env.rollout_s = 0.5  # nothing waits in the queue: only the step counts
    async with serving(env, client) as task:
        for step in range(1, last + 1):
            assert not task.done()
            client.step = step
            await wait_until(lambda step=step: env.curr_step == step)
        await asyncio.wait_for(task, 5)
    assert client.disconnected


async def test_wandb_name(make: Make, monkeypatch: pytest.MonkeyPatch):
    import wandb

    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "log", lambda metrics, step: logged.append(metrics))
    env, client = make({"wandb_name": "sums"}), RecordingClient()
    async with serving(env, client):
        await wait_until(lambda: client.groups)
    assert client.registrations[0]["name"] == "sums"
    env.config.use_wandb = True
    await env.wandb_log({"x": 1})
    assert logged[0]["sums_0_x"] == 1


async def test_num_rollouts_to_keep(make: Make):
    env = make({"num_rollouts_to_keep": 3}, use_wandb=True)
    for score in range(5):
        await env.add_rollouts_for_wandb(group_of(env, [float(score), 9.0]))
    assert [rows[0][1] for rows in env.rollouts_for_wandb] == [2.0, 3.0, 4.0]


@pytest.mark.parametrize(("per_group", "rows"), [(1, 1), (2, 2), (-1, 3), (9, 3)])
async def test_num_rollouts_per_group_for_logging(make: Make, per_group: int, rows: int):
    env = make({"num_rollouts_per_group_for_logging": per_group}, use_wandb=True, group_size=8)
    await env.add_rollouts_for_wandb(group_of(env, [1.0, 2.0, 3.0]))
    assert len(env.rollouts_for_wandb[0]) == rows


@pytest.mark.parametrize(("ensure", "sent", "rejected"), [(True, 0, 1), (False, 1, 0)])
async def test_ensure_scores_are_not_same(make: Make, ensure: bool, sent: int, rejected: int):
    env = make({"ensure_scores_are_not_same": ensure})
    env._rollout_client = client = RecordingClient()
    await env.handle_send_to_api(group_of(env, [1.0, 1.0]))
    assert len(client.groups) == sent
    assert env.statistics.rejected["equal_scores"] == rejected


async def test_data_path_to_save_groups(make: Make, tmp_path: Path):
    path = tmp_path / "out" / "groups.jsonl"
    path.parent.mkdir()
    path.write_text("mine\n")
    env = make({"data_path_to_save_groups": str(path)})
    env._rollout_client = RecordingClient()
    await env.handle_send_to_api(group_of(env, [0.0, 1.0]))
    env.jsonl_writer.close()
    assert path.read_text() == "mine\n"
    assert json.loads((path.parent / "groups_1.jsonl").read_text())["scores"] == [0.0, 1.0]


async def test_data_dir_to_save_evals(make: Make, tmp_path: Path):
    env = make({"data_dir_to_save_evals": str(tmp_path / "evals")})
    await env.evaluate_log({"accuracy": 1.0}, verbose=False)
    assert json.loads((tmp_path / "evals" / "metrics.json").read_text())["results"]["all"] == {"accuracy": 1.0}


class Logging(NumbersEnv):
    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        self.calls.append(f"log {self.curr_step}")


@pytest.mark.parametrize(("minimum", "steps"), [(10**6, []), (0, ["log 1", "log 2"])])
async def test_min_items_sent_before_logging(make: Make, minimum: int, steps: list[str]):
    env, client = make({"min_items_sent_before_logging": minimum}, env_class=Logging), RecordingClient()
    async with serving(env, client):
        for step in (1, 2):
            client.step = step
            await wait_until(lambda step=step: env.curr_step == step)
    assert [call for call in env.calls if call.startswith("log")] == steps


@pytest.mark.parametrize("include", [True, False])
async def test_include_messages(make: Make, include: bool):
    env = make({"include_messages": include})
    env._rollout_client = client = RecordingClient()
    await env.handle_send_to_api(group_of(env, [0.0, 1.0]))
    expected = [[{"role": "user", "content": "abc"}]] * 2 if include else None
    assert client.groups[0].get("messages") == expected


async def test_min_batch_allocation(make: Make):
    env, client = make({"min_batch_allocation": 0.5}), RecordingClient(batch_size=8)
    client.queue_size = 0

    async def status() -> dict[str, Any]:
        return {
            "current_step": 0,
            "queue_size": 1000,
            "self_queue_size": 0,
            "unallocated_fraction": 0.5,
            "max_group_size": 2,
        }

    client.status = status  # type: ignore[method-assign]
    async with serving(env, client):
        await wait_until(lambda: client.groups)  # others filled the queue, but a share is reserved
    assert client.registrations[0]["min_batch_allocation"] == 0.5


async def test_worker_timeout(make: Make):
    env, client = make({"worker_timeout": 0.05}, max_num_workers=1), RecordingClient()
    env.rollout_s = 60.0
    async with serving(env, client):
        await wait_until(lambda: env.statistics.num_timeouts == 2)
    assert env.rollouts >= 4  # two rollouts, tried twice
    unlimited, client = make({"worker_timeout": 0}, max_num_workers=1), RecordingClient()
    unlimited.rollout_s = 0.1
    async with serving(unlimited, client):
        await wait_until(lambda: client.groups)
    assert unlimited.statistics.num_timeouts == 0


@pytest.mark.parametrize(
    ("parameters", "body"),
    [
        ({"thinking_mode": True}, {"reasoning": {"enabled": True}}),
        ({"reasoning_effort": "high"}, {"reasoning": {"enabled": True, "effort": "high"}}),
        ({"max_reasoning_tokens": 2048}, {"reasoning": {"enabled": True, "max_tokens": 2048}}),
        ({"thinking_mode": False}, None),
    ],
)
async def test_reasoning_settings_reach_the_servers(make: Make, parameters: dict[str, Any], body: Any):
    env = make(parameters, testing=False)
    for server in env.server.servers:
        assert server.reasoning_config.build_extra_body("http://127.0.0.1:1/v1") == body


@pytest.mark.parametrize("parameters", [{"reasoning_effort": "huge"}, {"max_reasoning_tokens": 10}])
async def test_wrong_reasoning_settings_are_refused(make: Make, parameters: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(parameters))):
        make(parameters)


async def test_custom_thinking_prompt(make: Make):
    assert make({"custom_thinking_prompt": "Think first."}).config.custom_thinking_prompt == "Think first."


def test_every_parameter_has_a_test_here():
    source = Path(__file__).read_text()
    tested = [
        name for name in BaseEnvConfig.model_fields if f'"{name}"' in source.split("def test_unknown_arguments")[1]
    ]
    assert sorted(set(BaseEnvConfig.model_fields) - set(tested)) == []
