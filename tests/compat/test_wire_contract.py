"""The wire contract of the rollout server, over real HTTP: paths, methods, fields, status codes, gzip both ways.

What existing environments and trainers rely on. The weaknesses that must not come back are in the second half.
"""

from __future__ import annotations

import gzip
import json
import socket
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atroposlib.api.binary import encode_group
from atroposlib.api.schemas import BINARY_TYPE
from rollout_process import Reply, ServerProcess

FIELDS = [
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs"),
    *("overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs"),
]
REGISTRATION = {
    **{"wandb_group": "a group", "wandb_project": "a project", "batch_size": 8, "max_token_len": 64},
    **{"checkpoint_dir": "/checkpoints", "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 100},
}
ENVIRONMENT = {"max_token_length": 64, "desired_name": "maths", "weight": 1.0, "group_size": 4}


def group(size: int = 4, length: int = 3, first: int = 1, **fields: Any) -> dict[str, Any]:
    tokens = [[first + i] * length for i in range(size)]
    return {"tokens": tokens, "masks": tokens, "scores": [0.5 + i for i in range(size)], **fields}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("wire")
    with ServerProcess(
        folder, "--data-dir", str(folder / "data"), "--durability", "none", "--max-body-mb", "16"
    ) as server:
        yield server


@pytest.fixture
def server(process: ServerProcess) -> ServerProcess:
    """The server with nothing in it."""
    assert process.call("POST", "/reset_data").status == 200
    return process


@pytest.fixture
def started(server: ServerProcess) -> ServerProcess:
    """A trainer has registered and asked for its first batch; environment 0 has group size 4."""
    assert server.call("POST", "/register", REGISTRATION).status == 200
    assert server.call("GET", "/batch").json()["batch"] is None
    assert server.call("POST", "/register-env", ENVIRONMENT).json()["env_id"] == 0
    return server


def post(server: ServerProcess, value: Any, path: str = "/scored_data", **options: Any) -> Reply:
    return server.call("POST", path, value, **options)


def batch_of(server: ServerProcess) -> list[dict[str, Any]] | None:
    reply = server.call("GET", "/batch")
    assert reply.status == 200
    groups: list[dict[str, Any]] | None = reply.json()["batch"]
    return groups


def first_tokens(groups: list[dict[str, Any]] | None) -> list[int] | None:
    return None if groups is None else [g["tokens"][0][0] for g in groups]


def status_of(server: ServerProcess, env_id: int = 0) -> dict[str, Any]:
    reply = server.call("GET", "/status-env", {"env_id": env_id})
    assert reply.status == 200
    answer: dict[str, Any] = reply.json()
    return answer


# ---- before a trainer registers -----------------------------------------------------------------------------------------


def test_answers_before_registration(server: ServerProcess) -> None:
    assert server.call("GET", "/").json() == {"message": "AtroposLib API"}
    assert server.call("GET", "/wandb_info").json() == {"group": None, "project": None}
    assert server.call("GET", "/info").json()["batch_size"] == -1
    assert server.call("GET", "/status").json() == {"current_step": 0, "queue_size": 0}
    batch = server.call("GET", "/batch").json()
    assert batch["status"] == "error"
    assert batch["message"].startswith("Trainer not registered")
    assert batch["batch"] == []
    assert server.call("GET", "/latest_example").json() == {
        name: []
        for name in (
            *("tokens", "masks", "scores", "advantages", "ref_logprobs"),
            *("generation_params", "inference_logprobs", "messages", "images"),
        )
    }
    waiting = server.call("POST", "/register-env", ENVIRONMENT)
    assert (waiting.status, waiting.json()) == (200, {"status": "wait for trainer to start"})


# ---- registration -------------------------------------------------------------------------------------------------------


def test_register_answers_a_128_bit_number(server: ServerProcess) -> None:
    reply = server.call("POST", "/register", REGISTRATION)
    assert reply.status == 200
    assert isinstance(reply.json()["uuid"], int)
    assert 0 < reply.json()["uuid"] < 2**128
    assert server.call("GET", "/info").json() == {"batch_size": 8, "max_token_len": 64}
    assert server.call("GET", "/wandb_info").json() == {"group": "a group", "project": "a project"}


@pytest.mark.parametrize("missing", sorted(REGISTRATION))
def test_every_field_of_register_is_required(server: ServerProcess, missing: str) -> None:
    reply = server.call("POST", "/register", {k: v for k, v in REGISTRATION.items() if k != missing})
    assert reply.status == 422
    assert [problem["loc"] for problem in reply.json()["detail"]] == [["body", missing]]


def test_register_takes_numbers_written_as_strings(server: ServerProcess) -> None:
    assert server.call("POST", "/register", {**REGISTRATION, "batch_size": "16"}).status == 200
    assert server.call("GET", "/info").json()["batch_size"] == 16
    assert server.call("POST", "/register", {**REGISTRATION, "batch_size": "x"}).status == 422


def test_environments_wait_until_the_trainer_asks_for_its_first_batch(server: ServerProcess) -> None:
    server.call("POST", "/register", REGISTRATION)
    assert server.call("POST", "/register-env", ENVIRONMENT).json() == {"status": "wait for trainer to start"}
    assert server.call("GET", "/batch").json()["batch"] is None
    assert server.call("POST", "/register-env", ENVIRONMENT).json() == {
        **{"status": "success", "env_id": 0, "wandb_name": "maths_0", "checkpoint_dir": "/checkpoints"},
        **{"starting_step": 0, "checkpoint_interval": 5, "num_steps": 100},
    }


def test_environments_are_numbered_per_name(started: ServerProcess) -> None:
    names = ["maths", "code", "maths"]
    replies = [started.call("POST", "/register-env", {**ENVIRONMENT, "desired_name": name}).json() for name in names]
    assert [reply["env_id"] for reply in replies] == [1, 2, 3]
    assert [reply["wandb_name"] for reply in replies] == ["maths_1", "code_0", "maths_2"]


def test_disconnect(started: ServerProcess) -> None:
    assert started.call("POST", "/disconnect-env", {"env_id": 0}).json() == {"status": "success"}
    unknown = started.call("POST", "/disconnect-env", {"env_id": 99})
    assert unknown.json()["status"] == "failure"
    assert unknown.json()["error"]
    assert started.call("POST", "/disconnect-env", {}).status == 422


# ---- posting ------------------------------------------------------------------------------------------------------------


def test_a_group_comes_back_in_a_batch_with_the_fourteen_keys(started: ServerProcess) -> None:
    sent = group(
        env_id=0,
        advantages=[[0.25] * 3] * 4,
        ref_logprobs=[[-0.5] * 3] * 4,
        inference_logprobs=[[-0.125, 1.0, -2.5e-05]] * 4,
        messages=[[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "reward": 1.0}]] * 4,
        generation_params={"temperature": 0.7},
        overrides=[{"set_advantage_to_zero": True}] * 4,
        group_overrides={"sft": True},
        images=["a", None, {"b": 1}, []],
        distill_token_ids=[[[1, 2]] * 3] * 4,
        distill_logprobs=[[[-0.5, -0.25]] * 3] * 4,
    )
    assert post(started, sent).json() == {"status": "received"}
    assert post(started, group()).json() == {"status": "received"}
    groups = batch_of(started)
    assert groups is not None
    assert groups[0] == sent
    assert [sorted(g) for g in groups] == [sorted(FIELDS), sorted(FIELDS)]
    assert {name for name, value in groups[1].items() if value is None} == set(FIELDS) - {"tokens", "masks", "scores"}


def test_latest_example_is_the_newest_group(started: ServerProcess) -> None:
    post(started, group(first=10))
    post(started, group(first=20))
    latest = started.call("GET", "/latest_example").json()
    assert latest["tokens"][0][0] == 20
    assert sorted(latest) == sorted(FIELDS)


def test_pieces_of_a_group_are_buffered_until_they_are_whole(started: ServerProcess) -> None:
    assert post(started, group(2, env_id=0, first=1)).json() == {"status": "buffered", "buffer_size": 2}
    assert started.call("GET", "/status").json()["queue_size"] == 0
    assert post(started, group(2, env_id=0, first=2)).json() == {"status": "buffered", "buffer_size": 0}
    assert started.call("GET", "/status").json()["queue_size"] == 2
    assert post(started, group(4, env_id=0, first=3)).json() == {"status": "received"}
    assert first_tokens(batch_of(started)) == [1, 2, 3]


def test_a_list_of_groups(started: ServerProcess) -> None:
    assert post(started, [group(), group()], "/scored_data_list").json() == {
        "status": "received",
        "groups_processed": 2,
    }
    assert post(started, [group(env_id=0), group(3, env_id=0)], "/scored_data_list").json() == {
        **{"status": "received", "groups_processed": 2, "buffered": 1, "last_buffer_size": 3}
    }
    assert post(started, [], "/scored_data_list").json() == {"status": "received", "groups_processed": 0}


def test_a_list_with_one_bad_group_is_refused_whole(started: ServerProcess) -> None:
    reply = post(started, [group(), {"tokens": [[1]]}], "/scored_data_list")
    assert reply.status == 422
    assert reply.json()["detail"][0]["loc"][:2] == ["body", 1]
    assert started.call("GET", "/status").json()["queue_size"] == 0
    assert post(started, group(), "/scored_data_list").status == 422


@pytest.mark.parametrize(
    "change",
    [
        {"scores": ["0.5", "1.5", "2.5", "3.5"]},
        {"tokens": [["1", "1", "1"], ["2", "2", "2"], ["3", "3", "3"], ["4", "4", "4"]]},
        {"tokens": [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0], [4.0, 4.0, 4.0]]},
        {"something_else": {"a": [1]}},
    ],
)
def test_what_only_lax_clients_send_is_taken(started: ServerProcess, change: dict[str, Any]) -> None:
    assert post(started, {**group(), **change}).json() == {"status": "received"}
    post(started, group())
    groups = batch_of(started)
    assert groups is not None
    assert groups[0] == groups[1]


def test_true_and_false_as_scores_are_numbers(started: ServerProcess) -> None:
    assert post(started, {**group(), "scores": [True, False, True, False]}).status == 200
    assert started.call("GET", "/latest_example").json()["scores"] == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [[]] * 4,
        [[{"role": "anything", "content": ""}]] * 4,
        [[{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "x", "reward": 0.5}]] * 4,
        [[{"role": "tool", "content": {"a": 1}, "tool_call_id": "7"}]] * 4,
        [[{"role": "assistant", "content": 'ünïcode \u2028 \\ " </script> 🎲'}]] * 4,
    ],
)
def test_messages_are_echoed_unchanged(started: ServerProcess, messages: list[Any]) -> None:
    assert post(started, group(messages=messages)).json() == {"status": "received"}
    assert started.call("GET", "/latest_example").json()["messages"] == messages


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "x"}, "text", None, 7])
def test_a_message_needs_role_and_content(started: ServerProcess, message: Any) -> None:
    reply = post(started, group(messages=[[message]] * 4))
    assert reply.status == 422
    assert reply.json()["detail"][0]["loc"][:2] == ["body", "messages"]


def test_advantages_of_any_length_are_taken(started: ServerProcess) -> None:
    assert post(started, group(advantages=[[1.0]])).json() == {"status": "received"}
    assert started.call("GET", "/latest_example").json()["advantages"] == [[1.0]]
    assert post(started, group(advantages=[1.0])).status == 422


@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[]", b"7", b'"x"', b"{}", b"\xff\xfe", b'{"tokens": [[1]]}', b"[" * 100_000]
)
def test_a_body_that_is_no_group_is_422(started: ServerProcess, body: bytes) -> None:
    reply = post(started, None, raw=body, headers={"Content-Type": "application/json"})
    assert reply.status == 422
    assert reply.json()["detail"]


@pytest.mark.parametrize("field", ["tokens", "masks", "scores"])
@pytest.mark.parametrize("value", [None, 1, "x", {}, [[["a"]]], [[1.5] * 3] * 4, [[None] * 3] * 4])
def test_wrong_types_are_422(started: ServerProcess, field: str, value: Any) -> None:
    reply = post(started, {**group(), field: value})
    assert reply.status == 422
    assert reply.json()["detail"][0]["loc"][:2] == ["body", field]


# ---- gzip ---------------------------------------------------------------------------------------------------------------

GZIPPED = {"Content-Type": "application/json", "Content-Encoding": "gzip"}


def test_gzip_both_ways(started: ServerProcess) -> None:
    body = gzip.compress(json.dumps([group(), group()]).encode())
    reply = post(started, None, "/scored_data_list", raw=body, headers=GZIPPED)
    assert reply.json() == {"status": "received", "groups_processed": 2}
    reply = started.call("GET", "/batch", headers={"Accept-Encoding": "gzip, deflate"})
    assert reply.headers["content-type"] == "application/json"
    assert first_tokens(reply.json()["batch"]) == [1, 1]


def test_large_replies_are_gzipped_for_those_who_accept_it(tmp_path: Path) -> None:
    """From another machine by itself; from this one only when told to, as it costs more than it saves here."""
    with ServerProcess(tmp_path, "--in-memory", "--no-live-page", "--compress", "always") as server:
        server.call("POST", "/register", REGISTRATION)
        for _ in range(4):
            post(server, group(4, length=400))
        reply = server.call("GET", "/batch", headers={"Accept-Encoding": "gzip"})
        assert reply.was_gzip
        assert len(reply.json()["batch"]) == 2
        assert not server.call("GET", "/batch").was_gzip
        assert not server.call("GET", "/status", headers={"Accept-Encoding": "gzip"}).was_gzip


def test_no_gzip_for_those_who_do_not_accept_it(started: ServerProcess) -> None:
    for _ in range(2):
        post(started, group(4, length=400))
    reply = started.call("GET", "/batch", headers={"Accept-Encoding": "identity"})
    assert not reply.was_gzip
    assert len(reply.json()["batch"]) == 2


def test_other_routes_take_gzip_too(server: ServerProcess) -> None:
    body = gzip.compress(json.dumps(REGISTRATION).encode())
    assert server.call("POST", "/register", raw=body, headers=GZIPPED).status == 200
    assert server.call("GET", "/info").json()["batch_size"] == 8


def test_bad_gzip_is_400(started: ServerProcess) -> None:
    whole = gzip.compress(json.dumps(group()).encode())
    for body in (b"garbage", whole[:-10], whole[:20], whole[:-4] + b"\0\0\0\0", zlib.compress(b"{}")):
        reply = post(started, None, raw=body, headers=GZIPPED)
        assert reply.status == 400, body
        assert "gzip" in reply.body.decode()
    assert post(started, None, raw=b"", headers=GZIPPED).status == 422
    assert started.call("GET", "/status").json()["queue_size"] == 0


def test_a_decompression_bomb_is_refused(started: ServerProcess) -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = packer.compress(b"[") + b"".join(packer.compress(b" " * 2**24) for _ in range(5)) + packer.flush()
    assert len(bomb) < 2**17  # 80 MiB when unpacked; the server was told to take bodies of 16 MiB
    reply = post(started, None, raw=bomb, headers=GZIPPED, timeout_s=60.0)
    assert reply.status == 413
    assert started.call("GET", "/healthz").status == 200


# ---- batches and status ---------------------------------------------------------------------------------------------------


def test_batches_come_oldest_first_and_in_order(started: ServerProcess) -> None:
    for first in range(1, 7):
        post(started, group(first=10 * first))
    assert first_tokens(batch_of(started)) == [10, 20]
    assert first_tokens(batch_of(started)) == [30, 40]
    assert first_tokens(batch_of(started)) == [50, 60]
    assert batch_of(started) is None


def test_status_env_with_a_body_and_with_a_query(started: ServerProcess) -> None:
    for _ in range(3):
        post(started, group(env_id=0))
    post(started, group())
    expected = {"current_step": 0, "queue_size": 4, "unallocated_fraction": 1.0, "self_queue_size": 3}
    expected |= {"max_group_size": 4, "env_weight": 1.0}
    answer = status_of(started)
    assert {name: answer[name] for name in expected} == expected
    assert started.call("GET", "/status-env?env_id=0").json() == answer
    raw = started.call("GET", "/status-env", raw=b'{"env_id":0}', headers={"Content-Type": "application/json"})
    assert raw.json() == answer


def test_status_env_weights_and_minimums(started: ServerProcess) -> None:
    started.call("POST", "/register-env", {**ENVIRONMENT, "weight": 3.0, "min_batch_allocation": 0.25})
    assert status_of(started, 0)["env_weight"] == pytest.approx(0.25)
    assert status_of(started, 1)["env_weight"] == pytest.approx(0.75)
    assert status_of(started, 0)["unallocated_fraction"] == pytest.approx(0.75)
    started.call("POST", "/disconnect-env", {"env_id": 1})
    assert status_of(started, 0)["env_weight"] == pytest.approx(1.0)
    assert status_of(started, 0)["unallocated_fraction"] == pytest.approx(1.0)


def test_minimum_allocations_shape_the_batch(started: ServerProcess) -> None:
    other = {**ENVIRONMENT, "desired_name": "rare", "min_batch_allocation": 0.5}
    assert started.call("POST", "/register-env", other).json()["env_id"] == 1
    for first in (1, 2, 3):
        post(started, group(env_id=0, first=10 * first))
    assert batch_of(started) is None  # the rare one is alive and has nothing yet
    post(started, group(env_id=1, first=90))
    assert first_tokens(batch_of(started)) == [10, 90]


def test_mixed_group_sizes_fill_a_batch(started: ServerProcess) -> None:
    for size, first in ((2, 1), (4, 2), (2, 3)):
        post(started, group(size, first=10 * first))
    assert first_tokens(batch_of(started)) == [10, 20, 30]


def test_bad_status_env_calls(started: ServerProcess) -> None:
    assert started.call("GET", "/status-env").status == 422
    bad = started.call("GET", "/status-env", raw=b"{", headers={"Content-Type": "application/json"})
    assert bad.status == 422
    for env_id in (99, -1):
        assert 400 <= started.call("GET", "/status-env", {"env_id": env_id}).status < 500


def test_unknown_paths_and_methods(server: ServerProcess) -> None:
    assert server.call("GET", "/nope").status == 404
    assert server.call("GET", "/register").status == 405
    assert server.call("POST", "/batch").status == 405
    assert server.call("GET", "/nope").json() == {"detail": "Not Found"}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_reset_clears_everything(started: ServerProcess, method: str) -> None:
    post(started, group(env_id=0))
    reply = started.call(method, "/reset_data")
    assert (reply.status, reply.body) == (200, b"Reset successful")
    assert reply.headers["content-type"].startswith("text/plain")
    assert started.call("GET", "/info").json()["batch_size"] == -1
    assert started.call("GET", "/status").json() == {"current_step": 0, "queue_size": 0}
    assert started.call("GET", "/wandb_info").json() == {"group": None, "project": None}
    assert started.call("GET", "/latest_example").json()["tokens"] == []
    assert started.call("GET", "/batch").json()["batch"] == []
    assert started.call("POST", "/register", REGISTRATION).status == 200
    assert batch_of(started) is None


# ---- the weaknesses that must not come back ---------------------------------------------------------------------------------


def test_steps_count_delivered_batches_and_the_queue_includes_formed_ones(started: ServerProcess) -> None:
    for _ in range(10):
        post(started, group(env_id=0))
    assert started.call("GET", "/status").json() == {"current_step": 0, "queue_size": 10}
    assert batch_of(started) is not None
    after = started.call("GET", "/status").json()
    assert after["current_step"] == 1
    assert after["queue_size"] == 8
    assert status_of(started)["self_queue_size"] == 8


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["scores", "inference_logprobs"])
def test_numbers_that_are_not_finite_are_refused(started: ServerProcess, field: str, text: str) -> None:
    value = f"[{text}, 1.0, 1.0, 1.0]" if field == "scores" else f"[[{text}, 0.0, 0.0]{', [0.0, 0.0, 0.0]' * 3}]"
    body = json.dumps({k: v for k, v in group().items() if k != field})[:-1] + f', "{field}": {value}}}'
    reply = post(started, None, raw=body.encode(), headers={"Content-Type": "application/json"})
    assert reply.status == 422
    assert reply.json()["detail"][0]["loc"][:2] == ["body", field]
    for _ in range(2):
        assert post(started, group()).status == 200
    assert batch_of(started) is not None


@pytest.mark.parametrize(
    "bad",
    [
        {"tokens": [], "masks": [], "scores": []},
        {**group(), "masks": [[1, 1, 1]]},
        {**group(), "scores": [1.0]},
        {**group(), "masks": [[1, 1]] * 4},
        {**group(), "inference_logprobs": [[0.5] * 3] * 3},
        {**group(), "inference_logprobs": [[0.5] * 2] * 4},
        {**group(), "policy_versions": [[1]]},
        {**group(), "reward_components": {"format": [1.0]}},
    ],
)
def test_lengths_that_disagree_are_refused_and_explained(started: ServerProcess, bad: dict[str, Any]) -> None:
    reply = post(started, bad)
    assert reply.status == 422
    problem = reply.json()["detail"][0]
    assert problem["loc"][0] == "body"
    assert len(problem["msg"]) > 20
    assert started.call("GET", "/status").json()["queue_size"] == 0


def test_data_before_registration_does_not_brick_the_server(server: ServerProcess) -> None:
    early = [post(server, group(first=first)) for first in (1, 2)]
    assert {reply.status for reply in early} in ({200}, {409})
    assert server.call("GET", "/batch").json()["status"] == "error"
    assert server.call("POST", "/register", REGISTRATION).status == 200
    if early[0].status == 409:
        for first in (1, 2):
            assert post(server, group(first=first)).status == 200
    assert first_tokens(batch_of(server)) == [1, 2]


def test_batch_right_after_reset_is_an_answer(started: ServerProcess) -> None:
    started.call("POST", "/reset_data")
    assert started.call("GET", "/batch").json()["status"] == "error"


def test_registering_again_takes_effect(started: ServerProcess) -> None:
    for first in range(1, 5):
        post(started, group(first=first))
    changed = {**REGISTRATION, "batch_size": 16, "max_token_len": 128, "wandb_group": "other"}
    assert started.call("POST", "/register", changed).status == 200
    assert started.call("GET", "/info").json() == {"batch_size": 16, "max_token_len": 128}
    assert started.call("GET", "/wandb_info").json()["group"] == "other"
    assert first_tokens(batch_of(started)) == [1, 2, 3, 4]


@pytest.mark.parametrize("weight", [-1.0, 0.0])
def test_a_weight_of_zero_or_less_is_an_answer(started: ServerProcess, weight: float) -> None:
    started.call("POST", "/disconnect-env", {"env_id": 0})
    reply = started.call("POST", "/register-env", {**ENVIRONMENT, "desired_name": "light", "weight": weight})
    assert reply.status == 200
    assert 0.01 <= status_of(started, reply.json()["env_id"])["env_weight"] <= 1.0


def test_a_negative_env_id_is_nobody(started: ServerProcess) -> None:
    assert started.call("POST", "/disconnect-env", {"env_id": -1}).json()["status"] == "failure"
    assert status_of(started, 0)["env_weight"] == pytest.approx(1.0)


def test_sizes_that_divide_nothing_do_not_starve(started: ServerProcess) -> None:
    for size in (3, 1, 3, 1):
        assert post(started, group(size, env_id=0)).json()["status"] == "buffered"
    groups = batch_of(started)
    assert groups is not None
    assert [len(g["tokens"]) for g in groups] == [3, 1, 3, 1]


def test_groups_larger_than_the_group_size_are_used(started: ServerProcess) -> None:
    assert post(started, group(8, env_id=0)).status == 200
    groups = batch_of(started)
    assert groups is not None
    assert [len(g["tokens"]) for g in groups] == [8]


def test_a_group_larger_than_a_batch_has_a_defined_answer(started: ServerProcess) -> None:
    reply = post(started, group(9))
    assert reply.status in (200, 422)
    for _ in range(2):
        post(started, group(first=5))
    assert first_tokens(batch_of(started)) == [5, 5]


def test_groups_without_environment_are_used_beside_minimums(started: ServerProcess) -> None:
    started.call("POST", "/register-env", {**ENVIRONMENT, "desired_name": "rare", "min_batch_allocation": 0.5})
    post(started, group(first=1))
    post(started, group(first=2, env_id=1))
    assert first_tokens(batch_of(started)) == [1, 2]


def test_a_disconnected_environment_with_a_minimum_is_not_waited_for(started: ServerProcess) -> None:
    started.call("POST", "/register-env", {**ENVIRONMENT, "desired_name": "rare", "min_batch_allocation": 0.5})
    for first in (1, 2):
        post(started, group(env_id=0, first=first))
    assert batch_of(started) is None
    started.call("POST", "/disconnect-env", {"env_id": 1})
    assert first_tokens(batch_of(started)) == [1, 2]


def test_the_same_group_id_twice_is_stored_once(started: ServerProcess) -> None:
    sent = group(group_id="a-7", env_id=0)
    first, second = post(started, sent), post(started, sent)
    assert (first.status, first.json()) == (second.status, second.json())
    assert started.call("GET", "/status").json()["queue_size"] == 1
    listed = [group(group_id="b-1"), group(group_id="b-1"), sent]
    assert post(started, listed, "/scored_data_list").json()["groups_processed"] == 3
    assert started.call("GET", "/status").json()["queue_size"] == 2


def test_additions_are_absent_unless_sent(started: ServerProcess) -> None:
    post(started, group(group_id="x", policy_versions=[[3], [3, 4], [4], []], reward_components={"format": [1.0] * 4}))
    post(started, group())
    groups = batch_of(started)
    assert groups is not None
    assert groups[0]["policy_versions"] == [[3], [3, 4], [4], []]
    assert groups[0]["reward_components"] == {"format": [1.0] * 4}
    assert sorted(groups[1]) == sorted(FIELDS)


def give_up_reading(server: ServerProcess, read: int) -> None:
    """A trainer whose read times out: it asks for a batch, reads so many bytes of the reply and closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(b"GET /batch HTTP/1.1\r\nHost: x\r\n\r\n")
        while read > 0:
            read -= len(sock.recv(min(read, 65536)))


@pytest.mark.parametrize(("length", "read"), [(100_000, 1000), (100_000, 2_000_000), (3, 10)])
def test_a_batch_whose_reply_was_not_read_is_delivered_again(started: ServerProcess, length: int, read: int) -> None:
    for first in range(1, 5):
        post(started, group(first=10 * first, length=length))
    give_up_reading(started, read)
    deadline = time.monotonic() + 5
    while started.call("GET", "/status").json()["queue_size"] != 4:
        assert time.monotonic() < deadline, "the server did not notice that the client closed without reading"
    assert first_tokens(batch_of(started)) == [10, 20]
    assert first_tokens(batch_of(started)) == [30, 40]
    assert batch_of(started) is None


@pytest.mark.parametrize("length", [3, 20_000])
def test_a_batch_that_was_read_to_the_end_is_not_delivered_again(started: ServerProcess, length: int) -> None:
    """Also when the client closes its connection at once, or asked the server to."""
    for first in range(1, 13):
        post(started, group(first=10 * first, length=length))
    seen = []
    for turn in range(6):
        reply = started.call("GET", "/batch", headers={"Connection": "close"} if turn % 2 else {})
        seen += first_tokens(reply.json()["batch"]) or []
    assert seen == [10 * first for first in range(1, 13)]


# ---- additions of ours ------------------------------------------------------------------------------------------------------


def test_a_batch_is_delivered_again_until_it_is_acknowledged(started: ServerProcess) -> None:
    for first in range(1, 5):
        post(started, group(first=first))
    one = started.call("GET", "/batch?client=ours").json()
    again = started.call("GET", "/batch?client=ours").json()
    assert one == again
    assert started.call("POST", "/ack", {"batch_seq": one["batch_seq"]}).status == 200
    two = started.call("GET", "/batch?client=ours").json()
    assert two["batch_seq"] == one["batch_seq"] + 1
    assert (first_tokens(one["batch"]), first_tokens(two["batch"])) == ([1, 2], [3, 4])


def test_a_trainer_that_resumes_gets_the_batches_after_its_checkpoint(started: ServerProcess) -> None:
    for first in range(1, 7):
        post(started, group(first=first))
    seqs = []
    for _ in range(3):
        reply = started.call("GET", "/batch?client=ours").json()
        seqs.append(reply["batch_seq"])
        started.call("POST", "/ack", {"batch_seq": reply["batch_seq"]})
        if len(seqs) == 1:
            assert started.call("POST", "/commit", {"batch_seq": seqs[0], "step": 1}).status == 200
    started.call("POST", "/register", {**REGISTRATION, "starting_step": 1, "resume_after": seqs[0]})
    again = []
    for _ in range(2):
        reply = started.call("GET", "/batch?client=ours").json()
        again.append(reply)
        started.call("POST", "/ack", {"batch_seq": reply["batch_seq"]})
    assert [reply["batch_seq"] for reply in again] == seqs[1:]
    assert [first_tokens(reply["batch"]) for reply in again] == [[3, 4], [5, 6]]


def test_health_metrics_and_openapi(started: ServerProcess) -> None:
    post(started, group(env_id=0))
    assert started.call("GET", "/healthz").status == 200
    metrics = started.call("GET", "/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "# TYPE" in metrics.body.decode()
    assert "/scored_data" in started.call("GET", "/openapi.json").json()["paths"]


def test_heartbeat_and_reports(started: ServerProcess) -> None:
    assert started.call("POST", "/heartbeat", {"env_id": 0}).status == 200
    assert 400 <= started.call("POST", "/heartbeat", {"env_id": 99}).status < 500
    report = {"source": "trainer", "step": 3, "time": 1.5, "metrics": {"loss": 0.5}}
    assert started.call("POST", "/report", report).status == 200
    assert started.call("POST", "/report", {**report, "metrics": {"loss": "high"}}).status == 422


def test_cors_is_closed_unless_asked(server: ServerProcess) -> None:
    reply = server.call("GET", "/status", headers={"Origin": "http://elsewhere"})
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    "field",
    [
        b'"messages": [[{"role": "user", "content": "\xff\xfe"}]]',
        b'"images": ["\xff"]',
        b'"group_overrides": {"a": "\xe2\x82"}',
        b'"generation_params": {"\xff": 1}',
        b'"overrides": [{"a": "\xc0\xaf"}]',
        b'"messages": [[{"role": "user", "content": "\x01"}]]',
    ],
)
def test_text_that_is_not_utf8_never_reaches_a_batch(started: ServerProcess, field: bytes) -> None:
    body = b'{"tokens": [[1, 2]], "masks": [[1, 2]], "scores": [0.5], ' + field + b"}"
    assert post(started, None, raw=body, headers={"Content-Type": "application/json"}).status == 422
    assert post(started, None, "/scored_data_list", raw=b"[" + body + b"]").status == 422
    assert started.call("GET", "/status").json()["queue_size"] == 0


def test_half_a_surrogate_pair_is_echoed(started: ServerProcess) -> None:
    assert post(started, group(images="\ud800 ok")).status == 200
    assert started.call("GET", "/latest_example").json()["images"] == "\ud800 ok"


@pytest.mark.parametrize("value", [msgspec.msgpack.Ext(5, b"x"), {None: 1}, [{"a": {("b",): 1}}]])
def test_a_binary_group_that_json_cannot_say_is_refused(started: ServerProcess, value: Any) -> None:
    fields = msgspec.msgpack.decode(encode_group(group()))
    body = msgspec.msgpack.encode({**fields, "images": value})
    reply = post(started, None, raw=body, headers={"Content-Type": BINARY_TYPE})
    assert reply.status == 422
    assert reply.json()["detail"][0]["loc"] == ["body", "images"]


@pytest.mark.parametrize("form", ["json", "binary"])
@pytest.mark.parametrize("env_id", [-1, -(2**40), 2**31, 2**63, 2**64, 10**30])
def test_any_number_as_env_id_has_an_answer_and_harms_nothing(started: ServerProcess, form: str, env_id: int) -> None:
    if form == "json":
        reply = post(started, group(env_id=env_id))
    else:
        try:
            body = encode_group(group(env_id=env_id))
        except (OverflowError, ValueError):
            pytest.skip("the binary form has no such number")
        reply = post(started, None, raw=body, headers={"Content-Type": BINARY_TYPE})
    assert reply.status in (200, 422)
    for _ in range(2):
        assert post(started, group()).status == 200
    assert batch_of(started) is not None


def test_a_binary_group_comes_back_as_json_to_those_who_read_json(started: ServerProcess) -> None:
    logprobs = [[-0.5, 1.0, -0.25]] * 4
    sent = group(inference_logprobs=logprobs, advantages=[[0.5], []], env_id=0, generation_params={"t": 1.5})
    for _ in range(2):
        reply = post(started, None, raw=encode_group(sent), headers={"Content-Type": BINARY_TYPE})
        assert reply.json() == {"status": "received"}
    groups = batch_of(started)
    assert groups is not None
    assert groups[0] == {**dict.fromkeys(FIELDS), **sent}
