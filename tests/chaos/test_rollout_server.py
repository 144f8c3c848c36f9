"""SIGKILL the real rollout server at random moments under load: nothing is lost, nothing comes twice, order is kept.

Environments post groups and repeat a post until it is answered; a trainer takes batches, acknowledges and commits; the
server is killed again and again, also while it starts. In the end every accepted group was delivered exactly once.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_process import ForkedServer

BATCH = 8
REGISTRATION = {
    **{"wandb_group": "g", "wandb_project": "p", "batch_size": BATCH, "max_token_len": 64, "num_steps": 100_000},
    **{"checkpoint_dir": "c", "save_checkpoint_interval": 5, "starting_step": 0},
}


class Wire:
    """A keep-alive connection that repeats a request until it is answered. A post is safe to repeat: it has an id."""

    def __init__(self, port: int, give_up: threading.Event) -> None:
        self.port = port
        self.give_up = give_up
        self.connection: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, value: Any = None) -> Any:
        body = None if value is None else json.dumps(value)
        while not self.give_up.is_set():
            try:
                if self.connection is None:
                    self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
                headers = {} if body is None else {"Content-Type": "application/json"}
                self.connection.request(method, path, body=body, headers=headers)
                response = self.connection.getresponse()
                answer = response.read()
            except (OSError, http.client.HTTPException):
                if self.connection is not None:
                    self.connection.close()
                self.connection = None
                time.sleep(0.01)
                continue
            if response.status == 503:
                time.sleep(0.01)
                continue
            assert response.status == 200, (method, path, response.status, answer[:300])
            return json.loads(answer)
        raise TimeoutError(path)


class Run:
    """What the clients saw, and the threads that saw it."""

    def __init__(self, server: ForkedServer) -> None:
        self.server = server
        self.stop_posting = threading.Event()
        self.give_up = threading.Event()
        self.accepted: dict[int, list[int]] = {}  # env -> numbers, in the order they were answered
        self.batches: dict[int, list[tuple[int, int]]] = {}  # seq -> (env, number) of its groups
        self.order: list[int] = []  # seqs as they came, first time only
        self.redelivered = 0
        self.drained = threading.Event()
        self.errors: list[BaseException] = []

    def thread(self, work: Callable[..., None], *arguments: int) -> threading.Thread:
        def guarded() -> None:
            try:
                work(*arguments)
            except BaseException as error:  # a failed assertion in a thread must fail the test
                self.errors.append(error)
                self.give_up.set()

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def environment(self, env_id: int, size: int) -> None:
        wire, number = Wire(self.server.port, self.give_up), 0
        rng = random.Random(env_id)
        numbers = self.accepted.setdefault(env_id, [])
        while not self.stop_posting.is_set():
            tokens = [[env_id, number]] * size
            group = {"tokens": tokens, "masks": tokens, "scores": [0.5] * size, "env_id": env_id}
            wire.ask("POST", "/scored_data", {**group, "group_id": f"{env_id}-{number}"})
            numbers.append(number)
            number += 1
            time.sleep(rng.uniform(0.0, 0.01))

    def trainer(self) -> None:
        wire = Wire(self.server.port, self.give_up)
        while not self.give_up.is_set():
            last = self.stop_posting.is_set()
            reply = wire.ask("GET", "/batch?client=ours")
            if reply["batch"] is None:
                if last and self.drained.is_set():
                    return
                time.sleep(0.005)
                continue
            seq = reply["batch_seq"]
            groups = [tuple(group["tokens"][0]) for group in reply["batch"]]
            if seq in self.batches:
                assert self.batches[seq] == groups, f"batch {seq} came again with other content"
                self.redelivered += 1
            else:
                self.batches[seq] = groups
                self.order.append(seq)
            wire.ask("POST", "/ack", {"batch_seq": seq})
            if seq % 7 == 0:
                wire.ask("POST", "/commit", {"batch_seq": seq, "step": seq})


def start_run(folder: Path, sizes: tuple[int, ...]) -> Run:
    """A server on a fixed port with a data folder, a registered trainer, and one environment per group size."""
    server = ForkedServer(folder, "--data-dir", str(folder / "data"), "--segment-mb", "0.02").start()
    wire = Wire(server.port, threading.Event())
    wire.ask("POST", "/register", REGISTRATION)
    assert wire.ask("GET", "/batch?client=ours")["batch"] is None
    for env_id in range(len(sizes)):
        # The environment that sends single sequences is one that promised two: its posts are buffered in pairs.
        env = {"max_token_length": 64, "desired_name": f"e{env_id}", "weight": 1.0, "group_size": 2}
        assert wire.ask("POST", "/register-env", env)["env_id"] == env_id
    return Run(server)


def kill_again_and_again(run: Run, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(kills):
        if run.errors:
            return
        run.server.kill()
        run.server.start(wait=False)
        if rng.random() < 0.15:  # also while it starts and reads its journal
            time.sleep(rng.uniform(0.0, 0.1))
            run.server.kill()
            run.server.start(wait=False)
        run.server.wait_until_up()
        time.sleep(rng.uniform(0.0, 0.35))


def finish(run: Run, threads: list[threading.Thread], sizes: tuple[int, ...]) -> None:
    run.stop_posting.set()
    for thread in threads[:-1]:
        thread.join(60)
    if len(run.accepted[len(sizes) - 1]) % 2 and not run.errors:  # the last single sequence needs its partner
        _post_one_more(run, len(sizes) - 1, sizes[-1])
    _fill_the_last_batch(run, len(sizes), sizes)
    run.drained.set()
    threads[-1].join(240)  # on a busy disk a batch takes three slow syncs, and hundreds are left
    run.give_up.set()
    if run.errors:
        raise run.errors[0]
    assert not any(thread.is_alive() for thread in threads)


def _post_one_more(run: Run, env_id: int, size: int) -> None:
    number = len(run.accepted[env_id])
    tokens = [[env_id, number]] * size
    group = {"tokens": tokens, "masks": tokens, "scores": [0.5] * size, "env_id": env_id}
    Wire(run.server.port, run.give_up).ask("POST", "/scored_data", {**group, "group_id": f"{env_id}-{number}"})
    run.accepted[env_id].append(number)


def _fill_the_last_batch(run: Run, filler: int, sizes: tuple[int, ...]) -> None:
    """Post what makes the total a whole number of batches, so that everything can be delivered."""
    total = sum(len(run.accepted[env_id]) * size for env_id, size in enumerate(sizes))
    wire = Wire(run.server.port, run.give_up)
    run.accepted[filler] = []
    for number in range(-total // 2 % (BATCH // 2)):
        tokens = [[filler, number]] * 2
        wire.ask("POST", "/scored_data", {"tokens": tokens, "masks": tokens, "scores": [0.5, 0.5]})
        run.accepted[filler].append(number)


def check_exactly_once(run: Run) -> None:
    assert run.order == list(range(run.order[0], run.order[0] + len(run.order)))  # no batch skipped, none out of order
    delivered = [group for seq in run.order for group in run.batches[seq]]
    posted = {(env_id, number) for env_id, numbers in run.accepted.items() for number in numbers}
    assert len(delivered) == len(set(delivered)), "a group came twice"
    assert set(delivered) == posted, f"lost {sorted(posted - set(delivered))[:5]}"
    for env_id, numbers in run.accepted.items():
        assert [number for env, number in delivered if env == env_id] == numbers, "order changed"
    status = run.server.call("GET", "/status").json()
    assert status == {"current_step": len(run.order), "queue_size": 0}


def run_with_kills(folder: Path, kills: int, seed: int) -> Run:
    sizes = (2, 2, 4, 1)
    run = start_run(folder, sizes)
    try:
        threads = [run.thread(run.environment, env_id, size) for env_id, size in enumerate(sizes)]
        threads.append(run.thread(run.trainer))
        kill_again_and_again(run, kills, seed)
        finish(run, threads, sizes)
        check_exactly_once(run)
    finally:
        run.give_up.set()
        run.stop_posting.set()
        run.server.close()
    return run


def test_fifty_kills_lose_and_duplicate_nothing(tmp_path: Path) -> None:
    run = run_with_kills(tmp_path, kills=50, seed=1)
    assert len(run.order) > 50
    assert sum(map(len, run.accepted.values())) > 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_five_hundred_kills_lose_and_duplicate_nothing(tmp_path: Path, seed: int) -> None:
    run_with_kills(tmp_path, kills=100, seed=10 + seed)


def test_a_kill_between_post_and_batch_changes_nothing_a_client_can_see(tmp_path: Path) -> None:
    """Registrations, environments, queue, buffer, step and the latest group survive."""
    run = start_run(tmp_path, (2, 2))
    server = run.server
    try:
        for number in range(6):
            tokens = [[0, number]] * 2
            group = {"tokens": tokens, "masks": tokens, "scores": [0.5, 0.5], "env_id": 0}
            assert server.call("POST", "/scored_data", group).json() == {"status": "received"}
        single = {"tokens": [[9]], "masks": [[9]], "scores": [1.0], "env_id": 1}
        assert server.call("POST", "/scored_data", single).json() == {"status": "buffered", "buffer_size": 1}
        assert [group["tokens"][0][1] for group in server.call("GET", "/batch").json()["batch"]] == [0, 1, 2, 3]
        questions = [
            "/status",
            "/info",
            "/wandb_info",
            "/latest_example",
            "/status-env?env_id=0",
            "/status-env?env_id=1",
        ]
        before = {path: server.call("GET", path).json() for path in questions}
        server.kill()
        server.start()
        assert {path: server.call("GET", path).json() for path in questions} == before
        assert server.call("POST", "/scored_data", single).json() == {"status": "buffered", "buffer_size": 0}
        again = {"max_token_length": 64, "desired_name": "new", "weight": 1.0, "group_size": 2}
        assert server.call("POST", "/register-env", again).json()["env_id"] == 2
    finally:
        server.close()


def test_live_clients_carry_on_over_restarts(tmp_path: Path) -> None:
    """`EnvClient` and `TrainerClient` are never told that the server died five times."""
    from atroposlib.api.client import EnvClient, TrainerClient

    server = ForkedServer(tmp_path, "--data-dir", str(tmp_path / "data"), "--segment-mb", "0.005").start()
    received: list[list[list[int]]] = []
    seqs: list[int] = []
    wanted = 40

    def train() -> None:
        client = TrainerClient(server.url)
        client.register(batch_size=4, max_token_len=64, num_steps=100, checkpoint_dir="c", save_checkpoint_interval=5)
        while len(seqs) < wanted:
            batch = client.next_batch(timeout_s=60)
            assert batch is not None
            received.append([[int(token) for token in group["tokens"][0]] for group in batch.groups])
            seqs.append(batch.seq)
            client.ack(batch.seq)
            if batch.seq % 5 == 0:
                client.commit(batch.seq, len(seqs))
        client.close()

    async def environment(name: str) -> None:
        client = EnvClient(server.url)
        while (reply := await client.register(name=name, max_token_length=64, weight=1.0, group_size=2))[
            "status"
        ] != "success":
            await asyncio.sleep(0.05)
        env_id = reply["env_id"]
        for number in range(wanted):
            tokens = [[env_id, number]] * 2
            await client.submit({"tokens": tokens, "masks": tokens, "scores": [0.0, 1.0], "env_id": env_id})
            status = await client.status()
            assert status["env_weight"] == pytest.approx(0.5) or number < 5
            await asyncio.sleep(0.02)
        await client.aclose()

    async def kill_five_times() -> None:
        for _ in range(5):
            await asyncio.sleep(0.4)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)

    async def everything() -> None:
        await asyncio.wait_for(
            asyncio.gather(environment("a"), environment("b"), kill_five_times(), asyncio.to_thread(train)), 120
        )

    try:
        asyncio.run(everything())
    finally:
        server.close()
    assert seqs == list(range(seqs[0], seqs[0] + wanted))
    delivered = [tuple(group) for batch in received for group in batch]
    assert sorted(delivered) == [(env_id, number) for env_id in (0, 1) for number in range(wanted)]
    for env_id in (0, 1):
        assert [number for env, number in delivered if env == env_id] == list(range(wanted))
