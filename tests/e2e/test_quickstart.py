"""`atropos quickstart` and `atropos run` as a user meets them: from an installed wheel, in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from atroposlib.api.run_log import read_run_log

ROOT = Path(__file__).parents[2]
SMALL = [
    "trainer.per_device_train_batch_size=32",
    "trainer.num_generations=8",
    "environments.0.config.group_size=8",
    "trainer.save_steps=2",
]


def atropos(
    *arguments: str, python: str = sys.executable, cwd: Path, **options: object
) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "atroposlib.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, text=True, capture_output=True, timeout=500, check=False, **options)  # type: ignore[call-overload, no-any-return]


def trained_steps(run_dir: Path) -> list[int]:
    log = read_run_log(run_dir)
    try:
        return [row[0] for row in log.execute("SELECT step FROM steps ORDER BY step")]
    except sqlite3.OperationalError:  # the server is about to make its tables
        return []
    finally:
        log.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A quickstart of three steps, shared by the tests that look at what it left."""
    folder = tmp_path_factory.mktemp("quickstart")
    done = atropos("quickstart", "--plain", "--steps", "3", "--run-dir", "run", *SMALL, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run", done.stdout


@pytest.mark.timeout(600)
def test_it_leaves_model_checkpoint_metrics_and_report(run: tuple[Path, str]) -> None:
    run_dir, output = run
    assert "/live" in output
    assert "reward" in output
    assert (run_dir / "final_model" / "config.json").exists()
    assert (run_dir / "checkpoints" / "checkpoint-2" / "trainer_state.json").exists()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["policy/mismatch_abs"] < 1e-3 for line in lines if line["rollout/staleness_max"] == 0)
    report = (run_dir / "report.html").read_text()
    assert "<svg" in report
    assert "<script" not in report
    assert trained_steps(run_dir) == [1, 2, 3]
    assert json.loads((run_dir / "done.json").read_text())["step"] == 3
    assert {path.name for path in (run_dir / "logs").iterdir()} == {
        "server.log",
        "trainer.log",
        "repeat_letters.log",
    }


@pytest.mark.timeout(600)
def test_again_says_it_has_finished_and_more_steps_go_on(run: tuple[Path, str]) -> None:
    run_dir, _ = run
    again = atropos("quickstart", "--plain", "--steps", "3", "--run-dir", "run", *SMALL, cwd=run_dir.parent)
    assert again.returncode == 0
    assert "has finished at step 3" in again.stdout
    more = atropos("quickstart", "--plain", "--steps", "4", "--run-dir", "run", *SMALL, cwd=run_dir.parent)
    assert more.returncode == 0, more.stdout + more.stderr
    assert trained_steps(run_dir) == [1, 2, 3, 4]


@pytest.mark.timeout(600)
def test_ctrl_c_stops_everything_and_keeps_a_checkpoint(run: tuple[Path, str], tmp_path: Path) -> None:
    model = run[0] / "model"
    command = [
        sys.executable,
        "-m",
        "atroposlib.cli.main",
        "quickstart",
        "--plain",
        "--steps",
        "1000",
        "--run-dir",
        "run",
    ]
    command += ["--model", str(model), "--env", "atroposlib.envs.quickstart_env:RepeatLetters", *SMALL]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run_dir = tmp_path / "run"
    try:
        wait_for_a_step(process, run_dir)
        second = atropos("quickstart", "--plain", "--fresh", "--run-dir", "run", cwd=tmp_path)
        assert second.returncode == 2
        assert second.stdout == ""
        assert second.stderr.startswith(
            f"atropos quickstart: run_dir: run is used by another run (process {process.pid})"
        )
        assert trained_steps(run_dir)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, output
    assert "goes on from the last checkpoint" in output
    assert list((run_dir / "checkpoints").glob("checkpoint-*/trainer_state.json"))
    assert _processes_of(run_dir) == []


def wait_for_a_step(process: subprocess.Popen[str], run_dir: Path) -> None:
    deadline = time.monotonic() + 300
    while not ((run_dir / "server" / "run_log.sqlite").exists() and trained_steps(run_dir)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.3)


def _processes_of(run_dir: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(run_dir) in line:
                found.append(line)
    return found


def test_run_names_file_key_and_nearest_key(tmp_path: Path) -> None:
    config = tmp_path / "plan.yaml"
    config.write_text("trainr: {}\nenvironments: [{path: 'atroposlib.envs.quickstart_env:RepeatLetters'}]\n")
    wrong = atropos("run", str(config), cwd=tmp_path)
    assert wrong.returncode == 2
    assert "plan.yaml: unknown key 'trainr'; did you mean 'trainer'?" in wrong.stderr


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    config = tmp_path / "plan.yaml"
    config.write_text("environments: [{path: 'atroposlib.envs.quickstart_env:RepeatLetters'}]\n")
    dry = atropos("run", str(config), "trainer.max_steps=7", "--dry-run", cwd=tmp_path)
    assert dry.returncode == 0, dry.stderr
    assert "max_steps: 7" in dry.stdout
    assert "atlaslib.launch.trainer_process" in dry.stdout
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_is_no_run_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("x")
    refused = atropos("quickstart", "--fresh", "--run-dir", "precious", cwd=tmp_path)
    assert refused.returncode == 2
    assert "is not a run" in refused.stderr
    assert [path.name for path in (tmp_path / "precious").iterdir()] == ["thesis.txt"]


def test_a_mistake_on_the_command_line_is_named_once(tmp_path: Path) -> None:
    wrong = atropos("quickstart", "trainr.max_steps=1", cwd=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr == "atropos quickstart: command line: unknown key 'trainr'; did you mean 'trainer'?\n"


def _install(folder: Path, *, system_site: bool) -> str:
    """Build the wheel and install it into a new virtual environment; returns its Python."""
    have_builder = importlib.util.find_spec("hatchling") is not None
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder / "dist"), str(ROOT)]
    built = subprocess.run([*command, *(["--no-build-isolation"] if have_builder else [])], timeout=300, check=False)
    if built.returncode != 0 and not have_builder:
        pytest.skip("building the wheel needs hatchling, which is neither installed nor to be had from a package index")
    assert built.returncode == 0
    wheel = next((folder / "dist").glob("*.whl"))
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    target = f"{wheel}[train]" if not system_site else str(wheel)
    extra = ["--no-deps"] if system_site else ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([python, "-m", "pip", "install", "-q", *extra, target], check=True, timeout=1500)
    if system_site:  # the dependencies of the running interpreter, but not the sources of the repository
        packages = next((folder / "venv" / "lib").glob("python3*")) / "site-packages"
        here = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "dependencies.pth").write_text("\n".join(here) + "\n")
    return python


@pytest.mark.timeout(900)
def test_from_an_installed_wheel(tmp_path: Path) -> None:
    python = _install(tmp_path, system_site=True)
    where = subprocess.run(
        [python, "-c", "import atlaslib; print(atlaslib.__file__)"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        check=True,
    )
    assert str(tmp_path / "venv") in where.stdout
    assert {path.name for path in (tmp_path / "venv").rglob("frontend/live/*.*")} >= {
        "index.html",
        "app.js",
        "charts.js",
        "reader.js",
        "style.css",
    }
    done = atropos("quickstart", "--plain", "--steps", "2", "--run-dir", "run", *SMALL, python=python, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert trained_steps(tmp_path / "run") == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_from_an_installed_wheel_in_an_empty_environment(tmp_path: Path) -> None:
    python = _install(tmp_path, system_site=False)
    done = atropos("quickstart", "--plain", "--run-dir", "run", python=python, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    log = read_run_log(tmp_path / "run")
    last = log.execute(
        "SELECT avg(value) FROM metrics WHERE source='trainer' AND name='reward' AND step > 70"
    ).fetchone()[0]
    log.close()
    assert last > 0.8
