"""Running a plan from the command line: files, model, supervisor, terminal, report, exit code."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from atlaslib.errors import ConfigError
from atlaslib.launch.display import RunDisplay
from atlaslib.launch.folder_lock import LOCK_FILE, hold_folder
from atlaslib.launch.plan import RunPlan, fix_ports, processes, write_files
from atlaslib.launch.supervisor import ProcessSpec, RunFailedError, Supervisor

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_CONFIG, EXIT_STOPPED = 0, 1, 2, 130
"""Finished, a process could not be kept alive, wrong configuration, stopped by the user."""


@contextmanager
def hold_run(run_dir: Path, *, fresh: bool) -> Iterator[None]:
    """Keep other runs out of the folder inside this block; ``fresh`` empties it first and refuses what is not a run."""
    if fresh:
        left_by_a_run(run_dir)  # refused before a lock file lies in a stranger's folder
    with hold_folder(run_dir, "run_dir"):
        for path in left_by_a_run(run_dir) if fresh else []:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        yield


def left_by_a_run(run_dir: Path) -> list[Path]:
    """What is in the folder, but for its lock."""
    entries = [path for path in run_dir.iterdir() if path.name != LOCK_FILE] if run_dir.is_dir() else []
    if entries and not (run_dir / "plan.json").exists():
        raise ConfigError(f"{run_dir} is not a run (no plan.json in it); nothing is removed, choose another --run-dir")
    return entries


def finished_step(run_dir: Path) -> int | None:
    """The step a finished run ended with; None for one that has not finished."""
    try:
        return int(json.loads((run_dir / "done.json").read_text())["step"])
    except (OSError, ValueError, KeyError):
        return None


def keep_ports(plan: RunPlan) -> None:
    """A run that goes on keeps the addresses it had, where the plan leaves them open."""
    try:
        before = RunPlan.model_validate_json((plan.run_dir / "plan.json").read_text())
    except (OSError, ValueError):
        return
    for section, old in ((plan.rollout_server, before.rollout_server), (plan.policy_server, before.policy_server)):
        if section.port == 0 and _is_free(old.port):
            section.port = old.port


def _is_free(port: int) -> bool:
    import socket

    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def run_plan(
    plan: RunPlan,
    *,
    title: str,
    console: Console | None = None,
    live: bool | None = None,
    specs: list[ProcessSpec] | None = None,
    fresh: bool = False,
    introduction: str = "",
) -> int:
    """Run a checked plan to its end; returns the exit code."""
    with hold_run(plan.run_dir, fresh=fresh):
        console = console or Console()
        if introduction:
            console.print(introduction, highlight=False, soft_wrap=True)
        return _run(plan, title=title, console=console, live=live, specs=specs)


def _run(plan: RunPlan, *, title: str, console: Console, live: bool | None, specs: list[ProcessSpec] | None) -> int:
    from atlaslib.launch.report import write_report

    keep_ports(plan)
    fix_ports(plan)
    (plan.run_dir / "done.json").unlink(missing_ok=True)
    write_files(plan)
    page = plan.rollout_url + "/live"
    console.print(f"{title}: run folder {plan.run_dir}, live page {page}", highlight=False, soft_wrap=True)
    display = RunDisplay(
        title=title,
        run_dir=plan.run_dir,
        page=page,
        total_steps=int(plan.trainer.get("max_steps", 100)),
        console=console,
        live=live,
    )
    code = EXIT_OK
    failure = ""
    with _told_to_stop() as told:
        supervisor = Supervisor(
            specs or processes(plan), plan.run_dir, on_event=display.event, on_health=_health_reporter(plan)
        )
        try:
            with supervisor:
                supervisor.start(tick=lambda: _tick(display, told))
                supervisor.wait(tick=lambda: _tick(display, told))
        except RunFailedError as error:
            code, failure = EXIT_FAILED, str(error)
        except KeyboardInterrupt:
            code = EXIT_STOPPED
        finally:
            display.close()
    if failure:
        console.print(failure, highlight=False, markup=False, soft_wrap=True)
    report = write_report(plan.run_dir)
    _say_goodbye(console, plan, code, report, display)
    return code


def _tick(display: RunDisplay, told: threading.Event) -> None:
    if told.is_set():
        raise KeyboardInterrupt
    display.tick()


def _say_goodbye(console: Console, plan: RunPlan, code: int, report: Path | None, display: RunDisplay) -> None:
    if code == EXIT_STOPPED:
        console.print("stopped; the same command goes on from the last checkpoint", highlight=False, soft_wrap=True)
    rewards = display.state.reward_by_step
    if rewards:
        steps = sorted(rewards)
        early, late = steps[: max(1, len(steps) // 20)], steps[-max(1, len(steps) // 20) :]
        first, last = (sum(rewards[step] for step in part) / len(part) for part in (early, late))
        console.print(
            f"reward {first:.3f} at the start, {last:.3f} at the end, {steps[-1]} steps",
            highlight=False,
            soft_wrap=True,
        )
    for label, path in (
        ("model", plan.run_dir / "final_model"),
        ("checkpoints", plan.run_dir / "checkpoints"),
        ("metrics", plan.run_dir / "metrics.jsonl"),
        ("report", report),
        ("logs", plan.run_dir / "logs"),
    ):
        if path is not None and path.exists():
            console.print(f"  {label:<12}{path}", highlight=False, soft_wrap=True)
    console.print(f"  {'page again':<12}atropos view {plan.run_dir}", highlight=False, soft_wrap=True)


@contextmanager
def _told_to_stop() -> Iterator[threading.Event]:
    """SIGTERM and Ctrl-C set the event instead of tearing the supervisor down in the middle of something."""
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield told
        return

    def note(number: int, frame: FrameType | None) -> None:
        told.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _health_reporter(plan: RunPlan) -> Callable[[Mapping[str, float]], None]:
    """Posts process health to the page; a server that is down misses it."""

    def report(health: Mapping[str, float]) -> None:
        body = json.dumps({"source": "supervisor", "step": 0, "time": time.time(), "metrics": dict(health)}).encode()
        headers = {"Content-Type": "application/json"}
        if plan.rollout_server.token:
            headers["Authorization"] = f"Bearer {plan.rollout_server.token}"
        request = urllib.request.Request(plan.rollout_url + "/report", data=body, headers=headers)
        try:
            urllib.request.urlopen(request, timeout=1.0).close()
        except OSError as error:
            logger.debug("process health not reported: %s", error)

    return report
