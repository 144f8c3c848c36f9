"""Foreign environments: rewards meet their own rollout's tokens, failures are tried again, a dead worker comes back.

The short tests run the worker against a stand-in for the package; the slow ones against real installations, found under
``.cache/verifiers-0.4`` and ``.cache/verifiers-0.3`` (``pip install verifiers==0.4.0``, ``==0.3.1``) or named by
``ATROPOS_VERIFIERS_PYTHON_04`` and ``_03``.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from atroposlib.api.client import TrainerClient
from atroposlib.cli.main import main as atropos
from atroposlib.cli.serve_verifiers import parse, settings_of
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.server_handling.recorded_endpoint import RecordedEndpoint
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.verifiers_env import VerifiersConfig, VerifiersEnv, require_exact_tokens, split_tasks
from atroposlib.envs.verifiers_worker import StartError, Worker
from atroposlib.envs.worker_process import WorkerProcess
from atroposlib.errors import ConfigError, WorkerError
from atroposlib.testing.api import serve_api
from atroposlib.testing.harness_server import HarnessServer
from atroposlib.testing.scripted_server import script

SAMPLES = Path(__file__).parent / "verifiers_samples"
ROOT = Path(__file__).parents[3]


def counting() -> Callable[[str, int], str]:
    """A different reply for every call: whoever gets another's tokens is found out."""
    numbers = itertools.count(1)
    return lambda prompt, choice: f"code-{next(numbers)}"


@asynccontextmanager
async def running(tiny_tokenizer: Any, reply: Any, **settings: Any) -> AsyncIterator[tuple[Any, HarnessServer]]:
    folder = tiny_tokenizer.name_or_path
    with HarnessServer(tokenizer=tiny_tokenizer, reply=reply) as server:
        config = VerifiersConfig(
            tokenizer_name=folder, use_wandb=False, group_size=4, max_token_length=200, num_eval_tasks=2, **settings
        )
        servers = [APIServerConfig(base_url=server.base_url, model_name=folder, server_type="vllm", health_check=False)]
        env = VerifiersEnv(config, servers)
        try:
            await env.setup()
            yield env, server
        finally:
            await env.stop()
            await env.server.aclose()


def codes(tokenizer: Any, masks: list[int]) -> list[int]:
    return [int(code) for code in re.findall(r"code-(\d+)", tokenizer.decode([mask for mask in masks if mask != -100]))]


async def check_two_turn_groups(env: Any, tokenizer: Any, *, num_groups: int = 2) -> None:
    """Every sequence of every group holds the code its reward was computed from, as its last trained words."""
    items = [await env.get_next_item() for _ in range(num_groups)]
    groups = [group for group, _ in await asyncio.gather(*(env.collect_trajectories(item) for item in items))]
    seen: set[int] = set()
    for group, item in zip(groups, items, strict=True):
        assert len(group["tokens"]) == 4
        for tokens, masks, logprobs, score in zip(
            group["tokens"], group["masks"], group["inference_logprobs"], group["scores"], strict=True
        ):
            first, last = codes(tokenizer, masks)
            assert last == score
            assert first < last
            text = tokenizer.decode(tokens)
            assert f"Task {item}: say a code." in text
            assert text.count("Another one.") == 1
            assert len(tokens) == len(masks) == len(logprobs)
            assert all((logprob == 1.0) == (mask == -100) for logprob, mask in zip(logprobs, masks, strict=True))
            seen |= {first, last}
    assert len(seen) == num_groups * 4 * 2  # no reply is in two sequences


# ---------------------------------------------------------------------- with the stand-in


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("PYTHONPATH", f"{SAMPLES / 'stand_in'}:{SAMPLES}")
    return {"verifiers_env": "sample-older", "verifiers_python": sys.executable}


async def test_rewards_meet_their_own_tokens(tiny_tokenizer: Any, stand_in: dict[str, Any]) -> None:
    async with running(tiny_tokenizer, counting(), **stand_in) as (env, server):
        assert list(env.eval_indices) == [0, 1]
        await check_two_turn_groups(env, tiny_tokenizer)
        assert env.num_failed_rollouts == 0
        assert env.endpoint._sessions == {}  # what was read is closed

        # a reward function that raises is not a reward of 0: the rollout is run again
        texts = iter(["a", "b", "c", "d", "code-7", "nothing", "code-8", "code-9", "again", "code-10"])
        server.reply = lambda prompt, choice: next(texts)
        group, _ = await env.collect_trajectories(3)
        assert sorted(group["scores"]) == [7.0, 8.0, 9.0, 10.0]
        assert env.num_failed_rollouts == 1

        # one that never works gives no group
        server.reply = lambda prompt, choice: "nothing"
        assert await env.collect_trajectories(3) == (None, [])

        # the worker is started again after it has died
        server.reply = counting()
        env.worker._process.kill()
        await env.worker._process.wait()
        await check_two_turn_groups(env, tiny_tokenizer, num_groups=1)
        assert env.worker.num_starts == 2
        await env.evaluate()


async def test_a_rollout_of_which_nothing_was_recorded_is_a_failure_that_is_told(
    tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = VerifiersConfig(tokenizer_name=tiny_tokenizer.name_or_path, use_wandb=False, group_size=2)
    env = VerifiersEnv(config, [], testing=True)

    class Silent:
        async def call(self, operation: str, *, n: int, **fields: Any) -> list[dict[str, Any]]:
            return [{"session": f"s{i}", "reward": 1.0, "error": None, "metrics": {}, "agent": ""} for i in range(n)]

        def take(self, rollout: str) -> list[Any]:
            return []

    env.foreign = env.endpoint = Silent()  # type: ignore[assignment]
    env.num_failed_rollouts = 0
    assert await env.collect_trajectories(0) == (None, [])
    assert env.num_failed_rollouts == 2 * config.max_rollout_tries
    assert "no model call was recorded under its id" in caplog.text


async def test_endpoint_keeps_rollouts_apart_and_strangers_out(tiny_tokenizer: Any) -> None:
    manager = ServerManager([], testing=True)
    script(type("Env", (), {"server": manager, "tokenizer": tiny_tokenizer})(), ["first", "second", "third"])
    endpoint = RecordedEndpoint(manager, tiny_tokenizer, model_name="policy")
    await endpoint.start()
    try:
        async with aiohttp.ClientSession() as session:

            async def say(text: str, rollout: str) -> str:
                body = {"model": "x", "messages": [{"role": "user", "content": text}], "max_tokens": 20}
                async with session.post(
                    f"{endpoint.base_url}/chat/completions", json=body, headers={"X-Session-ID": rollout}
                ) as reply:
                    assert reply.status == 200
                    return str((await reply.json())["choices"][0]["message"]["content"])

            assert [await say("hi", "a"), await say("hi", "b"), await say("other", "a")] == ["first", "second", "third"]
            root = endpoint.base_url.split("/rollouts/")[0]
            for url in (f"{root}/rollouts/guess/v1/chat/completions", f"{root}/sessions/create"):
                async with session.post(url, json={"messages": [{"role": "user", "content": "x"}]}) as reply:
                    assert reply.status in (401, 404)
        assert [codes_of.full_text.count("hi") for codes_of in endpoint.take("b")] == [1]
        assert len(endpoint.take("a")) == 2  # two conversations are two branches
        assert endpoint.take("a") == []
        assert endpoint.take("never") == []
    finally:
        await endpoint.stop()


async def test_worker_process_errors(tmp_path: Path) -> None:
    echo = tmp_path / "echo.py"
    echo.write_text(
        "import json, os, sys\n"
        "out = os.fdopen(int(sys.argv[-1]), 'w', buffering=1)\n"
        "for line in sys.stdin:\n"
        "    request = json.loads(line)\n"
        "    if request['op'] == 'die': sys.exit(3)\n"
        "    reply = {'error': 'no'} if request['op'] == 'fail' else {'result': request['value']}\n"
        "    out.write(json.dumps({'id': request['id'], **reply}) + '\\n')\n"
    )
    worker = WorkerProcess([sys.executable, str(echo)])
    assert await asyncio.gather(*(worker.call("echo", value=n) for n in range(20))) == list(range(20))
    with pytest.raises(WorkerError, match="no"):
        await worker.call("fail")
    with pytest.raises(WorkerError, match="exit code 3"):
        await worker.call("die")
    assert await worker.call("echo", value="alive") == "alive"
    assert worker.num_starts == 2
    await worker.stop()
    await worker.stop()
    with pytest.raises(WorkerError, match="cannot start"):
        await WorkerProcess([str(tmp_path / "nothing")]).call("echo")


async def test_a_reply_that_cannot_be_read_ends_the_worker_and_its_calls(tmp_path: Path) -> None:
    mumble = tmp_path / "mumble.py"
    mumble.write_text(
        "import json, os, sys\n"
        "out = os.fdopen(int(sys.argv[-1]), 'w', buffering=1)\n"
        "for line in sys.stdin:\n"
        "    request = json.loads(line)\n"
        "    if request['op'] == 'half':\n"
        '        out.write(\'{"id": 1, "res\')\n'
        "        out.flush()\n"
        "        os._exit(3)\n"
        "    if request['op'] == 'mumble': out.write('hm?\\n')\n"
        "    if request['op'] == 'nameless': out.write('{}\\n')\n"
        "    if request['op'] == 'echo': out.write(json.dumps({'id': request['id'], 'result': 7}) + '\\n')\n"
    )
    worker = WorkerProcess([sys.executable, str(mumble)])
    async with asyncio.timeout(20):
        with pytest.raises(WorkerError, match="exit code 3 after a reply that cannot be read"):
            await worker.call("half")
        for operation in ("mumble", "nameless"):
            failed = await asyncio.gather(worker.call(operation), worker.call("wait"), return_exceptions=True)
            assert [type(error) for error in failed] == [WorkerError, WorkerError]
        assert await worker.call("echo") == 7
        assert worker.num_starts == 4
        await worker.stop()


@pytest.mark.parametrize(
    ("path", "settings", "words"),
    [
        (
            "",
            {"verifiers_env": "nosuch"},
            "cannot import verifiers .*; install it there, or name another with --python",
        ),
        (
            "{stand_in}:{samples}",
            {"verifiers_env": "nosuch", "verifiers_api": "legacy"},
            "cannot load the verifiers environment 'nosuch': ModuleNotFoundError: No module named 'nosuch' .*line",
        ),
        (
            "{stand_in}:{samples}",
            {"verifiers_env": "sample-older", "verifiers_arguments": {"turns": 3}},
            "cannot load the verifiers environment 'sample-older': TypeError: .*'turns' .*line .*--args",
        ),
        (
            "{stand_in}:{folder}",
            {"verifiers_env": "needs-more"},
            "cannot load the verifiers environment 'needs-more': ModuleNotFoundError: .*'no_such' .*needs_more.py, line 1",
        ),
    ],
)
async def test_an_environment_that_cannot_be_loaded_is_one_line(
    tiny_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    path: str,
    settings: dict[str, Any],
    words: str,
) -> None:
    (tmp_path / "needs_more.py").write_text("import no_such\n")
    monkeypatch.setenv("PYTHONPATH", path.format(stand_in=SAMPLES / "stand_in", samples=SAMPLES, folder=tmp_path))
    with caplog.at_level("DEBUG", "atroposlib.envs.worker_process"), pytest.raises(WorkerError, match=words) as told:
        async with running(tiny_tokenizer, "x", verifiers_python=sys.executable, **settings):
            pass
    assert "\n" not in str(told.value)
    assert "Traceback" not in capfd.readouterr().err
    assert "Traceback" in caplog.text  # for whoever looks closer


async def test_an_environment_that_cannot_start_says_so_before_it_takes_requests() -> None:
    class NoDocker:
        async def start(self) -> None:
            raise OSError("docker is not\nrunning")

    with pytest.raises(StartError, match=r"cannot start: OSError: docker is not running \(.*, line \d+\)$"):
        await Worker(NoDocker(), io.StringIO()).run()


async def test_servers_without_tokens_are_refused(tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = VerifiersConfig(tokenizer_name=tiny_tokenizer.name_or_path, use_wandb=False, verifiers_env="x")
    env = VerifiersEnv(config, [APIServerConfig(base_url="http://127.0.0.1:1/v1", api_key="x", health_check=False)])
    with pytest.raises(ConfigError, match="no exact tokens"):
        await env.setup()
    monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "1")
    require_exact_tokens(env.server.servers)


def test_split_tasks() -> None:
    train, held_out = split_tasks({"api": "v1", "num_tasks": 12, "num_eval_tasks": 12}, 16, seed=0)
    assert held_out == [0, 1, 2]
    assert sorted(itertools.islice(train, 9)) == list(range(3, 12))
    endless, held_out = split_tasks({"api": "v1", "num_tasks": None, "num_eval_tasks": None}, 2, seed=0)
    assert list(itertools.islice(endless, 3)) == [2, 3, 4]
    assert held_out == [0, 1]
    train, held_out = split_tasks({"api": "legacy", "num_tasks": 3, "num_eval_tasks": 5}, 4, seed=0)
    assert sorted(itertools.islice(train, 3)) == [0, 1, 2]
    assert held_out == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="no tasks"):
        split_tasks({"api": "v1", "num_tasks": 0, "num_eval_tasks": 0}, 4, seed=0)


def test_command_line() -> None:
    options, rest = parse(
        ["my-env", "--python", sys.executable, "--args", '{"a": 1}', "--runtime", "own", "--env.group_size", "2"]
    )
    assert rest == ["serve", "--env.group_size", "2"]
    settings = settings_of(options)
    assert (settings["verifiers_env"], settings["verifiers_arguments"], settings["verifiers_runtime"]) == (
        "my-env",
        {"a": 1},
        None,
    )
    _, rest = parse(["my-env", "process", "--env.total_steps", "3"])
    assert rest == ["process", "--env.total_steps", "3"]
    for wrong, message in (
        ({"args": "{"}, "not JSON"),
        ({"args": "[1]"}, "JSON object"),
        ({"python": "/no/such"}, "not a program"),
    ):
        with pytest.raises(ConfigError, match=message):
            settings_of(type(options)(**{**vars(options), **wrong}))


@pytest.mark.slow  # the short form is test_served_to_a_trainer
def test_process_command_writes_groups(
    tiny_tokenizer: Any, stand_in: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with HarnessServer(tokenizer=tiny_tokenizer, reply=counting()) as server:
        code = atropos(
            [
                "serve-verifiers",
                "sample-older",
                "--args",
                '{"num_tasks": 4}',
                "process",
                "--env.tokenizer_name",
                tiny_tokenizer.name_or_path,
                "--env.group_size",
                "2",
                "--env.total_steps",
                "2",
                "--env.use_wandb",
                "false",
                "--env.data_path_to_save_groups",
                str(tmp_path / "out.jsonl"),
                "--openai.base_url",
                server.base_url,
                "--openai.model_name",
                tiny_tokenizer.name_or_path,
                "--openai.server_type",
                "vllm",
                "--openai.health_check",
                "false",
            ]
        )
    assert code == 0
    groups = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(groups) == 2
    for group in groups:
        assert [codes(tiny_tokenizer, masks)[-1] for masks in group["masks"]] == group["scores"]


def serve_and_train(tiny_tokenizer: Any, arguments: list[str], log: Path, *, num_batches: int) -> list[dict[str, Any]]:
    """The whole path: rollout server, ``atropos serve-verifiers`` in a process of its own, a trainer that takes batches."""
    folder = tiny_tokenizer.name_or_path
    with (
        HarnessServer(tokenizer=tiny_tokenizer, reply=counting()) as server,
        serve_api() as api,
        log.open("wb") as messages,
    ):
        flags = {
            "--env.tokenizer_name": folder,
            "--env.group_size": "4",
            "--env.rollout_server_url": api.url,
            "--env.max_num_workers": "2",
            "--env.use_wandb": "false",
            "--openai.base_url": server.base_url,
            "--openai.model_name": folder,
            "--openai.server_type": "vllm",
        }
        command = [sys.executable, "-m", "atroposlib.cli.main", "serve-verifiers", *arguments, "serve"]
        trainer = TrainerClient(api.url)
        trainer.register(batch_size=8, max_token_len=256, num_steps=100, checkpoint_dir="", save_checkpoint_interval=-1)
        env = subprocess.Popen(
            [*command, *(word for pair in flags.items() for word in pair)], stdout=messages, stderr=messages
        )
        groups: list[dict[str, Any]] = []
        try:
            for _ in range(num_batches):
                batch = None
                deadline = time.monotonic() + 120.0
                while batch is None:
                    assert env.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    batch = trainer.next_batch(timeout_s=2.0)
                groups += batch.groups
                trainer.ack(batch.seq)
        finally:
            trainer.close()
            env.terminate()
            assert env.wait(60) is not None
    return groups


def check_served(groups: list[dict[str, Any]], tokenizer: Any) -> None:
    everything: list[int] = []
    for group in groups:
        found = [codes(tokenizer, [int(mask) for mask in masks]) for masks in group["masks"]]
        assert [last for *_, last in found] == list(group["scores"])
        everything += [code for sequence in found for code in sequence]
    assert len(everything) == len(set(everything)) == len(groups) * 4 * 2


def test_served_to_a_trainer(tiny_tokenizer: Any, stand_in: dict[str, Any], tmp_path: Path) -> None:
    check_served(serve_and_train(tiny_tokenizer, ["sample-older"], tmp_path / "log", num_batches=2), tiny_tokenizer)


# ---------------------------------------------------------------------- with real installations


def real(version: str, sample: str) -> dict[str, Any]:
    python = os.environ.get(f"ATROPOS_VERIFIERS_PYTHON_{version.replace('.', '')}") or str(
        ROOT / ".cache" / f"verifiers-{version}" / "bin" / "python"
    )
    if not Path(python).exists():
        pytest.skip(f"verifiers {version} is not installed at {python}")
    return {"verifiers_env": sample, "verifiers_python": python}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "sample", "api"),
    [("0.4", "sample-taskset", "v1"), ("0.3", "sample-older", "legacy"), ("0.3", "sample-taskset", "v1")],
)
async def test_real_verifiers(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, version: str, sample: str, api: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SAMPLES))
    async with running(tiny_tokenizer, counting(), **real(version, sample)) as (env, server):
        info = await env.worker.call("info")
        assert (info["api"], info["num_tasks"]) == (api, 8)
        await check_two_turn_groups(env, tiny_tokenizer, num_groups=3)
        if api == "v1":
            assert {metrics["num_turns"] for metrics in env.rollout_metrics} == {2.0}
        server.reply = lambda prompt, choice: "nothing at all"  # the reward raises: no reward, so no group
        assert await env.collect_trajectories(5) == (None, [])
        assert env.num_failed_rollouts >= 4


@pytest.mark.slow
async def test_real_episodes_of_several_traces(tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Best-of-n plays each task n times in one episode; every one of those traces has its own reward and tokens."""
    monkeypatch.setenv("PYTHONPATH", str(SAMPLES))
    settings = real("0.4", "sample-taskset") | {"verifiers_arguments": {"id": "best-of-n", "n": 2}}
    async with running(tiny_tokenizer, counting(), **settings) as (env, _):
        group, _ = await env.collect_trajectories(5)
    assert group["group_overrides"] == {"group_size": 8}
    assert [codes(tiny_tokenizer, masks)[-1] for masks in group["masks"]] == group["scores"]


@pytest.mark.slow
@pytest.mark.parametrize(("version", "sample"), [("0.4", "sample-taskset"), ("0.3", "sample-older")])
def test_real_verifiers_served_to_a_trainer(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, sample: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SAMPLES))
    python = real(version, sample)["verifiers_python"]
    groups = serve_and_train(tiny_tokenizer, [sample, "--python", python], tmp_path / "log", num_batches=5)
    check_served(groups, tiny_tokenizer)


@pytest.mark.slow
async def test_real_program_of_the_null_harness(tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own chat program, started by uv in a process per rollout; uv fetches what the program needs."""
    settings = real("0.4", "sample-taskset") | {"verifiers_harness": "null"}
    folder = Path(settings["verifiers_python"]).parent
    if "ATROPOS_TEST_UV" not in os.environ or not (folder / "uv").exists():
        pytest.skip("set ATROPOS_TEST_UV=1 where uv is installed beside verifiers and a package index can be reached")
    monkeypatch.setenv("PYTHONPATH", str(SAMPLES))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    async with running(tiny_tokenizer, counting(), **settings) as (env, _):
        group, _ = await env.collect_trajectories(5)
    assert [codes(tiny_tokenizer, masks) for masks in group["masks"]] == [[int(score)] for score in group["scores"]]
    assert len(set(group["scores"])) == 4
