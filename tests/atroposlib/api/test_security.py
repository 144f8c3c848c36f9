"""Who may call, what may be sent, what is told."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import zstandard
from rollout_calls import Caller, group, registration

from atroposlib.api.middleware import HttpError, decode_body, is_loopback
from atroposlib.cli import run_api
from atroposlib.errors import ConfigError
from atroposlib.testing.api import ApiProcess, free_port, serve_api

SECRET = "correct horse battery staple"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    """A server with a token, a small body limit and an allowed origin, logging everything."""
    log = tmp_path_factory.mktemp("guarded") / "log"
    with serve_api(
        "--token",
        SECRET,
        "--max-body-mb",
        "0.1",
        "--cors-origin",
        "https://page.example",
        "--log-level",
        "debug",
        log_file=log,
    ) as api:
        yield api


AUTHORISED = {"authorization": f"Bearer {SECRET}"}


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/status",
        "/status-env",
        "/batch",
        "/metrics",
        "/overview",
        "/docs",
        "/latest_example",
        "/live/api/overview",
        "/nowhere",
    ],
)
@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", f"Basic {SECRET}", SECRET, f"Bearer {SECRET}x"])
def test_nothing_is_told_without_the_token(guarded: ApiProcess, path: str, header: str | None) -> None:
    reply = requests.get(guarded.url + path, headers={} if header is None else {"authorization": header}, timeout=10)
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path", ["/scored_data", "/scored_data_list", "/register", "/reset_data", "/ack", "/heartbeat"]
)
def test_nothing_is_changed_without_the_token(guarded: ApiProcess, path: str) -> None:
    assert requests.post(guarded.url + path, json=group(1), timeout=10).status_code == 401
    assert (
        requests.post(guarded.url + path, json=group(1), headers={"authorization": "Bearer no"}, timeout=10).status_code
        == 401
    )


def test_with_the_token_everything_works_and_health_needs_none(guarded: ApiProcess) -> None:
    assert requests.get(f"{guarded.url}/healthz", timeout=10).status_code == 200
    assert requests.post(f"{guarded.url}/scored_data", json=group(1), headers=AUTHORISED, timeout=10).json() == {
        "status": "received"
    }
    assert (
        requests.get(f"{guarded.url}/status", headers={"authorization": f"bearer {SECRET}"}, timeout=10).status_code
        == 200
    )


def test_large_bodies_are_refused(guarded: ApiProcess) -> None:
    body = b" " * 200_000
    for path in ("/scored_data", "/register"):
        reply = requests.post(guarded.url + path, data=body, headers=AUTHORISED, timeout=10)
        assert reply.status_code == 413
        assert "--max-body-mb" in reply.json()["detail"]

    def chunks() -> Iterator[bytes]:  # no content length: counted as it comes
        for _ in range(200):
            yield b" " * 1000

    assert requests.post(f"{guarded.url}/scored_data", data=chunks(), headers=AUTHORISED, timeout=10).status_code == 413


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@pytest.mark.parametrize("path", ["/scored_data", "/register"])
def test_bombs_and_torn_bodies(guarded: ApiProcess, encoding: str, path: str) -> None:
    def post(body: bytes, name: str = encoding) -> int:
        return requests.post(
            guarded.url + path, data=body, headers=AUTHORISED | {"content-encoding": name}, timeout=20
        ).status_code

    pack = gzip.compress if encoding == "gzip" else zstandard.compress
    bomb = pack(b" " * 50_000_000)
    assert len(bomb) < 100_000
    assert post(bomb) == 413
    whole = pack(b'{"tokens": [[1]], "masks": [[1]], "scores": [1.0]}')
    assert post(whole[:-3]) == 400
    assert post(whole[:5]) == 400
    assert post(b"not compressed at all") == 400
    assert post(whole, "br") == 415
    assert post(whole) == (200 if path == "/scored_data" else 422)


def test_a_body_is_never_taken_for_a_request(guarded: ApiProcess) -> None:
    """The head is answered early (too large); what follows is still its body, whatever it looks like."""
    inner_body = json.dumps(group(66)).encode()
    inner = b"POST /scored_data HTTP/1.1\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s" % (
        SECRET.encode(),
        len(inner_body),
        inner_body,
    )
    before = requests.get(f"{guarded.url}/metrics", headers=AUTHORISED, timeout=10).text
    with socket.create_connection(("127.0.0.1", guarded.port)) as sock:
        sock.settimeout(5)
        sock.sendall(
            b"POST /register HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\ncontent-length: 300000\r\n\r\n"
            % SECRET.encode()
        )
        assert b" 413 " in sock.recv(4096)
        sock.sendall(inner)
        time.sleep(0.3)
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            assert b"HTTP/1.1" not in sock.recv(4096)  # at most the rest of the first answer
    after = requests.get(f"{guarded.url}/metrics", headers=AUTHORISED, timeout=10).text
    accepted = [
        next(line for line in text.splitlines() if line.startswith("atropos_groups_accepted_total"))
        for text in (before, after)
    ]
    assert accepted[0] == accepted[1]


@pytest.mark.parametrize(
    "lengths",
    [
        b"content-length: 5\r\ncontent-length: 6",
        b"content-length: 5\r\ntransfer-encoding: chunked",
        b"content-length: -1",
    ],
)
def test_contradictory_lengths_are_refused(guarded: ApiProcess, lengths: bytes) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port)) as sock:
        sock.settimeout(5)
        sock.sendall(
            b"POST /scored_data HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n%s\r\n\r\n12345"
            % (SECRET.encode(), lengths)
        )
        assert b" 400 " in sock.recv(4096)


def test_the_server_lives_on_and_logs_no_secret(guarded: ApiProcess) -> None:
    assert requests.get(f"{guarded.url}/healthz", timeout=10).status_code == 200
    assert guarded.log_file is not None
    log = guarded.log_file.read_text()
    assert "POST /scored_data -> 413" in log
    assert SECRET not in log
    assert "horse" not in log


def test_other_origins_are_not_let_in(guarded: ApiProcess, api: ApiProcess) -> None:
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    for url in (guarded.url, api.url):
        for path in ("/scored_data", "/register", "/status"):
            assert "access-control-allow-origin" not in requests.options(url + path, headers=asked, timeout=10).headers
    wanted = requests.options(f"{guarded.url}/status", headers=asked | {"origin": "https://page.example"}, timeout=10)
    assert wanted.headers["access-control-allow-origin"] == "https://page.example"
    got = requests.get(f"{guarded.url}/status", headers=AUTHORISED | {"origin": "https://page.example"}, timeout=10)
    assert got.headers["access-control-allow-origin"] == "https://page.example"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_other_machines_need_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATROPOS_TOKEN", raising=False)
    options = run_api.parser().parse_args(["--host", host])
    with pytest.raises(ConfigError, match="lets other machines in; set a token"):
        run_api.check(options)
    run_api.check(run_api.parser().parse_args(["--host", host, "--token", "x"]))
    run_api.check(run_api.parser().parse_args(["--host", host, "--insecure"]))


def test_the_default_is_loopback() -> None:
    options = run_api.parser().parse_args([])
    assert options.host == "127.0.0.1"
    run_api.check(options)


def test_an_occupied_port_is_a_sentence(
    api: ApiProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["run-api", "--in-memory", "--port", str(api.port)])
    assert run_api.main() == 2
    assert f"cannot listen on 127.0.0.1:{api.port}" in capsys.readouterr().err


def test_reset_by_get_only_from_this_machine(tmp_path: Path) -> None:
    address = _own_address()
    if address is None:
        assert not is_loopback({"client": ("192.0.2.1", 1)})
        return
    port = free_port()
    with serve_api("--host", "0.0.0.0", "--insecure", "--no-live-page", port=port):
        call = Caller(f"http://{address}:{port}")
        call.post("/register", registration())
        assert requests.get(f"{call.url}/reset_data", timeout=10).status_code == 405
        assert call.get("/info")["batch_size"] == 4
        assert requests.get(f"http://127.0.0.1:{port}/reset_data", timeout=10).status_code == 200
        assert call.get("/info")["batch_size"] == -1
        assert requests.post(f"{call.url}/reset_data", timeout=10).status_code == 200


def _own_address() -> str | None:
    """An address of this machine that is not loopback, if it has one (nothing is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
            address = str(sock.getsockname()[0])
        except OSError:
            return None
    return None if address.startswith("127.") else address


@pytest.mark.parametrize(
    ("client", "expected"), [(("127.0.0.1", 1), True), (("::1", 1), True), (("10.0.0.1", 1), False), (None, True)]
)
def test_loopback(client: tuple[str, int] | None, expected: bool) -> None:
    assert is_loopback({"client": client}) is expected


def test_decompression_stops_at_the_limit() -> None:
    packed = gzip.compress(b"x" * 1000) + gzip.compress(b"y" * 1000)  # two members
    assert decode_body(packed, b"gzip", 2000) == b"x" * 1000 + b"y" * 1000
    with pytest.raises(HttpError, match="limit is 1999"):
        decode_body(packed, b"gzip", 1999)
