"""The contract over real HTTP, and the fifteen ways in which an earlier server lost or spoilt data."""

from __future__ import annotations

import gzip
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import zstandard
from rollout_calls import Caller, env_registration, group, registration

from atroposlib.api.schemas import EMPTY_EXAMPLE, GROUP_FIELDS

# ---- contract ---------------------------------------------------------------------------------------------------------


def test_a_fresh_server_answers_as_documented(call: Caller) -> None:
    assert call.get("/") == {"message": "AtroposLib API"}
    assert call.get("/wandb_info") == {"group": None, "project": None}
    assert call.get("/info")["batch_size"] == -1
    assert call.get("/status") == {"current_step": 0, "queue_size": 0}
    assert call.get("/latest_example") == EMPTY_EXAMPLE
    refused = call.get("/batch")
    assert refused["status"] == "error"
    assert refused["batch"] == []
    assert refused["message"].startswith("Trainer not registered")


def test_environments_wait_for_the_trainer_and_are_numbered(call: Caller) -> None:
    uuid = call.post("/register", registration())["uuid"]
    assert isinstance(uuid, int)
    assert uuid.bit_length() <= 128
    assert call.post("/register-env", env_registration()) == {"status": "wait for trainer to start"}
    assert call.get("/batch") == {"batch": None}
    assert call.post("/register-env", env_registration()) == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "env_0",
        "checkpoint_dir": "ckpt",
        "starting_step": 0,
        "checkpoint_interval": 10,
        "num_steps": 100,
    }
    assert call.post("/register-env", env_registration())["wandb_name"] == "env_1"
    assert call.post("/register-env", env_registration(desired_name="other"))["wandb_name"] == "other_0"
    assert call.get("/info") == {"batch_size": 4, "max_token_len": 2048}
    assert call.get("/wandb_info") == {"group": "group", "project": "project"}


def test_a_batch_has_the_fourteen_keys_and_what_was_posted(call: Caller) -> None:
    call.start()
    messages = [[{"role": "robot", "content": [{"type": "text", "text": 'é, "x"'}], "name": "r"}]] * 4
    posted = group(7, env_id=0, messages=messages, inference_logprobs=[[1.0, -0.25, -1e-07]] * 4, advantages=[[0.5]], images={"a": [None]},
                   generation_params={"temperature": 0.7}, overrides=[{"sft": True}], group_overrides={"group_size": 4})  # fmt: skip
    assert call.post("/scored_data", posted) == {"status": "received"}
    reply = call.get("/batch")
    assert set(reply) == {"batch"}
    (item,) = reply["batch"]
    assert tuple(item) == GROUP_FIELDS
    assert {name: item[name] for name in posted} == posted
    assert [name for name in GROUP_FIELDS if item[name] is None] == [
        "ref_logprobs",
        "distill_token_ids",
        "distill_logprobs",
    ]


def test_additions_come_back_only_when_posted(call: Caller) -> None:
    call.start()
    call.post(
        "/scored_data",
        group(1, group_id="g", policy_versions=[[3], [3], [3, 4], [4]], reward_components={"format": [0, 1, 0, 1]}),
    )
    (item,) = call.get("/batch")["batch"]
    assert item["group_id"] == "g"
    assert item["policy_versions"] == [[3], [3], [3, 4], [4]]
    assert item["reward_components"] == {"format": [0, 1, 0, 1]}


def test_pieces_are_buffered_until_they_make_a_group(call: Caller) -> None:
    call.start()
    assert call.post("/scored_data", group(1, size=1, env_id=0)) == {"status": "buffered", "buffer_size": 1}
    assert call.get("/status")["queue_size"] == 0
    assert call.post("/scored_data", group(2, size=3, env_id=0)) == {"status": "buffered", "buffer_size": 0}
    assert call.get("/status")["queue_size"] == 2
    assert call.batch() == [1, 2]


def test_lists_of_groups(call: Caller) -> None:
    call.start()
    assert call.post("/scored_data_list", [group(1), group(2)]) == {"status": "received", "groups_processed": 2}
    reply = call.post("/scored_data_list", [group(3, env_id=0), group(4, size=1, env_id=0)])
    assert reply == {"status": "received", "groups_processed": 2, "buffered": 1, "last_buffer_size": 1}
    assert call.post("/scored_data_list", []) == {"status": "received", "groups_processed": 0}
    assert [call.batch(), call.batch(), call.batch(), call.batch()] == [[1], [2], [3], None]


def test_a_list_with_one_bad_group_stores_none_of_it(call: Caller) -> None:
    call.start()
    call.post("/scored_data_list", [group(1), group(2, masks=[[1]])], status=422)
    call.post("/scored_data_list", [group(1), group(2, size=5)], status=422)
    assert call.get("/status")["queue_size"] == 0


def test_status_env_takes_a_body_or_a_query(call: Caller) -> None:
    call.start(envs=2, batch_size=8)
    for mark in range(3):
        call.post("/scored_data", group(mark, env_id=0))
    expected = {
        "current_step": 0,
        "queue_size": 3,
        "unallocated_fraction": 1.0,
        "self_queue_size": 3,
        "max_group_size": 4,
        "env_weight": 0.5,
    }
    assert call.get("/status-env", json={"env_id": 0}) == expected
    assert call.get("/status-env", params={"env_id": 0}) == expected
    assert call.get("/status-env", json={"env_id": "1"}) == expected | {"self_queue_size": 0}


def test_minimum_allocations_are_subtracted_for_others_and_left_free(call: Caller) -> None:
    call.start(batch_size=8)
    call.post("/register-env", env_registration(min_batch_allocation=0.5))
    for mark in range(2):
        call.post("/scored_data", group(mark, env_id=1))
    status = call.get("/status-env", params={"env_id": 0})
    assert status["unallocated_fraction"] == 0.5
    assert status["queue_size"] == (8 - 4) // 4


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@pytest.mark.parametrize("size", [4, 4000])
def test_compressed_requests(call: Caller, encoding: str, size: int) -> None:
    call.start(envs=0, batch_size=size)
    body = json.dumps(group(5, size=size, length=20)).encode()
    packed = gzip.compress(body) if encoding == "gzip" else zstandard.compress(body)
    reply = requests.post(f"{call.url}/scored_data", data=packed, headers={"content-encoding": encoding}, timeout=20)
    assert reply.json() == {"status": "received"}
    register = json.dumps(registration(batch_size=size)).encode()  # a route of the framework, too
    packed = gzip.compress(register) if encoding == "gzip" else zstandard.compress(register)
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    assert requests.post(f"{call.url}/register", data=packed, headers=headers, timeout=20).status_code == 200
    assert call.batch() == [5]


def test_reset_clears_everything(call: Caller) -> None:
    call.start()
    call.post("/scored_data", group(1))
    reply = requests.get(f"{call.url}/reset_data", timeout=10)
    assert (reply.status_code, reply.text) == (200, "Reset successful")
    assert call.get("/info") == {"batch_size": -1, "max_token_len": 2048}
    assert call.get("/status") == {"current_step": 0, "queue_size": 0}
    assert call.get("/wandb_info") == {"group": None, "project": None}
    assert call.get("/latest_example") == EMPTY_EXAMPLE


# ---- the fifteen ------------------------------------------------------------------------------------------------------


def test_01_batches_come_oldest_first_and_the_step_counts_delivered_ones(call: Caller) -> None:
    call.start()
    for mark in range(12):
        call.post("/scored_data", group(mark))
    seen = []
    for step in range(1, 13):
        seen.append(call.batch())
        assert call.get("/status")["current_step"] == step
    assert seen == [[mark] for mark in range(12)]
    assert call.batch() is None
    assert call.get("/status")["current_step"] == 12


def test_02_queue_sizes_include_everything_undelivered(call: Caller) -> None:
    call.start()
    for mark in range(10):
        call.post("/scored_data", group(mark, env_id=0))
    assert call.batch() == [0]
    assert call.get("/status")["queue_size"] == 9
    assert call.get("/status-env", params={"env_id": 0})["queue_size"] == 9


def test_02_a_batch_whose_reply_was_lost_counts_as_queued(call: Caller) -> None:
    call.start()
    call.post("/scored_data", group(1, env_id=0, length=200_000))
    _ask_and_go_away(call)
    _eventually(lambda: call.get("/status") == {"current_step": 0, "queue_size": 1})
    assert call.get("/status-env", params={"env_id": 0})["self_queue_size"] == 1


def _ask_and_go_away(call: Caller) -> None:
    """Ask for a batch, read a little of the reply, close the connection."""
    host, port = call.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"GET /batch HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 200")


def _eventually(condition: object, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_03_a_batch_that_did_not_arrive_is_delivered_again_and_in_order(call: Caller) -> None:
    call.start()
    for mark in range(3):
        call.post("/scored_data", group(mark, length=200_000))
    _ask_and_go_away(call)
    assert [call.batch(), call.batch(), call.batch(), call.batch()] == [[0], [1], [2], None]
    assert call.get("/status")["current_step"] == 3


def test_03_a_client_that_closes_before_reading_gets_it_later(call: Caller) -> None:
    call.start()
    call.post("/scored_data", group(1))
    host, port = call.url.removeprefix("http://").split(":")
    for _ in range(5):
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(b"GET /batch HTTP/1.1\r\nhost: x\r\n\r\n")
        time.sleep(0.05)
    assert call.batch() == [1]


def test_03_a_trainer_that_registers_again_gets_what_it_had_not_finished(call: Caller) -> None:
    call.start()
    for mark in range(3):
        call.post("/scored_data", group(mark))
    assert [call.batch(), call.batch()] == [[0], [1]]  # asking for 1 acknowledged 0
    call.post("/register", registration(starting_step=1))
    assert [call.batch(), call.batch(), call.batch()] == [[1], [2], None]
    assert call.get("/status")["current_step"] == 3


@pytest.mark.parametrize("bad", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_04_a_score_that_is_not_finite_is_refused_and_harms_nothing(call: Caller, bad: str) -> None:
    call.start()
    call.post("/scored_data", group(1, size=2))
    body = json.dumps(group(2, size=2)).replace("[0.0, 1.0]", f"[0.0, {bad}]")
    assert bad in body
    reply = requests.post(
        f"{call.url}/scored_data", data=body, headers={"content-type": "application/json"}, timeout=10
    )
    assert reply.status_code == 422
    problem = reply.json()["detail"][0]
    assert problem["loc"] == ["body", "scores", 1]
    assert "finite" in problem["msg"]
    call.post("/scored_data", group(3, size=2))
    assert call.batch() == [1, 3]


def test_05_data_before_register_is_kept(call: Caller) -> None:
    for mark in range(2):
        assert call.post("/scored_data", group(mark)) == {"status": "received"}
    call.post("/register", registration())
    assert [call.batch(), call.batch(), call.batch()] == [[0], [1], None]
    requests.post(f"{call.url}/reset_data", timeout=10)
    assert call.get("/batch")["status"] == "error"


def test_06_registering_again_takes_effect(call: Caller) -> None:
    call.start(starting_step=5)
    for mark in range(16):
        call.post("/scored_data", group(mark))
    call.post("/register", registration(batch_size=64, starting_step=7, num_steps=9, wandb_group="new"))
    assert call.get("/info")["batch_size"] == 64
    assert call.get("/status") == {"current_step": 7, "queue_size": 16}
    assert call.get("/wandb_info")["group"] == "new"
    assert call.batch() == list(range(16))


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_07_weights_of_zero_or_less(call: Caller, weight: float) -> None:
    call.start(env={"weight": weight})
    assert call.get("/status-env", params={"env_id": 0})["env_weight"] == 1.0
    call.post("/register-env", env_registration(weight=3.0))
    assert call.get("/status-env", params={"env_id": 0})["env_weight"] == 0.01
    assert call.get("/status-env", params={"env_id": 1})["env_weight"] == 1.0


@pytest.mark.parametrize("env_id", [-1, 1, 10**9])
def test_07_unknown_environments(call: Caller, env_id: int) -> None:
    call.start()
    assert "not known" in call.get("/status-env", params={"env_id": env_id}, status=404)["detail"]
    assert call.post("/disconnect-env", {"env_id": env_id})["status"] == "failure"
    assert "not known" in call.post("/heartbeat", {"env_id": env_id}, status=404)["detail"]
    assert call.post("/scored_data", group(1, env_id=env_id)) == {"status": "received"}
    assert call.batch() == [1]
    assert call.get("/status-env", params={"env_id": 0})["env_weight"] == 1.0  # nobody was disconnected


def test_08_sizes_do_not_starve(call: Caller) -> None:
    call.start()
    for mark in range(4):  # 3 + 1, 3 + 1
        call.post("/scored_data", group(mark, size=3 if mark % 2 == 0 else 1, env_id=0))
    assert [call.batch(), call.batch()] == [[0, 1], [2, 3]]


def test_08_groups_larger_than_the_group_size(call: Caller) -> None:
    call.start(batch_size=16)
    for mark in range(4):
        assert call.post("/scored_data", group(mark, size=8, env_id=0)) == {"status": "buffered", "buffer_size": 0}
    assert [call.batch(), call.batch(), call.batch()] == [[0, 1], [2, 3], None]


def test_08_a_group_that_fits_no_batch_is_refused(call: Caller) -> None:
    call.start()
    reply = call.post("/scored_data", group(1, size=5), status=422)
    assert "5 sequences" in reply["detail"][0]["msg"]
    assert "batch holds 4" in reply["detail"][0]["msg"]


def test_08_a_group_too_large_that_came_before_register_waits_and_is_shown(call: Caller) -> None:
    call.post("/scored_data", group(1, size=6))
    call.post("/scored_data", group(2))
    call.post("/register", registration())
    assert [call.batch(), call.batch()] == [[2], None]
    assert call.get("/overview")["queue"]["oversized_groups"] == 1
    call.post("/register", registration(batch_size=6))
    assert call.batch() == [1]


def test_09_a_dead_environment_with_a_minimum_stops_counting_and_comes_back(call: Caller) -> None:
    call.start(env={"min_batch_allocation": 0.5}, batch_size=8)
    call.post("/register-env", env_registration(desired_name="busy"))
    for mark in range(4):
        call.post("/scored_data", group(mark, env_id=1))
    assert call.batch() is None  # env 0 is alive and due half of a batch
    _eventually(lambda: call.batch() == [0, 1])
    status = call.get("/status-env", params={"env_id": 1})
    assert status["unallocated_fraction"] == 1.0
    call.post("/heartbeat", {"env_id": 0})  # it is back, and so is its minimum
    assert call.get("/status-env", params={"env_id": 1})["unallocated_fraction"] == 0.5
    assert call.batch() is None


def test_09_groups_without_environment_are_used_beside_minimums(call: Caller) -> None:
    call.start(env={"min_batch_allocation": 0.5}, batch_size=8)
    call.post("/scored_data", group(1, env_id=0))
    call.post("/scored_data", group(2))
    assert call.batch() == [1, 2]


def test_11_a_large_batch_does_not_hold_up_others(call: Caller) -> None:
    call.start(batch_size=64)
    body = json.dumps(group(1, length=50_000, env_id=0, inference_logprobs=[[-0.123456789] * 50_000] * 4))
    for _ in range(16):
        assert call.session.post(f"{call.url}/scored_data", data=body, timeout=20).status_code == 200
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(lambda: len(requests.get(f"{call.url}/batch", timeout=60).content))
        slowest = 0.0
        while not taken.done():
            started = time.perf_counter()
            call.get("/status-env", params={"env_id": 0})
            slowest = max(slowest, time.perf_counter() - started)
    assert taken.result() > 60_000_000
    assert slowest < 1.0  # milliseconds where nothing else runs on the machine


def test_12_status_costs_the_same_however_much_is_queued(call: Caller) -> None:
    call.start(batch_size=4)
    call.post("/scored_data_list", [group(mark, env_id=0) for mark in range(100)])
    few = _median_seconds(call)
    for _ in range(49):
        call.post("/scored_data_list", [group(mark, env_id=0) for mark in range(100)])
    many = _median_seconds(call)
    assert call.get("/status")["queue_size"] == 5000
    assert many < 3 * few + 0.002


def _median_seconds(call: Caller) -> float:
    times = []
    for _ in range(31):
        started = time.perf_counter()
        call.get("/status-env", params={"env_id": 0})
        times.append(time.perf_counter() - started)
    return sorted(times)[15]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"masks": [[1, 2, 3]]}, ["masks"]),
        ({"scores": [1.0]}, ["scores"]),
        ({"tokens": [], "masks": [], "scores": []}, ["tokens"]),
        ({"masks": [[1, 2, 3]] * 3 + [[1, 2]]}, ["masks", 3]),
        ({"inference_logprobs": [[-1.0] * 3] * 3 + [[-1.0] * 4]}, ["inference_logprobs", 3]),
        ({"ref_logprobs": [[-1.0] * 3] * 3}, ["ref_logprobs"]),
        ({"tokens": [[]] * 4, "masks": [[]] * 4}, ["tokens", 0]),
        ({"tokens": "text"}, ["tokens"]),
        ({"scores": None}, ["scores"]),
        ({"messages": [[{"role": "user"}]]}, ["messages", 0, 0, "content"]),
        ({"messages": [[{"content": "x"}]]}, ["messages", 0, 0, "role"]),
        ({"env_id": "first"}, ["env_id"]),
        ({"policy_versions": [[1]]}, ["policy_versions"]),
        ({"reward_components": {"format": [1.0]}}, ["reward_components", "format"]),
    ],
)
def test_13_what_is_wrong_and_where(call: Caller, change: dict[str, object], where: list[object]) -> None:
    call.start()
    reply = call.post("/scored_data", group(1) | change, status=422)
    assert reply["detail"][0]["loc"] == ["body", *where]
    in_list = call.post("/scored_data_list", [group(0), group(1) | change], status=422)
    assert in_list["detail"][0]["loc"] == ["body", 1, *where]
    assert call.get("/status")["queue_size"] == 0


def test_13_advantages_of_odd_lengths_are_accepted(call: Caller) -> None:
    call.start()
    call.post("/scored_data", group(1, advantages=[[1.0], [], [0.5, 0.5]]))
    assert call.get("/batch")["batch"][0]["advantages"] == [[1.0], [], [0.5, 0.5]]


def test_13_lenient_bodies_go_the_slow_way(call: Caller) -> None:
    call.start()
    lax = {
        "tokens": [["1", 2.0]] * 4,
        "masks": [["-100", 2]] * 4,
        "scores": ["1.5", 2, True, 0],
        "env_id": "0",
        "unknown": {"a": 1},
    }
    assert call.post("/scored_data", lax) == {"status": "received"}
    (item,) = call.get("/batch")["batch"]
    assert item["tokens"] == [[1, 2]] * 4
    assert item["masks"] == [[-100, 2]] * 4
    assert item["scores"] == [1.5, 2, 1, 0]
    assert item["env_id"] == 0
    assert tuple(item) == GROUP_FIELDS


def test_15_a_restarted_environment_gets_its_name_back(call: Caller) -> None:
    call.start(envs=3)
    call.post("/disconnect-env", {"env_id": 1})
    back = call.post("/register-env", env_registration(group_size=2))
    assert (back["env_id"], back["wandb_name"]) == (1, "env_1")
    time.sleep(1.2)  # longer than the server's --env-timeout: all three are dead
    call.post("/heartbeat", {"env_id": 0})
    back = call.post("/register-env", env_registration())
    assert (back["env_id"], back["wandb_name"]) == (1, "env_1")
    assert call.post("/register-env", env_registration())["env_id"] == 2
    assert call.post("/register-env", env_registration())["wandb_name"] == "env_3"


# ---- additions --------------------------------------------------------------------------------------------------------


def test_the_same_group_id_is_stored_once_and_answered_the_same(call: Caller) -> None:
    call.start()
    for _ in range(3):
        assert call.post("/scored_data", group(1, group_id="a")) == {"status": "received"}
        assert call.post("/scored_data", group(2, size=1, env_id=0, group_id="b")) == {
            "status": "buffered",
            "buffer_size": 1,
        }
    assert call.get("/status")["queue_size"] == 1
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda _: requests.post(f"{call.url}/scored_data", json=group(3, group_id="c"), timeout=20), range(16)
            )
        )
    assert [call.batch(), call.batch(), call.batch()] == [[1], [3], None]


def test_explicit_acknowledgement(call: Caller) -> None:
    call.start()
    for mark in range(3):
        call.post("/scored_data", group(mark, group_id=f"g{mark}"))
    first = call.get("/batch?client=ours")
    assert (first["batch_seq"] - first["batch_seq"], first["group_ids"]) == (0, ["g0"])
    seq = first["batch_seq"]
    assert call.get("/batch?client=ours")["batch_seq"] == seq  # not acknowledged: the same again
    assert call.get(f"/batch?client=ours&after={seq}")["batch_seq"] == seq + 1
    assert call.get(f"/batch?client=ours&after={seq}")["group_ids"] == ["g1"]  # asking twice gives it twice
    assert call.post("/ack", {"batch_seq": seq}) == {"status": "success", "acknowledged": 1}
    assert call.get("/batch?client=ours")["batch_seq"] == seq + 1
    assert call.get("/status")["current_step"] == 2
    assert "not known" in call.post("/ack", {"batch_seq": seq + 9}, status=409)["detail"][0]["msg"]
    assert call.post("/commit", {"batch_seq": seq + 1, "step": 2})["committed"] == seq + 1
    assert call.get("/batch?client=ours&after=0")["batch_seq"] == seq + 2
    assert call.get("/batch?client=ours&after=x", status=422)["detail"][0]["loc"] == ["body", "after"]


def test_resuming_from_a_checkpoint_gives_exactly_the_batches_after_it(call: Caller) -> None:
    call.start()
    call.post("/scored_data_list", [group(mark) for mark in range(6)])
    base = call.get("/batch?client=ours")["batch_seq"] - 1
    for number in range(1, 5):
        call.get(f"/batch?client=ours&after={base + number - 1}")
        call.post("/ack", {"batch_seq": base + number})
    call.post("/commit", {"batch_seq": base + 1, "step": 1})
    call.post("/register", registration(starting_step=2, resume_after=base + 2))
    replies = [call.get(f"/batch?client=ours&after={base + number}") for number in range(2, 6)]
    assert [reply["batch_seq"] - base for reply in replies] == [3, 4, 5, 6]
    assert [reply["batch"][0]["tokens"][0][0] for reply in replies] == [2, 3, 4, 5]
    assert call.get("/status")["current_step"] == 6
    refused = call.post("/register", registration(resume_after=base), status=409)
    assert "cannot resume" in refused["detail"][0]["msg"]


def test_seen(call: Caller) -> None:
    call.start()
    call.post("/scored_data", group(1, env_id=0))
    assert call.get("/healthz")["status"] == "ok"
    text = requests.get(f"{call.url}/metrics", timeout=10).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines["atropos_queue_groups"] == "1"
    assert (
        lines["atropos_env_groups_total" if "atropos_env_groups_total" in lines else 'atropos_env_groups{env="env_0"}']
        == "1"
    )
    assert int(lines['atropos_http_requests_total{path="/scored_data",status="200"}']) >= 1
    assert requests.get(f"{call.url}/docs", timeout=10).status_code == 200
    paths = call.get("/openapi.json")["paths"]
    assert {"/scored_data", "/batch", "/status-env", "/register", "/ack"} <= set(paths)
    overview = call.get("/overview")
    assert overview["environments"][0]["name"] == "env_0"
    assert overview["queue"]["sequences"] == 4
    assert call.post("/report", {"source": "trainer", "step": 1, "metrics": {"loss": 0.5}}) == {"status": "success"}
