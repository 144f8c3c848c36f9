"""Every endpoint against anything a client could send: the answer is never a 500 and the server stays well.

Runs over real HTTP against a server process; bodies come from hypothesis: arbitrary JSON, groups that are almost right,
random bytes, broken gzip, binary bodies with bytes changed.
"""

from __future__ import annotations

import gzip
import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atroposlib.api.binary import encode_group
from atroposlib.api.schemas import BINARY_TYPE
from rollout_process import Reply, ServerProcess

POSTS = [
    *("/register", "/register-env", "/disconnect-env", "/scored_data", "/scored_data_list", "/heartbeat", "/ack"),
    *("/commit", "/report"),
]
GETS = ["/", "/wandb_info", "/info", "/batch", "/latest_example", "/status", "/status-env", "/healthz", "/metrics"]
FIELDS = [
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs"),
    *("overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs", "group_id"),
    *("policy_versions", "reward_components", "batch_seq", "step", "source", "metrics", "time", "batch_size", "weight"),
    *("max_token_len", "wandb_group", "wandb_project", "checkpoint_dir", "save_checkpoint_interval", "starting_step"),
    *("num_steps", "resume_after", "max_token_length", "desired_name", "group_size", "min_batch_allocation"),
]
FUZZ = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

numbers = st.one_of(
    st.integers(-10, 10),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.sampled_from([2**31, 2**32, 2**63, -(2**63) - 1, 1e308, -0.0]),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=12,
)
requests = st.dictionaries(st.sampled_from(FIELDS), values, max_size=10)
GOOD = {"tokens": [[1, 2, 3], [4, 5, 6]], "masks": [[-100, 2, 3], [4, 5, 6]], "scores": [0.5, 1.0]}
REGISTRATION = {
    **{"wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 64, "num_steps": 10},
    **{"checkpoint_dir": "c", "save_checkpoint_interval": 5, "starting_step": 0},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("fuzz")
    with ServerProcess(folder, "--data-dir", str(folder / "data"), "--durability", "none") as process:
        assert process.call("POST", "/register", REGISTRATION).status == 200
        process.call("GET", "/batch")
        env = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 2}
        assert process.call("POST", "/register-env", env).json()["env_id"] == 0
        yield process
        log = process.log.read_text(errors="replace")
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:4000]


def send(server: ServerProcess, method: str, path: str, raw: bytes | None, **headers: str) -> Reply:
    """Send it, and see that nothing broke: no 5xx, and an explanation with every refusal."""
    reply = server.call(method, path, raw=raw, headers={k.replace("_", "-"): v for k, v in headers.items()})
    assert reply.status < 500, (method, path, raw and raw[:500], reply.body[:500])
    if reply.status >= 400:
        assert reply.body, (method, path, raw and raw[:500])
    return reply


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


@FUZZ
@given(path=st.sampled_from(POSTS), value=st.one_of(values, requests, st.lists(requests, max_size=3)))
def test_any_json_on_any_post(server: ServerProcess, path: str, value: Any) -> None:
    send(server, "POST", path, as_json(value), Content_Type="application/json")


@FUZZ
@given(changes=requests, many=st.booleans(), drop=st.sampled_from([None, "tokens", "masks", "scores"]))
def test_groups_that_are_almost_right(
    server: ServerProcess, changes: dict[str, Any], many: bool, drop: str | None
) -> None:
    value: Any = {**GOOD, **changes}
    value.pop(drop, None)
    path = "/scored_data_list" if many else "/scored_data"
    send(server, "POST", path, as_json([GOOD, value] if many else value), Content_Type="application/json")


@FUZZ
@given(field=st.sampled_from(["tokens", "masks", "inference_logprobs", "ref_logprobs", "advantages"]), odd=leaves)
def test_one_odd_entry_deep_in_a_list(server: ServerProcess, field: str, odd: Any) -> None:
    rows: list[list[Any]] = [[1, 2, 3], [4, 5, 6]]
    rows[1][1] = odd
    send(server, "POST", "/scored_data", as_json({**GOOD, field: rows}), Content_Type="application/json")


@FUZZ
@given(changes=st.fixed_dictionaries({}, optional=dict.fromkeys(REGISTRATION, values) | {"resume_after": values}))
def test_registrations_that_are_almost_right(server: ServerProcess, changes: dict[str, Any]) -> None:
    send(server, "POST", "/register", as_json({**REGISTRATION, **changes}), Content_Type="application/json")


@FUZZ
@given(
    path=st.sampled_from(POSTS),
    body=st.binary(max_size=200),
    kind=st.sampled_from(
        ["application/json", BINARY_TYPE, "text/plain", "", "\x7f", "application/json; charset=utf-16"]
    ),
    encoding=st.sampled_from(["", "gzip", "GZIP", "deflate", "zstd", "br", "gzip, gzip", "identity"]),
)
def test_random_bytes(server: ServerProcess, path: str, body: bytes, kind: str, encoding: str) -> None:
    send(server, "POST", path, body, Content_Type=kind, Content_Encoding=encoding)


@FUZZ
@given(cut=st.integers(0, 60), flip=st.integers(0, 500), path=st.sampled_from(POSTS))
def test_broken_gzip(server: ServerProcess, cut: int, flip: int, path: str) -> None:
    body = bytearray(gzip.compress(as_json(GOOD)))
    if flip < len(body):
        body[flip] ^= 0x55
    packed = bytes(body[: len(body) - cut]) if cut else bytes(body)
    send(server, "POST", path, packed, Content_Type="application/json", Content_Encoding="gzip")


@FUZZ
@given(seed=st.integers(0, 2**32), changes=st.integers(0, 8), many=st.booleans(), cut=st.integers(0, 40))
def test_binary_bodies_with_bytes_changed(server: ServerProcess, seed: int, changes: int, many: bool, cut: int) -> None:
    rng = random.Random(seed)
    logprobs = [[0.5, -0.5, 1.0], [0.0, -1.0, -2.0]]
    group = {**GOOD, "inference_logprobs": logprobs, "advantages": [[1.0], [2.0]], "env_id": 0, "group_id": str(seed)}
    body = bytearray(encode_group(group))
    if many:
        body = bytearray(b"\x92" + bytes(body) + encode_group(GOOD))
    for _ in range(changes):
        body[rng.randrange(len(body))] = rng.randrange(256)
    if cut < 20:
        del body[len(body) - cut :]
    path = "/scored_data_list" if many else "/scored_data"
    send(server, "POST", path, bytes(body), Content_Type=BINARY_TYPE)


@FUZZ
@given(
    path=st.sampled_from(GETS),
    query=st.dictionaries(st.sampled_from(["env_id", "client", "after", "x", ""]), st.text(max_size=8), max_size=3),
    body=st.one_of(st.none(), values.map(as_json), st.binary(max_size=20)),
    accept=st.sampled_from(["*/*", BINARY_TYPE, "application/json", "text/html", "", "a/b;q=x"]),
    encoding=st.sampled_from(["", "gzip", "gzip;q=0", "zstd", "identity", "*", "br, gzip;q=0.5"]),
)
def test_any_get(
    server: ServerProcess, path: str, query: dict[str, str], body: bytes | None, accept: str, encoding: str
) -> None:
    from urllib.parse import urlencode

    text = urlencode(query)
    headers = {"Content_Type": "application/json", "Accept": accept, "Accept_Encoding": encoding}
    reply = server.call(
        "GET",
        f"{path}?{text}" if text else path,
        raw=body,
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )
    assert reply.status < 500, (path, query, body, reply.body[:300])


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW"])
@pytest.mark.parametrize(
    "path", ["/scored_data", "/batch", "/status", "/nowhere", "//", "/%00", "/..%2f", "/status-env/x"]
)
def test_other_methods_and_paths(server: ServerProcess, method: str, path: str) -> None:
    assert server.call(method, path).status < 500


@pytest.mark.parametrize(
    "text",
    [
        b"GET /status HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /scored_data HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n{}",
        b"POST /scored_data HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /scored_data HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"POST /scored_data HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{}",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /status HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\r\n\r\n",
    ],
)
def test_malformed_http_does_not_harm_the_server(server: ServerProcess, text: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.settimeout(0.5)
        answer = b""
        try:
            sock.sendall(text)
            answer = sock.recv(65536)
        except OSError:
            pass
    assert not answer.startswith(b"HTTP/1.1 5")
    assert server.call("GET", "/healthz").status == 200


def test_after_all_of_that_good_data_still_goes_through(server: ServerProcess) -> None:
    server.call("POST", "/reset_data")
    assert server.call("POST", "/register", REGISTRATION).status == 200
    for _ in range(2):
        assert server.call("POST", "/scored_data", GOOD).json() == {"status": "received"}
    groups = server.call("GET", "/batch").json()["batch"]
    assert [group["tokens"] for group in groups] == [GOOD["tokens"]] * 2
