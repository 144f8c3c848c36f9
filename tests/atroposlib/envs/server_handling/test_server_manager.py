"""Many servers as one: building them, routing, splitting n, failing over, sessions."""

from __future__ import annotations

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs.server_handling import server_building
from atroposlib.envs.server_handling.adaptive_semaphore import AsyncSemWithAdaptiveWeight
from atroposlib.envs.server_handling.server_harness import DeterministicServer, ServerHarness, create_chat_completion
from atroposlib.envs.server_handling.server_manager import (
    APIServerConfig,
    DummyManagedServer,
    ManagedServer,
    OpenAIServer,
    ServerBaseline,
    ServerManager,
    ServerManagerConfig,
    SGLangServer,
    VLLMServer,
)
from atroposlib.errors import ConfigError, InferenceServerError, InferenceUnavailableError
from atroposlib.testing.harness_server import HarnessServer

MESSAGES = [{"role": "user", "content": "hi"}]


class Stub:
    """A server reduced to what routing looks at."""

    def __init__(self, name: str, slots: int = 8, eval_slots: int = 8, healthy: bool = True) -> None:
        self.name, self.server_healthy = name, healthy
        self.sem, self.eval_sem = AsyncSemWithAdaptiveWeight(slots), AsyncSemWithAdaptiveWeight(eval_slots)
        self.calls: list[dict[str, Any]] = []

    async def chat_completion(self, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        return create_chat_completion(self.name, n=kwargs.get("n", 1))

    async def get_logprobs(self, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        return {"prompt_tokens": [1]}

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        n = kwargs.get("n", 1)
        return [7, 8], [[i] for i in range(n)], [[-1.0]] * n, ["stop"] * n


def _bare_manager(*servers: Any) -> ServerManager:
    manager = ServerManager.__new__(ServerManager)
    manager.servers = list(servers)
    return manager


def _config(harness: HarnessServer, **settings: Any) -> APIServerConfig:
    return APIServerConfig(base_url=harness.base_url, model_name="m", **settings)


# -- building -------------------------------------------------------------------------------------------------------


def test_one_server_per_listed_config_by_type() -> None:
    types = {"openai": OpenAIServer, "vllm": VLLMServer, "sglang": SGLangServer}
    manager = ServerManager([APIServerConfig(base_url=f"http://{kind}/v1", server_type=kind) for kind in types])  # type: ignore[arg-type]
    assert [type(server) for server in manager.servers] == list(types.values())


def test_a_bare_config_is_a_list_of_one() -> None:
    config = APIServerConfig(base_url="http://mine:9001/v1", api_key="k", server_type="vllm")
    manager = ServerManager(config)
    assert [type(server) for server in manager.servers] == [VLLMServer]
    assert manager.servers[0].config is config


def test_a_baseline_outside_slurm_means_four_local_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    manager = ServerManager(ServerBaseline(model_name="x", server_type="vllm", timeout=5), slurm=True)
    assert [server.config.base_url for server in manager.servers] == [
        f"http://localhost:{p}/v1" for p in range(9004, 9008)
    ]
    first = manager.servers[0]
    assert (type(first), first.config.model_name, first.config.timeout, first.config.api_key) == (
        VLLMServer,
        "x",
        5,
        "x",
    )


@pytest.fixture
def slurm_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, value in {"SLURM_JOB_NODELIST": "n[1-2]", "NUM_TRAINING_NODES": "1", "INFER_TP": "4"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("slurm_job")
def test_slurm_servers_take_over_settings_and_type() -> None:
    expected = ["http://n2:9000/v1", "http://n2:9001/v1"]
    baseline = ServerManager(ServerBaseline(server_type="sglang", model_name="x"), slurm=True)
    assert [server.config.base_url for server in baseline.servers] == expected
    assert all(type(server) is SGLangServer for server in baseline.servers)
    listed = [APIServerConfig(base_url="http://localhost:9001/v1", api_key="k", server_type="vllm", timeout=3)]
    manager = ServerManager(listed, slurm=True)
    assert [server.config.base_url for server in manager.servers] == expected
    assert {(server.config.api_key, server.config.timeout) for server in manager.servers} == {("k", 3)}
    assert listed[0].base_url == "http://localhost:9001/v1"


@pytest.mark.usefixtures("slurm_job")
def test_slurm_is_not_looked_at_unless_asked_and_remote_servers_stay() -> None:
    assert len(ServerManager(ServerBaseline(), slurm=False).servers) == 4
    remote = ServerManager([APIServerConfig(base_url="http://judge.example:80/v1")], slurm=True)
    assert [server.config.base_url for server in remote.servers] == ["http://judge.example:80/v1"]


def test_slurm_outside_a_job_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.setattr(server_building, "_said_outside_slurm", False)
    config = APIServerConfig(base_url="http://a/v1")
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            assert ServerManager([config], slurm=True).servers[0].config is config
    assert [record.levelname for record in caplog.records if "not a Slurm job" in record.message] == ["DEBUG"]
    assert ServerManagerConfig().slurm is True


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="no inference server"):
        ServerManager([])


def test_a_concrete_class_is_used_for_every_server() -> None:
    manager = ServerManager([APIServerConfig(base_url="http://a/v1", server_type="openai")], server_class=VLLMServer)
    assert type(manager.servers[0]) is VLLMServer


# -- routing --------------------------------------------------------------------------------------------------------


async def test_train_and_eval_are_routed_by_their_own_limits() -> None:
    first, second = Stub("first", slots=8, eval_slots=1), Stub("second", slots=2, eval_slots=5)
    manager = _bare_manager(first, second)
    assert (await manager.chat_completion(messages=MESSAGES)).choices[0].message.content == "first"
    assert (await manager.chat_completion(messages=MESSAGES, split="eval")).choices[0].message.content == "second"
    assert first.calls == [{"messages": MESSAGES, "split": "train"}]
    assert second.calls == [{"messages": MESSAGES, "split": "eval"}]


async def test_unhealthy_servers_are_skipped() -> None:
    manager = _bare_manager(Stub("down", slots=100, healthy=False), Stub("up", slots=1))
    assert (await manager.chat_completion(messages=MESSAGES)).choices[0].message.content == "up"
    assert await manager.get_logprobs(prompt="p") == {"prompt_tokens": [1]}


async def test_a_free_slot_is_waited_for() -> None:
    busy = Stub("busy", slots=1)
    await busy.sem.acquire()
    call = asyncio.create_task(_bare_manager(busy).chat_completion(messages=MESSAGES))
    await asyncio.sleep(0.05)
    assert not call.done()
    busy.sem.release()
    assert (await asyncio.wait_for(call, 10)).choices[0].message.content == "busy"


async def test_load_spreads_and_no_slot_waits_for_a_clock(tiny_tokenizer: Any) -> None:
    with HarnessServer(latency_s=0.03) as first, HarnessServer(latency_s=0.03) as second:
        manager = ServerManager(
            [_config(first, num_max_requests_at_once=2), _config(second, num_max_requests_at_once=2)]
        )
        started = time.monotonic()
        await asyncio.gather(*(manager.chat_completion(messages=MESSAGES) for _ in range(40)))
        assert time.monotonic() - started < 5  # one-second polls would take ten
        assert (first.max_in_flight, second.max_in_flight) == (2, 2)
        assert min(len(first.requests), len(second.requests)) >= 10
        await manager.aclose()


async def test_waiting_training_calls_are_not_woken_by_evaluation_slots(harness: HarnessServer) -> None:
    manager = ServerManager([_config(harness, num_max_requests_at_once=1, num_requests_for_eval=1)])
    server = manager.servers[0]
    await server.sem.acquire()
    await server.eval_sem.acquire()
    train = asyncio.create_task(manager.chat_completion(messages=MESSAGES))
    evaluation = asyncio.create_task(manager.chat_completion(messages=MESSAGES, split="eval"))
    await asyncio.sleep(0.02)
    server.eval_sem.release()
    await asyncio.wait_for(evaluation, 10)
    assert not train.done()
    server.sem.release()
    await asyncio.wait_for(train, 10)
    await manager.aclose()


async def test_a_growing_weight_wakes_every_call_it_admits(harness: HarnessServer) -> None:
    harness.latency_s = 0.5
    manager = ServerManager([_config(harness, num_max_requests_at_once=8)])
    await manager.update_weight(0.1)
    calls = [asyncio.create_task(manager.chat_completion(messages=MESSAGES)) for _ in range(8)]
    await asyncio.sleep(0.01)
    await manager.update_weight(1.0)
    await asyncio.wait_for(asyncio.gather(*calls), 10)
    assert harness.max_in_flight == 8
    await manager.aclose()


async def test_evaluation_does_not_take_training_slots(harness: HarnessServer) -> None:
    harness.latency_s = 0.05
    manager = ServerManager([_config(harness, num_max_requests_at_once=8, num_requests_for_eval=2)])
    await asyncio.gather(*(manager.chat_completion(messages=MESSAGES, split="eval") for _ in range(8)))
    assert harness.max_in_flight == 2
    server = manager.servers[0]
    assert (len(server.eval_request_timings), len(server.request_timings)) == (8, 0)
    await manager.aclose()


async def test_large_n_is_split_and_renumbered() -> None:
    stub = Stub("s")
    manager = _bare_manager(stub)
    manager.max_n_completions = 4
    reply = await manager.chat_completion(messages=MESSAGES, n=10)
    assert [choice.index for choice in reply.choices] == list(range(10))
    assert sorted(call["n"] for call in stub.calls) == [2, 4, 4]
    prompt, outputs, logprobs, reasons = await manager.tokens_and_logprobs_completion(prompt="p", n=5)
    assert (prompt, outputs, len(logprobs), reasons) == ([7, 8], [[0], [1], [2], [3], [0]], 5, ["stop"] * 5)


@pytest.mark.usefixtures("quick_retries")
async def test_a_dead_server_is_replaced_by_a_living_one(harness: HarnessServer, free_port: int) -> None:
    dead = APIServerConfig(base_url=f"http://127.0.0.1:{free_port}/v1", num_max_requests_at_once=999)
    manager = ServerManager([dead, _config(harness)])
    started = time.monotonic()
    reply = await manager.chat_completion(messages=MESSAGES)
    assert reply.choices[0].message.content
    assert time.monotonic() - started < 10
    assert [server.server_healthy for server in manager.servers] == [False, True]
    await manager.chat_completion(messages=MESSAGES)
    assert len(harness.requests) == 2
    await manager.aclose()


@pytest.mark.usefixtures("quick_retries")
async def test_a_failing_server_hands_over_but_a_bad_request_does_not(harness: HarnessServer) -> None:
    with HarnessServer() as other:
        manager = ServerManager([_config(harness), _config(other)])
        harness.fail_next(3, status=500)
        await manager.chat_completion(messages=MESSAGES)
        assert (len(harness.requests), len(other.requests)) == (3, 1)
        harness.fail_next(1, status=400)
        with pytest.raises(InferenceServerError):
            await manager.chat_completion(messages=MESSAGES)
        assert (len(harness.requests), len(other.requests)) == (4, 1)
        await manager.aclose()


@pytest.mark.usefixtures("quick_retries")
async def test_all_servers_down_is_said_with_names(free_port: int, caplog: pytest.LogCaptureFixture) -> None:
    urls = [f"http://127.0.0.1:{free_port}/v1", f"http://localhost:{free_port}/v1"]
    manager = ServerManager([APIServerConfig(base_url=url, server_wait_s=0.3) for url in urls])
    started = time.monotonic()
    with pytest.raises(InferenceUnavailableError) as caught:
        await manager.chat_completion(messages=MESSAGES)
    assert time.monotonic() - started < 10
    assert all(url in str(caught.value) for url in urls)
    assert "cannot be reached" in str(caught.value)
    with pytest.raises(InferenceUnavailableError, match="all 2 inference servers are down"):
        await manager.chat_completion(messages=MESSAGES)
    assert "all inference servers are down" in caplog.text
    await manager.aclose()


@pytest.mark.usefixtures("quick_retries")
async def test_recovery_ends_the_wait(harness: HarnessServer) -> None:
    manager = ServerManager([_config(harness, server_type="vllm")])
    harness.stop()
    call = asyncio.create_task(manager.chat_completion(messages=MESSAGES))
    await asyncio.sleep(0.1)
    second = asyncio.create_task(manager.chat_completion(messages=MESSAGES))
    await asyncio.sleep(0.1)
    assert not call.done()
    assert not second.done()
    harness.start()
    for task in (call, second):
        assert (await asyncio.wait_for(task, 10)).choices
    await manager.aclose()


# -- sessions -------------------------------------------------------------------------------------------------------


async def test_a_dedicated_server_never_waits_for_its_own_slot(harness: HarnessServer) -> None:
    manager = ServerManager([_config(harness, num_max_requests_at_once=1)])

    async def work() -> int:
        async with manager.dedicated_server() as server:
            assert server.sem._value == 0
            calls = (server.chat_completion(messages=MESSAGES) for _ in range(3))
            return len(await asyncio.gather(*calls))

    assert await asyncio.wait_for(asyncio.gather(work(), work()), 5) == [3, 3]
    assert manager.servers[0].sem._value == 1
    assert harness.max_in_flight == 1
    await manager.aclose()


async def test_sessions_spread_over_the_servers(tiny_tokenizer: Any) -> None:
    configs = [APIServerConfig(base_url=f"http://h{i}/v1", server_type="vllm") for i in range(3)]
    manager = ServerManager(configs)
    opened = [manager.managed_server(tokenizer=tiny_tokenizer) for _ in range(6)]
    sessions = [await session.__aenter__() for session in opened]
    assert [server.num_open_sessions for server in manager.servers] == [2, 2, 2]
    assert all(isinstance(session, ManagedServer) for session in sessions)
    for session in opened:
        await session.__aexit__(None, None, None)
    assert [server.num_open_sessions for server in manager.servers] == [0, 0, 0]


async def test_a_session_moves_when_its_server_is_down(harness: HarnessServer, tiny_tokenizer: Any) -> None:
    gone = APIServerConfig(base_url="http://127.0.0.1:1/v1", server_type="vllm", num_max_requests_at_once=999)
    manager = ServerManager([gone, _config(harness, server_type="vllm")])
    async with manager.managed_server(tokenizer=tiny_tokenizer) as managed:
        assert managed.server is manager.servers[0]
        manager.servers[0].server_healthy = False
        await managed.chat_completion(messages=MESSAGES)
        assert managed.server is manager.servers[1]
        assert [server.num_open_sessions for server in manager.servers] == [0, 1]
    await manager.aclose()


@pytest.mark.usefixtures("quick_retries")
async def test_a_session_survives_the_death_of_its_server(tiny_tokenizer: Any) -> None:
    with HarnessServer(tokenizer=tiny_tokenizer) as dying, HarnessServer(tokenizer=tiny_tokenizer) as living:
        manager = ServerManager([_config(server, server_type="vllm") for server in (dying, living)])
        async with manager.managed_server(tokenizer=tiny_tokenizer) as managed:
            first = await managed.chat_completion(messages=MESSAGES)
            dying.stop()
            reply = {"role": "assistant", "content": first.choices[0].message.content}
            await asyncio.wait_for(managed.chat_completion(messages=[*MESSAGES, reply, *MESSAGES]), 5)
            (node,) = managed.get_state()["nodes"]
            assert managed.server is manager.servers[1]
        sent = living.bodies("/generate")[0]["prompt"]["prompt_token_ids"]
        assert node.tokens[: len(sent)] == sent
        assert sum(1 for mask in node.masked_tokens if mask == tiny_tokenizer.eos_token_id) == 2
        await manager.aclose()


@pytest.mark.usefixtures("quick_retries")
async def test_a_session_leaves_a_server_that_keeps_failing(tiny_tokenizer: Any) -> None:
    with HarnessServer(tokenizer=tiny_tokenizer) as failing, HarnessServer(tokenizer=tiny_tokenizer) as living:
        manager = ServerManager([_config(server, server_type="vllm") for server in (failing, living)])
        failing.fail_next(100, status=500)
        async with manager.managed_server(tokenizer=tiny_tokenizer) as managed:
            await managed.chat_completion(messages=MESSAGES)
            assert managed.server is manager.servers[1]
            assert [server.num_open_sessions for server in manager.servers] == [0, 1]
            living.fail_next(100, status=500)
            with pytest.raises(InferenceServerError, match="500"):
                await managed.chat_completion(messages=MESSAGES)
        assert [server.num_open_sessions for server in manager.servers] == [0, 0]
        await manager.aclose()


async def test_servers_without_token_ids_are_refused_or_marked(
    harness: HarnessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = ServerManager([_config(harness)])
    monkeypatch.delenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", raising=False)
    with pytest.raises(NotImplementedError, match="server_type"):
        async with manager.managed_server():
            pass
    monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "true")
    async with manager.managed_server() as managed:
        assert isinstance(managed, DummyManagedServer)
        await managed.chat_completion(messages=MESSAGES, n=2)
        nodes = managed.get_state()["nodes"]
    assert len(nodes) == 2
    assert nodes[0].full_text.startswith("user:hi\n\nassistant:Reply")
    assert (nodes[0].tokens, nodes[0].masked_tokens[:2], set(nodes[0].logprobs)) == (
        list(range(128)),
        [-100, 1],
        {-0.5},
    )
    assert nodes[0].metadata == {"finish_reason": "stop", "dummy_tokens": True}
    await manager.aclose()


# -- testing mode ---------------------------------------------------------------------------------------------------


async def test_testing_answers_in_process_and_always_the_same(tiny_tokenizer: Any) -> None:
    async def run() -> Any:
        manager = ServerManager([APIServerConfig(num_max_requests_at_once=2)], testing=True)
        assert isinstance(manager.servers[0], ServerHarness)
        assert isinstance(manager.servers[0], DeterministicServer)
        chat = await manager.chat_completion(messages=MESSAGES, n=3, split="eval")
        async with manager.managed_server(tokenizer=tiny_tokenizer) as managed:
            await managed.chat_completion(messages=MESSAGES, n=2, max_tokens=20)
            nodes = managed.get_state()["nodes"]
        logprobs = await manager.get_logprobs(input_ids=[1, 2], top_k=2)
        await manager.update_weight(0.5)
        return [choice.message.content for choice in chat.choices], [node.tokens for node in nodes], logprobs

    first, second = await run(), await run()
    assert first == second
    assert len(set(first[0])) == 3
    assert first[1][0] != first[1][1]


async def test_metrics_of_every_server_are_kept(harness: HarnessServer) -> None:
    manager = ServerManager([_config(harness), _config(harness)])
    for server in manager.servers:
        await server.chat_completion(messages=MESSAGES)
    metrics = await manager.wandb_metrics({}, None)
    assert {"server/server_0_average_num_attempts", "server/server_1_average_num_attempts"} <= set(metrics)
    await manager.aclose()


async def test_stand_ins_with_plain_semaphores_work() -> None:
    stub: Any = SimpleNamespace(sem=asyncio.Semaphore(2), eval_sem=asyncio.Semaphore(1), server_healthy=True)

    async def chat_completion(**kwargs: Any) -> Any:
        return create_chat_completion("ok")

    stub.chat_completion = chat_completion
    assert (await _bare_manager(stub).chat_completion(messages=MESSAGES)).choices[0].message.content == "ok"
