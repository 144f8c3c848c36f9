"""The short way of posted groups gives the answers of the long way, however the bytes arrive."""

from __future__ import annotations

import itertools
import json
import re
import socket
import time
from collections.abc import Iterator

import pytest

from atroposlib.api.binary import encode_group
from rollout_process import ServerProcess

GROUP = json.dumps({"tokens": [[1, 2]], "masks": [[1, 2]], "scores": [0.5]}).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("protocol"), "--in-memory", "--no-live-page") as process:
        yield process


@pytest.fixture(autouse=True)
def empty_queue(server: ServerProcess) -> None:
    registration = {"batch_size": 64, "max_token_len": 8, "num_steps": 1, "save_checkpoint_interval": 1}
    registration |= {"starting_step": 0, "wandb_group": "g", "wandb_project": "p", "checkpoint_dir": "c"}
    server.call("POST", "/reset_data")
    assert server.call("POST", "/register", registration).status == 200


def size(server: ServerProcess) -> int:
    return int(server.call("GET", "/status").json()["queue_size"])


def request(body: bytes = GROUP, *headers: bytes, line: bytes = b"POST /scored_data HTTP/1.1") -> bytes:
    return b"\r\n".join((line, b"Host: x", b"Content-Length: %d" % len(body), *headers, b"", body))


def talk(server: ServerProcess, *pieces: bytes, pause_s: float = 0.0, replies: int = 1) -> list[bytes]:
    """Send the pieces one after the other; the status lines of the replies."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(pause_s)
        answer = b""
        while answer.count(b"HTTP/1.1 ") < replies or not answer.endswith(b"}"):
            data = sock.recv(65536)
            if not data:
                break
            answer += data
    return re.findall(rb"HTTP/1.1 \d+ [A-Za-z ]+", answer)


@pytest.mark.parametrize("long_way", [(), (b"Origin: http://page",)])
def test_an_encoding_that_changes_nothing_is_none(server: ServerProcess, long_way: tuple[bytes, ...]) -> None:
    assert talk(server, request(GROUP, b"Content-Encoding: identity", *long_way)) == [b"HTTP/1.1 200 OK"]
    assert size(server) == 1


def test_a_request_in_pieces(server: ServerProcess) -> None:
    whole = request()
    for cuts in ((5,), (40,), (len(whole) - 10,), (30, 60, len(whole) - 3)):
        edges = [0, *cuts, len(whole)]
        pieces = [whole[a:b] for a, b in itertools.pairwise(edges)]
        assert talk(server, *pieces, pause_s=0.02) == [b"HTTP/1.1 200 OK"]
    assert size(server) == 4


def test_long_bodies_and_what_follows_them(server: ServerProcess) -> None:
    kind = b"Content-Type: application/vnd.atropos+msgpack"
    sent = []
    for length in (10, 3000, 40_000):  # one read, two, many; the heads differ in the content length only
        rows = [list(range(length)), list(range(length, 0, -1))]
        logprobs = [[-0.5] * length, [-0.25] * length]
        sent.append({"tokens": rows, "masks": rows, "scores": [0.5, 1.5], "inference_logprobs": logprobs})
    bodies = [encode_group(group) for group in sent]
    assert [len(body) > 65536 for body in bodies] == [False, True, True]
    stream = b"".join(request(body, kind) for body in bodies)
    pieces = [stream[at : at + 300_000] for at in range(0, len(stream), 300_000)]
    assert talk(server, *pieces, replies=3) == [b"HTTP/1.1 200 OK"] * 3
    filler = request(json.dumps({"tokens": [[1]] * 58, "masks": [[1]] * 58, "scores": [0.5] * 58}).encode())
    assert talk(server, filler) == [b"HTTP/1.1 200 OK"]
    got = server.call("GET", "/batch").json()["batch"]
    assert [{name: group[name] for name in sent[0]} for group in got[:3]] == sent


def test_requests_that_come_before_the_answer(server: ServerProcess) -> None:
    get = b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n"
    lines = talk(server, request() * 3 + get + request(), replies=5)
    assert lines == [b"HTTP/1.1 200 OK"] * 5
    assert size(server) == 4


@pytest.mark.parametrize(
    "odd",
    [
        request(GROUP, b"Connection: close"),
        request(GROUP, b"X-Anything: 1"),
        request(GROUP, b"Content-Type: application/json; charset=utf-8"),
        request(line=b"POST /scored_data?x=1 HTTP/1.1"),
        request(GROUP, b"Origin: http://elsewhere"),
        b"POST /scored_data HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
        % (len(GROUP), GROUP),
    ],
)
def test_unusual_requests_are_answered_alike(server: ServerProcess, odd: bytes) -> None:
    assert talk(server, odd) == [b"HTTP/1.1 200 OK"]
    assert size(server) == 1


@pytest.mark.parametrize(
    "bad",
    [
        b"POST /scored_data HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: %d\r\n\r\n%s"
        % (len(GROUP), GROUP),
        b"POST /scored_data HTTP/1.1\r\nHost: x\r\nContent-Length : %d\r\n\r\n%s" % (len(GROUP), GROUP),
        b"POST /scored_data HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n%s"
        % (len(GROUP), GROUP),
        b"POST /scored_data HTTP/1.1\r\nHost: x\r\nContent-Length: +%d\r\n\r\n%s" % (len(GROUP), GROUP),
    ],
)
def test_a_head_that_two_readers_could_read_differently_stores_nothing(server: ServerProcess, bad: bytes) -> None:
    [line, *_] = talk(server, bad)
    assert line.startswith(b"HTTP/1.1 4")
    assert size(server) == 0


def test_refusals_keep_the_connection(server: ServerProcess) -> None:
    lines = talk(server, request(b'{"tokens": []}') + request(b"{") + request(), replies=3)
    assert [line.split()[1] for line in lines] == [b"422", b"422", b"200"]
    assert size(server) == 1


def test_a_client_that_leaves_in_the_middle_stores_nothing(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(request()[:-5])
    time.sleep(0.1)
    assert size(server) == 0
    assert server.call("GET", "/healthz").status == 200
