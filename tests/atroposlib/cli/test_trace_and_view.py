"""`atropos trace` and `atropos view` on a run log."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from atroposlib.api.observer import GroupEvent
from atroposlib.api.run_log import RunLog
from atroposlib.cli.main import main
from atroposlib.cli.trace import newest_run
from atroposlib.errors import ConfigError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "one"
    log = RunLog(folder / "run_log.sqlite")
    log.group_accepted(
        GroupEvent(
            key=1, group_id="abc", env_id=0, env_name="sums", size=2, num_tokens=4, scores=[0.0, 1.0], policy_versions=[[3], [3, 4]],
            reward_components={"right": [0.0, 1.0]}, payload=b"{}", binary=False,
        )
    )  # fmt: skip
    log.batch_formed(9, ["abc"])
    log.batch_delivered(9)
    log.batch_acked(9)
    log.reported("trainer", 4, 1.0, {"batch_seq": 9.0})
    log.close()
    return folder


def test_which_groups_made_a_step(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "4", "--run", str(run_dir)]) == 0
    text = capsys.readouterr().out
    assert "batch 9" in text
    assert "abc" in text
    assert "sums" in text
    assert "3 to 4" in text
    assert main(["trace", "4", "--run", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"][0]["group_id"] == "abc"


def test_where_a_sample_went(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--sample", "abc/1", "--run", str(run_dir)]) == 0
    text = capsys.readouterr().out
    assert "sample abc/1: score 1, right 1" in text
    assert "abc/0" not in text
    assert "trained step 4; in a checkpoint not yet" in text


def test_unknown_steps_and_samples(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "7", "--run", str(run_dir)]) == 1
    assert f"no batch of the run in {run_dir} trained step 7; it has steps 4 to 4" in capsys.readouterr().out
    assert main(["trace", "--sample", "zzz", "--run", str(run_dir)]) == 1
    assert "no sample or group 'zzz'" in capsys.readouterr().out
    assert main(["trace", "4", "--run", str(run_dir / "nothing")]) == 2
    assert "no run log" in capsys.readouterr().err


def test_the_newest_run_is_taken(run_dir: Path, tmp_path: Path) -> None:
    assert newest_run(tmp_path) == run_dir / "run_log.sqlite"
    with pytest.raises(ConfigError, match="name its folder with --run"):
        newest_run(run_dir / "empty")


def test_view_serves_the_page(run_dir: Path) -> None:
    command = [sys.executable, "-m", "atroposlib.cli.main", "view", str(run_dir), "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = next(word for word in process.stdout.readline().split() if word.startswith("http"))
        overview = urllib.request.urlopen(address.replace("/live", "/live/api/overview")).read()
        assert json.loads(overview)["counts"]["groups"] == 1
    finally:
        process.terminate()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def test_view_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path)]) == 2
    assert "no run log" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"no database at all\n" * 100])
@pytest.mark.parametrize("command", ["trace", "view"])
def test_a_file_that_is_no_run_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, content: bytes
) -> None:
    path = tmp_path / "other.sqlite"
    path.write_bytes(content)
    assert main(["trace", "4", "--run", str(path)] if command == "trace" else ["view", str(path), "--no-browser"]) == 2
    assert f"{path} is not a run log" in capsys.readouterr().err
    assert path.read_bytes() == content


def test_view_on_a_port_that_is_none(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(run_dir), "--no-browser", "--port", "70000"]) == 2
    assert "cannot listen on port 70000" in capsys.readouterr().err
