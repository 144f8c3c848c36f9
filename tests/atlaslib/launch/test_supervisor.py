"""The supervisor: order of starts, readiness, restarts, giving up, stopping, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atlaslib.launch.supervisor import ProcessSpec, RunFailedError, Supervisor, process_usage

PYTHON = sys.executable


def python(code: str) -> list[str]:
    return [PYTHON, "-S", "-c", code]


def wait_for(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""


def test_the_next_process_starts_when_the_one_before_is_ready(tmp_path: Path, free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}/"
    probe = f"import urllib.request; print(urllib.request.urlopen('{url}').status, flush=True)"
    specs = [
        ProcessSpec(name="server", command=[PYTHON, "-c", SERVER.format(port=free_port)], ready_url=url),
        ProcessSpec(name="worker", command=python(probe), ends_run=True),
    ]
    events: list[str] = []
    with Supervisor(specs, tmp_path, on_event=events.append) as run:
        run.start()
        assert run.wait(timeout_s=20)
        server = run.children["server"].popen
    assert (tmp_path / "logs" / "worker.log").read_text().splitlines()[-1] == "200"
    assert events.index("server ready") < next(i for i, text in enumerate(events) if text.startswith("worker started"))
    assert server is not None
    assert server.returncode == -signal.SIGTERM


def test_a_killed_process_is_started_again(tmp_path: Path) -> None:
    specs = [
        ProcessSpec(name="steady", command=python("import time; time.sleep(60)")),
        ProcessSpec(name="main", command=python("import time; time.sleep(60)"), ends_run=True),
    ]
    with Supervisor(specs, tmp_path) as run:
        run.start()
        child = run.children["steady"]
        for _ in range(3):
            wait_for(lambda: (run.check(), child.running)[1])
            pid = child.popen.pid
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: (run.check(), child.running and child.popen.pid != pid)[1])
        assert child.restarts == 3
        assert list(child.exit_codes) == [-9, -9, -9]
        assert run.health()["process/steady/restarts"] == 3
        assert run.health()["process/steady/up"] == 1
        wait_for(lambda: run.health()["process/steady/rss_mb"] > 1)


def test_a_process_that_cannot_start_ends_the_run_with_the_end_of_its_log(tmp_path: Path) -> None:
    spec = ProcessSpec(name="broken", command=python("raise SystemExit('no such model')"), max_short_lives=2)
    with Supervisor([spec], tmp_path) as run:
        run.start()
        with pytest.raises(RunFailedError, match="no such model"):
            run.wait(timeout_s=20)
        assert run.children["broken"].starts == 2


def test_wrong_configuration_is_not_tried_again(tmp_path: Path) -> None:
    with Supervisor([ProcessSpec(name="p", command=python("raise SystemExit(2)"))], tmp_path) as run:
        run.start()
        with pytest.raises(RunFailedError, match="exit code 2"):
            run.wait(timeout_s=20)
        assert run.children["p"].starts == 1


def test_a_process_that_never_gets_ready_is_named(tmp_path: Path, free_port: int) -> None:
    spec = ProcessSpec(
        name="slow",
        command=python("import time; time.sleep(60)"),
        ready_url=f"http://127.0.0.1:{free_port}/",
        ready_timeout_s=0.5,
    )
    with Supervisor([spec], tmp_path) as run, pytest.raises(RunFailedError, match=r"slow was not ready within 0\.5 s"):
        run.start()


def test_a_process_that_ignores_the_request_to_leave_is_killed(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    )
    spec = ProcessSpec(name="stubborn", command=python(code), stop_timeout_s=0.3)
    run = Supervisor([spec], tmp_path)
    run.start()
    wait_for(lambda: "ready" in (tmp_path / "logs" / "stubborn.log").read_text())
    run.stop()
    assert run.children["stubborn"].exit_codes[-1] == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_children_do_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from atlaslib.launch.supervisor import ProcessSpec, Supervisor
run = Supervisor([ProcessSpec(name="child", command=[sys.executable, "-S", "-c", "import time; time.sleep(60)"])], Path({str(tmp_path)!r}))
run.start()
print(run.children["child"].popen.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([PYTHON, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: process_usage(pid) is None or _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
