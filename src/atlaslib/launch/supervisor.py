"""The supervisor: starts the processes of a run, waits until each is ready, restarts what may be restarted, stops all.

It knows processes, not what they do: a `ProcessSpec` says how to start one, how to see that it is ready, whether its end
is the end of the run, and how patient to be. Output of every process goes to `logs/NAME.log` of the run's folder.
Children do not outlive the supervisor, even when it is killed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from atlaslib.errors import AtroposError

logger = logging.getLogger(__name__)

SHORT_LIFE_S = 15.0
"""A process that ends sooner than this has failed to start; several such ends in a row end the run."""
POLL_S = 0.1


class RunFailedError(AtroposError, RuntimeError):
    """A process of the run cannot be kept alive; the message holds the end of its log."""


@dataclass(kw_only=True, slots=True)
class ProcessSpec:
    """How to run one process."""

    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    """Additions to the environment of this process."""
    ready_url: str | None = None
    """Answers 200 once the process is ready; None: ready at once."""
    ready_timeout_s: float = 120.0
    ends_run: bool = False
    """Exit code 0 of this process is the end of the run."""
    may_finish: bool = False
    """Exit code 0 means it has nothing more to do; else it is started again."""
    max_short_lives: int = 5
    """So many ends in a row within `SHORT_LIFE_S` and the run is given up."""
    stop_timeout_s: float = 20.0
    nice: int = 0


@dataclass(kw_only=True, slots=True)
class Child:
    """A process that was started, and its history."""

    spec: ProcessSpec
    popen: subprocess.Popen[bytes] | None = None
    log: IO[bytes] | None = None
    started: float = 0.0
    starts: int = 0
    short_lives: int = 0
    wait_until: float = 0.0
    """Not started again before this moment."""
    done: bool = False
    """Ended well and is not wanted again."""
    exit_codes: deque[int] = field(default_factory=lambda: deque(maxlen=200))

    @property
    def running(self) -> bool:
        """The process exists and has not ended."""
        return self.popen is not None and self.popen.poll() is None

    @property
    def restarts(self) -> int:
        """Starts after the first."""
        return max(0, self.starts - 1)


class Supervisor:
    """Keeps the processes of one run alive until the one that matters has finished.

    Example: ``with Supervisor(specs, run_dir) as run: run.start(); run.wait()``
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        run_dir: Path,
        *,
        on_event: Callable[[str], None] = lambda text: None,
        on_health: Callable[[Mapping[str, float]], None] | None = None,
        health_interval_s: float = 2.0,
    ) -> None:
        self.run_dir = run_dir
        self.log_dir = run_dir / "logs"
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.children = {spec.name: Child(spec=spec) for spec in specs}
        self.on_event, self.on_health, self.health_interval_s = on_event, on_health, health_interval_s
        self.finished = False
        self._next_health = 0.0
        self._cpu: dict[str, tuple[float, float]] = {}

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- starting ------------------------------------------------------------------------------------------------------

    def start(self, *, tick: Callable[[], None] = lambda: None) -> None:
        """Start every process in order; one with a `ready_url` must answer before the next starts."""
        for child in self.children.values():
            self._launch(child)
            if child.spec.ready_url is not None:
                self._wait_ready(child, tick)

    def _launch(self, child: Child) -> None:
        spec = child.spec
        if child.log is None:
            child.log = (self.log_dir / f"{spec.name}.log").open("ab")
        child.starts += 1
        child.started = time.monotonic()
        child.log.write(f"---- start {child.starts} at {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        child.log.flush()
        child.popen = subprocess.Popen(
            spec.command,
            stdin=subprocess.DEVNULL,
            stdout=child.log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.env},
            start_new_session=True,  # Ctrl-C reaches the supervisor only, which stops all in order
            preexec_fn=_die_with_parent(os.getpid(), spec.nice) if sys.platform == "linux" else None,
        )
        self.on_event(
            f"{spec.name} started (process {child.popen.pid})"
            if child.starts == 1
            else f"{spec.name} started again (start {child.starts})"
        )

    def _wait_ready(self, child: Child, tick: Callable[[], None]) -> None:
        deadline = time.monotonic() + child.spec.ready_timeout_s
        while not answers(child.spec.ready_url or ""):
            self._check_child(child)
            tick()
            if time.monotonic() > deadline:
                raise RunFailedError(
                    f"{child.spec.name} was not ready within {child.spec.ready_timeout_s:g} s ({child.spec.ready_url} does not answer)\n{self.log_end(child)}"
                )
            time.sleep(POLL_S)
        self.on_event(f"{child.spec.name} ready")

    # ---- watching ------------------------------------------------------------------------------------------------------

    def wait(self, *, timeout_s: float | None = None, tick: Callable[[], None] = lambda: None) -> bool:
        """Watch until the run has finished; True when it did. ``tick`` is called about ten times a second."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.finished:
            self.check()
            tick()
            if deadline is not None and time.monotonic() > deadline:
                return False
            if not self.finished:
                time.sleep(POLL_S)
        return True

    def check(self) -> None:
        """One look at every process."""
        for child in self.children.values():
            self._check_child(child)
        now = time.monotonic()
        if self.on_health is not None and now >= self._next_health:
            self._next_health = now + self.health_interval_s
            self.on_health(self.health())

    def _check_child(self, child: Child) -> None:
        if child.done:
            return
        if child.popen is None:
            if child.starts and time.monotonic() >= child.wait_until:
                self._launch(child)
            return
        code = child.popen.poll()
        if code is not None:
            child.popen = None
            child.exit_codes.append(code)
            self._ended(child, code)

    def _ended(self, child: Child, code: int) -> None:
        spec = child.spec
        if code == 0 and spec.ends_run:
            child.done = self.finished = True
            self.on_event(f"{spec.name} has finished")
            return
        if code == 0 and spec.may_finish:
            child.done = True
            self.on_event(f"{spec.name} done")
            return
        lived = time.monotonic() - child.started
        killed = code == -signal.SIGKILL
        child.short_lives = child.short_lives + 1 if lived < SHORT_LIFE_S and not killed else 0
        how = "ended" if code == 0 else f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        if code == 2 or child.short_lives >= spec.max_short_lives:
            raise RunFailedError(
                f"{spec.name} {how} after {lived:.0f} s and is not started again\n{self.log_end(child)}"
            )
        pause = 0.2 if killed else min(10.0, 0.5 * 2**child.short_lives)
        child.wait_until = time.monotonic() + pause
        self.on_event(f"{spec.name} {how}; starting it again")
        logger.warning("%s %s after %.0f s; starting it again", spec.name, how, lived)

    def health(self) -> dict[str, float]:
        """Running or not, restarts, memory and CPU share of every process."""
        values: dict[str, float] = {}
        for name, child in self.children.items():
            values[f"process/{name}/up"] = float(child.running)
            values[f"process/{name}/restarts"] = float(child.restarts)
            usage = process_usage(child.popen.pid) if child.popen is not None else None
            if usage is not None:
                cpu_s, rss_mb = usage
                now = time.monotonic()
                before = self._cpu.get(name)
                self._cpu[name] = (now, cpu_s)
                values[f"process/{name}/rss_mb"] = rss_mb
                if before is not None and now > before[0] and cpu_s >= before[1]:
                    values[f"process/{name}/cpu_percent"] = 100 * (cpu_s - before[1]) / (now - before[0])
        return values

    def log_end(self, child: Child, lines: int = 15) -> str:
        """The last lines of a process's log, and where the rest is."""
        path = self.log_dir / f"{child.spec.name}.log"
        text = path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []
        return f"---- end of {path}\n" + "\n".join(text)

    # ---- stopping ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask every process to leave, last started first; kill what does not."""
        for child in reversed(list(self.children.values())):
            self._signal(child, signal.SIGTERM)
            # The one that ends the run may save a checkpoint and needs the others to be there while it does.
            if child.spec.ends_run:
                self._reap(child)
        for child in reversed(list(self.children.values())):
            self._reap(child)
            if child.log is not None:
                child.log.close()
                child.log = None

    def _reap(self, child: Child) -> None:
        if child.popen is None:
            return
        try:
            child.popen.wait(child.spec.stop_timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("%s did not leave within %g s and is killed", child.spec.name, child.spec.stop_timeout_s)
            self._signal(child, signal.SIGKILL)
            child.popen.wait()
        child.exit_codes.append(child.popen.returncode)
        child.popen = None

    @staticmethod
    def _signal(child: Child, number: signal.Signals) -> None:
        if child.running and child.popen is not None:
            child.popen.send_signal(number)


def answers(url: str, timeout_s: float = 2.0) -> bool:
    """Whether a GET of ``url`` gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as reply:
            return bool(reply.status == 200)
    except (OSError, ValueError):
        return False


def process_usage(pid: int) -> tuple[float, float] | None:
    """CPU seconds and resident megabytes of a process (Linux); None where that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return (int(fields[11]) + int(fields[12])) / ticks, int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _die_with_parent(parent: int, nice: int) -> Callable[[], None]:
    """Runs in the child before exec: the kernel kills it when the supervisor is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_pdeathsig = 1

    def prepare() -> None:
        libc.prctl(pr_set_pdeathsig, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)
        if nice:
            os.nice(nice)

    return prepare
