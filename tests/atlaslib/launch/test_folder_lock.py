"""A run folder belongs to one run at a time."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from atlaslib.errors import ConfigError
from atlaslib.launch.folder_lock import LOCK_FILE, hold_folder
from atlaslib.launch.plan import make_plan
from atlaslib.launch.running import hold_run, run_plan
from atlaslib.launch.supervisor import ProcessSpec

HOLD = "import sys, time; from pathlib import Path; from atlaslib.launch.folder_lock import hold_folder\n"
HOLD += "with hold_folder(Path(sys.argv[1]), 'run_dir'): print('held', flush=True); time.sleep(60)"
TAKE = "import sys; from pathlib import Path; from atlaslib.launch.running import hold_run\n"
TAKE += "try:\n  with hold_run(Path(sys.argv[1]), fresh=True): text = 'taken'\nexcept ValueError as error: text = str(error)\n"
TAKE += "Path(sys.argv[2]).write_text(text)"


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "weights").write_text("precious")
    (run_dir / "plan.json").write_text("{}")
    (run_dir / "model").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "shared").touch()
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(run_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        before = sorted(path.name for path in run_dir.iterdir())
        plan = make_plan({"environments": [{"path": "a:B"}], "run_dir": str(run_dir)}, where="f.yaml")
        console = Console(file=io.StringIO())
        for fresh in (False, True):
            with pytest.raises(ConfigError, match=rf"run_dir: \S+/run is used by another run \(process {first.pid}\)"):
                run_plan(plan, title="second", fresh=fresh, introduction="Hello", console=console)
        assert sorted(path.name for path in run_dir.iterdir()) == before
        assert (run_dir / "plan.json").read_text() == "{}"
        assert console.file.getvalue() == ""  # type: ignore[attr-defined]
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    with hold_run(run_dir, fresh=False):
        assert (run_dir / "checkpoints" / "weights").read_text() == "precious"
        assert (run_dir / LOCK_FILE).read_text() == str(os.getpid())
    with hold_run(run_dir, fresh=True):
        assert [path.name for path in run_dir.iterdir()] == [LOCK_FILE]
        with pytest.raises(ConfigError, match="is used by another run"), hold_folder(run_dir, "run_dir"):
            pass
    assert (tmp_path / "elsewhere" / "shared").exists()


def test_the_folder_is_held_while_the_processes_run(tmp_path: Path) -> None:
    run_dir, outcome = tmp_path / "run", tmp_path / "outcome"
    plan = make_plan({"environments": [{"path": "a:B"}], "run_dir": str(run_dir)}, where="f.yaml")
    second = [sys.executable, "-c", TAKE, str(run_dir), str(outcome)]
    specs = [ProcessSpec(name="trainer", command=second, ends_run=True)]
    console = Console(file=io.StringIO())
    assert run_plan(plan, title="a run", specs=specs, console=console, live=False, fresh=True) == 0
    assert f"is used by another run (process {os.getpid()})" in outcome.read_text()
    assert (run_dir / "plan.json").exists()
    subprocess.run(second, check=True)
    assert outcome.read_text() == "taken"


def test_a_folder_that_is_no_run_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match="is not a run"), hold_run(folder, fresh=True):
        pass
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_folder_one_may_not_write_into(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(ConfigError, match=r"output_dir: .*lock cannot be written"), hold_folder(tmp_path, "output_dir"):
        pass
