"""The two clients against a real server that is stopped, killed and started under them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from rollout_calls import Caller, group, marks

from atroposlib.api.client import Batch, EnvClient, TrainerClient, encode_groups
from atroposlib.api.schemas import BINARY_TYPE, GROUP_FIELDS
from atroposlib.errors import ConfigError, RolloutRejectedError, RolloutServerUnavailableError
from atroposlib.testing.api import ApiProcess, free_port, serve_api

SETTINGS: dict[str, Any] = {
    "batch_size": 8,
    "max_token_len": 64,
    "num_steps": 100,
    "checkpoint_dir": "c",
    "save_checkpoint_interval": 5,
}
ENVIRONMENT: dict[str, Any] = {"name": "maths", "max_token_length": 64, "weight": 1.0, "group_size": 4}


@pytest.fixture
def trainer(api: ApiProcess) -> Iterator[TrainerClient]:
    client = TrainerClient(api.url, give_up_after_s=30.0)
    assert client.register(**SETTINGS) > 0
    assert client.next_batch(timeout_s=0.0) is None
    yield client
    client.close()


async def joined(url: str, **options: Any) -> EnvClient:
    client = EnvClient(url, give_up_after_s=30.0, **options)
    assert (await client.register(**ENVIRONMENT))["status"] == "success"
    return client


def full_group(mark: int) -> dict[str, Any]:
    return group(mark, inference_logprobs=[[1.0, -0.5, -0.25]] * 4, advantages=[[0.5], []], messages=[[{"role": "user", "content": "é"}]] * 4,
                 images=None, generation_params={"temperature": 0.5}, policy_versions=[[1], [1, 2], [2], [2]],
                 distill_token_ids=[[[1, 2]] * 3] * 4, distill_logprobs=[[[-0.5, -1.5]] * 3] * 4)  # fmt: skip


@pytest.mark.parametrize("env_binary", [True, False])
@pytest.mark.parametrize("trainer_binary", [True, False])
async def test_what_goes_in_comes_out_in_every_form(api: ApiProcess, env_binary: bool, trainer_binary: bool) -> None:
    trainer = TrainerClient(api.url, use_binary=trainer_binary)
    trainer.register(**SETTINGS)
    trainer.next_batch(timeout_s=0)
    env = await joined(api.url, use_binary=env_binary, compress=True)
    assert await env.submit(full_group(3)) == {"status": "received"}
    assert await env.submit([group(4, size=1), group(5, size=3)]) == {
        "status": "received",
        "groups_processed": 2,
        "buffered": 2,
        "last_buffer_size": 0,
    }
    batch = await asyncio.to_thread(trainer.next_batch, timeout_s=5)
    assert batch is not None
    assert marks(batch.groups) == [3, 4, 5]
    first = batch.groups[0]
    assert set(first) == {*GROUP_FIELDS, "group_id", "policy_versions"}
    for name, value in full_group(3).items():
        got = (
            [np.asarray(row).tolist() for row in first[name]]
            if name in {"tokens", "masks", "inference_logprobs", "advantages"}
            else first[name]
        )
        assert got == value, name
    assert first["env_id"] == 0
    assert batch.group_ids[0] == first["group_id"]
    assert first["ref_logprobs"] is None
    await env.aclose()
    trainer.close()


async def test_the_calls_of_an_environment(api: ApiProcess, trainer: TrainerClient) -> None:
    env = EnvClient(api.url)
    reply = await env.register(**ENVIRONMENT)
    assert (reply["wandb_name"], env.env_id) == ("maths_0", 0)
    assert (await env.status())["self_queue_size"] == 0
    assert await env.info() == {"batch_size": 8, "max_token_len": 64}
    assert await env.wandb_info() == {"group": "", "project": ""}
    await env.heartbeat()
    await env.report("env:maths_0", 1, {"reward": 0.5})
    await env.disconnect()
    assert trainer.status() == {"current_step": 0, "queue_size": 0}
    again = EnvClient(api.url)
    assert (await again.register(**ENVIRONMENT))["wandb_name"] == "maths_0"
    await env.aclose()
    await again.aclose()


async def test_registering_before_the_trainer_says_wait(api: ApiProcess) -> None:
    env = EnvClient(api.url)
    assert (await env.register(**ENVIRONMENT))["status"] == "wait for trainer to start"
    assert env.env_id is None
    await env.aclose()


async def test_refusals_are_final_and_say_why(api: ApiProcess, trainer: TrainerClient) -> None:
    env = await joined(api.url)
    with pytest.raises(RolloutRejectedError, match="score 1 is nan") as caught:
        await env.submit(group(1, scores=[0.0, float("nan"), 0.0, 0.0]))
    assert caught.value.status == 422
    with pytest.raises(RolloutRejectedError, match="'masks' of sequence 0 has 1 entries"):
        await env.submit(group(1, masks=[[1], [1], [1], [1]]))
    with pytest.raises(RolloutRejectedError, match="9 sequences"):
        await env.submit(group(1, size=9))
    assert trainer.status()["queue_size"] == 0
    await env.aclose()


async def test_the_same_submission_twice_is_stored_once(api: ApiProcess, trainer: TrainerClient) -> None:
    env = await joined(api.url)
    for _ in range(3):
        await env.submit(group(1, group_id="one"))
    assert trainer.status()["queue_size"] == 1
    await env.aclose()


def test_batches_once_each_over_two_trainers_that_share_a_position(api: ApiProcess, trainer: TrainerClient) -> None:
    call = Caller(api.url)
    call.post("/scored_data_list", [group(mark) for mark in range(8)])
    batches = [trainer.next_batch(timeout_s=5) for _ in range(4)]
    assert [marks(batch.groups) for batch in batches if batch] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    seqs = [batch.seq for batch in batches if batch]
    assert seqs == list(range(seqs[0], seqs[0] + 4))
    trainer.ack(seqs[2])
    trainer.commit(seqs[1], 2)
    restarted = TrainerClient(api.url)
    restarted.register(**SETTINGS, resume_after=seqs[1], starting_step=2)
    again = [restarted.next_batch(timeout_s=5) for _ in range(2)]
    assert [(batch.seq, marks(batch.groups)) for batch in again if batch] == [(seqs[2], [4, 5]), (seqs[3], [6, 7])]
    assert restarted.status()["current_step"] == 4
    with pytest.raises(RolloutRejectedError, match="cannot resume"):
        restarted.register(**SETTINGS, resume_after=seqs[0] - 1)
    restarted.close()


def test_waiting_for_a_batch_ends_at_the_time_out_or_with_the_batch(api: ApiProcess, trainer: TrainerClient) -> None:
    started = time.monotonic()
    assert trainer.next_batch(timeout_s=0.3) is None
    assert 0.25 < time.monotonic() - started < 5
    call = Caller(api.url)
    threading.Timer(0.3, lambda: call.post("/scored_data_list", [group(1), group(2)])).start()
    batch = trainer.next_batch(timeout_s=20)
    assert isinstance(batch, Batch)
    assert marks(batch.groups) == [1, 2]


async def test_both_clients_carry_on_over_a_kill(tmp_path: Path) -> None:
    with serve_api("--no-live-page", data_dir=tmp_path) as api:
        trainer = TrainerClient(api.url)
        trainer.register(**SETTINGS)
        trainer.next_batch(timeout_s=0)
        env = await joined(api.url)
        taken: list[int] = []

        def train() -> None:
            while len(taken) < 40:
                batch = trainer.next_batch(timeout_s=60)
                assert batch is not None
                taken.extend(marks(batch.groups))
                trainer.ack(batch.seq)

        training = asyncio.create_task(asyncio.to_thread(train))
        for mark in range(40):
            if mark in (10, 25):
                await asyncio.to_thread(api.kill)
                restart = asyncio.create_task(asyncio.to_thread(api.restart))
                await env.submit(group(mark))  # waits until the server is back
                await restart
            else:
                await env.submit(group(mark))
        await asyncio.wait_for(training, 60)
        assert taken == list(range(40))
        assert env.env_id == 0
        assert (await env.status())["current_step"] == 20
        await env.aclose()
        trainer.close()


async def test_both_clients_introduce_themselves_again_to_a_server_without_memory() -> None:
    with serve_api("--no-live-page") as api:
        trainer = TrainerClient(api.url)
        trainer.register(**SETTINGS)
        trainer.next_batch(timeout_s=0)
        other, env = await joined(api.url), await joined(api.url)
        for mark in range(2):
            await env.submit(group(mark))
        batch = trainer.next_batch(timeout_s=5)
        assert batch is not None
        assert (env.env_id, batch.seq) == (1, 1)
        await asyncio.to_thread(api.kill)
        await asyncio.to_thread(api.restart)
        trainer.ack(1)  # means nothing to the new server; not an error
        assert trainer.next_batch(timeout_s=1) is None
        assert (await env.status())["current_step"] == 1  # the trainer said how far it was
        assert env.env_id == 0  # known again, under a new id
        for mark in range(2, 4):
            await env.submit(group(mark))
        batch = trainer.next_batch(timeout_s=5)
        assert batch is not None
        assert (batch.seq, marks(batch.groups)) == (2, [2, 3])
        await env.aclose()
        await other.aclose()
        trainer.close()


@contextlib.asynccontextmanager
async def scripted(answers: dict[str, list[Any]]) -> AsyncIterator[tuple[str, list[str]]]:
    """A server that gives the answers of each path in turn, the last one again and again; status 0 loses the connection."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        left = answers[request.path]
        status, body = left.pop(0) if len(left) > 1 else left[0]
        if status == 0:
            assert request.transport is not None
            request.transport.close()
        return web.json_response(body, status=status or 200)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


LOST, FORGOTTEN = (0, None), (404, {"detail": "environment 3 is not known here"})


async def test_a_connection_lost_while_registering_again_is_tried_again() -> None:
    answers: dict[str, list[Any]] = {
        "/register-env": [(200, {"status": "success", "env_id": 3}), LOST, (200, {"status": "success", "env_id": 0})],
        "/healthz": [(200, {})],
        "/scored_data": [FORGOTTEN, FORGOTTEN, FORGOTTEN, (200, {"status": "received"})],
        "/status-env": [LOST, FORGOTTEN],
    }
    async with scripted(answers) as (url, asked):
        client = await joined(url)
        assert await client.submit(group(1)) == {"status": "received"}
        assert client.env_id == 0
        assert asked.count("/scored_data") == 4
        await client.aclose()


async def test_a_trainer_that_may_not_register_again_says_so() -> None:
    answers: dict[str, list[Any]] = {
        "/register": [(200, {"uuid": 1}), (409, {"detail": "another trainer is here"})],
        "/batch": [(200, {"status": "error", "message": "not registered", "batch": []})],
    }
    async with scripted(answers) as (url, _):
        client = TrainerClient(url, give_up_after_s=5.0)
        await asyncio.to_thread(lambda: client.register(**SETTINGS))
        with pytest.raises(RolloutRejectedError, match="another trainer is here"):
            await asyncio.to_thread(client.next_batch, timeout_s=2)
        client.close()


async def test_a_report_arrived_unless_it_may_come_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "atroposlib.api.client")
    answers: dict[str, list[Any]] = {"/report": [(503, {}), (507, {}), (503, {}), (200, {}), (422, {"detail": "step"})]}
    async with scripted(answers) as (url, asked):
        client = TrainerClient(url)
        told = [await asyncio.to_thread(client.report, "trainer", step, {"loss": 0.5}) for step in (1, 2, 3)]
        assert (told, len(asked)) == ([False, True, True], 5)
        assert "answer 507" in caplog.text
        assert "refused with 422" in caplog.text
        client.close()


async def test_giving_up_says_what_was_waited_for() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    env = EnvClient(url, give_up_after_s=0.2)
    with pytest.raises(RolloutServerUnavailableError, match=r"/scored_data has not answered"):
        await env.submit(group(1))
    await env.disconnect()
    await env.aclose()
    trainer = TrainerClient(url, give_up_after_s=0.2)
    with pytest.raises(RolloutServerUnavailableError, match=r"/status has not answered"):
        trainer.status()
    trainer.report("trainer", 1, {"loss": 1.0})  # not worth an error


def test_a_wrong_url_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="must look like http://host:8000"):
        TrainerClient("localhost:8000")


async def test_a_token_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_api("--no-live-page", "--token", "secret") as api:
        with pytest.raises(RolloutRejectedError, match="a token is required"):
            TrainerClient(api.url).status()
        trainer = TrainerClient(api.url, token="secret")
        trainer.register(**SETTINGS)
        trainer.next_batch(timeout_s=0)
        monkeypatch.setenv("ATROPOS_TOKEN", "secret")
        env = await joined(api.url)
        assert await env.submit(group(1)) == {"status": "received"}
        await env.aclose()
        wrong = EnvClient(api.url, token="other")
        with pytest.raises(RolloutRejectedError, match="401"):
            await wrong.submit(group(1))
        await wrong.aclose()


def test_what_does_not_fit_the_binary_form_goes_as_json() -> None:
    fits = group(1, tokens=[np.array([1, 2, 3])] * 4)
    assert encode_groups([fits], many=False, prefer_binary=True)[1] == BINARY_TYPE
    assert encode_groups([fits], many=False, prefer_binary=False)[0].startswith(b'{"tokens":[[1,2,3]')
    for odd in (
        {"tokens": [["1"]] * 4},
        {"tokens": [[2**40]] * 4, "masks": [[1]] * 4},
        {"masks": [[1]]},
        {"scores": ["x"] * 4},
    ):
        assert encode_groups([group(1) | odd], many=False, prefer_binary=True)[1] == "application/json"
