"""A real rollout server for tests: its own process on a free loopback port, stopped by its process id.

with serve_api() as api:                          # in memory
    requests.get(f"{api.url}/status")
with serve_api(data_dir=tmp_path) as api:         # durable
    api.kill(); api.restart()                     # same port, same folder
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path


class ApiProcess:
    """A rollout server in a process of its own."""

    def __init__(self, arguments: Sequence[str], port: int, log_file: Path | None = None) -> None:
        self.arguments = list(arguments)
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log_file = log_file
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, timeout_s: float = 30.0) -> None:
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", "atroposlib.cli.run_api", "--port", str(self.port), *self.arguments]
        with open(self.log_file or os.devnull, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + timeout_s
        while not self.healthy():
            if self.process.poll() is not None:
                raise RuntimeError(f"the rollout server ended with {self.process.returncode}: {' '.join(command)}")
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"the rollout server did not answer on {self.url} within {timeout_s} s")
            time.sleep(0.02)

    def healthy(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/healthz", timeout=2) as reply:
                return bool(reply.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def kill(self) -> None:
        """SIGKILL: no chance to write anything."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM: an orderly end."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Start again on the same port with the same arguments."""
        self.start()

    def _end(self, how: signal.Signals) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(how)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)


def free_port() -> int:
    """A port on loopback that nobody uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def serve_api(
    *arguments: str, data_dir: Path | None = None, port: int | None = None, log_file: Path | None = None
) -> Iterator[ApiProcess]:
    """A running rollout server; `arguments` are further command-line arguments of `run-api`."""
    storage = ["--in-memory"] if data_dir is None else ["--data-dir", str(data_dir)]
    api = ApiProcess([*storage, *arguments], port or free_port(), log_file)
    api.start()
    try:
        yield api
    finally:
        api.stop()
