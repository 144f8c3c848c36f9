"""A real rollout server in its own process, and plain HTTP calls to it, for the tests that go over the wire."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def find_free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass(kw_only=True, slots=True)
class Reply:
    """One HTTP reply, its body already unpacked when it came gzipped."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes
    was_gzip: bool

    def json(self) -> Any:
        return json.loads(self.body)


def call(
    port: int,
    method: str,
    path: str,
    value: Any = None,
    *,
    raw: bytes | None = None,
    headers: dict[str, str] | None = None,
    timeout_s: float = 20.0,
) -> Reply:
    """One request on a fresh connection; `value` goes as JSON, `raw` as it is."""
    sent = dict(headers or {})
    if value is not None:
        raw = json.dumps(value).encode()
        sent.setdefault("Content-Type", "application/json")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request(method, path, body=raw, headers=sent)
        response = connection.getresponse()
        body = response.read()
        names = {name.lower(): text for name, text in response.getheaders()}
    finally:
        connection.close()
    was_gzip = names.get("content-encoding") == "gzip"
    return Reply(
        status=response.status, headers=names, body=gzip.decompress(body) if was_gzip else body, was_gzip=was_gzip
    )


class ServerProcess:
    """`python -m atroposlib.cli.run_api` on a loopback port, with its log in a file; start it again after a kill."""

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.port = port or find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"server-{self.port}.log"
        self.command = [
            *(sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(self.port)),
            *options,
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> ServerProcess:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, cwd=self.log.parent, env={**os.environ, "PYTHONFAULTHANDLER": "1"}
            )
        if wait:
            self.wait_until_up()
        return self

    def wait_until_up(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if self.call("GET", "/healthz", timeout_s=5.0).status == 200:
                    return
            except OSError:
                pass
            except http.client.HTTPException:
                pass
            if not self.is_running():
                raise AssertionError(f"the server did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.02)
        raise AssertionError(f"the server was not up after {timeout_s} s:\n{self.log.read_text()[-4000:]}")

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def call(self, method: str, path: str, value: Any = None, **options: Any) -> Reply:
        return call(self.port, method, path, value, **options)

    def kill(self) -> None:
        """SIGKILL: no handler runs, nothing is flushed."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, as an operator would."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


_FORK_MAIN = """
import json, os, signal, sys
import uvicorn, uvloop, httptools
import atroposlib.api.protocol, atroposlib.api.server, atroposlib.frontend.live.attach
from atroposlib.cli import run_api

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0), os.dup2(log, 1), os.dup2(log, 2)
        try:
            status = run_api.command(request["arguments"])
        except BaseException:
            import traceback
            traceback.print_exc()
            status = 70
        finally:
            os._exit(status)
    print(pid, flush=True)
"""


class ForkedServer(ServerProcess):
    """As `ServerProcess`, but each start forks a process that has imported everything: a restart takes milliseconds."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder, *options)
        self.pid: int | None = None
        self._parent = subprocess.Popen(
            [sys.executable, "-c", _FORK_MAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder
        )

    def start(self, *, wait: bool = True) -> ForkedServer:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        request = {"log": str(self.log), "arguments": self.command[3:]}
        self._parent.stdin.write(json.dumps(request).encode() + b"\n")
        self._parent.stdin.flush()
        self.pid = int(self._parent.stdout.readline())
        if wait:
            self.wait_until_up()
        return self

    def is_running(self) -> bool:
        if self.pid is None:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _end(self, how: signal.Signals) -> None:
        if self.pid is not None and self.is_running():
            os.kill(self.pid, how)
            while self.is_running():
                time.sleep(0.002)
        self.pid = None

    def close(self) -> None:
        """Kill the server and the process it is forked from."""
        self.kill()
        self._parent.kill()
        self._parent.wait()
        for pipe in (self._parent.stdin, self._parent.stdout):
            if pipe is not None:
                pipe.close()

    def __exit__(self, *exc: object) -> None:
        self.close()
