"""Node lists, with and without scontrol."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atroposlib.envs.server_handling.slurm import expand_node_list, host_names, slurm_server_urls
from atroposlib.errors import ConfigError


@pytest.mark.parametrize(
    ("node_list", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03]", ["gpu01", "gpu02", "gpu03"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[01-02,07],login1", ["gpu01", "gpu02", "gpu07", "login1"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("rack[1-2]-gpu5.cluster", ["rack1-gpu5.cluster", "rack2-gpu5.cluster"]),
        ("x[099-101]", ["x099", "x100", "x101"]),
    ],
)
def test_ranges_are_expanded(node_list: str, hosts: list[str]) -> None:
    assert expand_node_list(node_list) == hosts


def test_a_broken_node_list_is_named() -> None:
    with pytest.raises(ConfigError, match="gpu"):
        expand_node_list("gpu[a-b]")


@pytest.fixture
def no_scontrol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def _fake_scontrol(folder: Path, body: str) -> None:
    script = folder / "scontrol"
    script.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    script.chmod(0o755)


@pytest.fixture
def fake_scontrol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    _fake_scontrol(
        tmp_path, "assert sys.argv[1:3] == ['show', 'hostnames']\nprint('from-scontrol-1')\nprint('from-scontrol-2')"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("fake_scontrol")
def test_scontrol_is_asked_when_it_is_there() -> None:
    assert host_names("gpu[1-2]") == ["from-scontrol-1", "from-scontrol-2"]


def test_a_failing_scontrol_is_not_fatal(fake_scontrol: Path, caplog: pytest.LogCaptureFixture) -> None:
    _fake_scontrol(fake_scontrol, "sys.exit(3)")
    assert host_names("gpu[1-2]") == ["gpu1", "gpu2"]
    assert "scontrol failed" in caplog.text


@pytest.mark.usefixtures("no_scontrol")
def test_urls_of_a_job() -> None:
    env = {"SLURM_JOB_NODELIST": "n[1-3]", "NUM_TRAINING_NODES": "1", "INFER_TP": "4"}
    assert slurm_server_urls(env) == [
        "http://n2:9000/v1",
        "http://n2:9001/v1",
        "http://n3:9000/v1",
        "http://n3:9001/v1",
    ]
    assert len(slurm_server_urls({"SLURM_JOB_NODELIST": "n[1-2]", "NUM_TRAINING_NODES": "1"})) == 8
    assert slurm_server_urls({"SLURM_JOB_NODELIST": "n1"}) == []
    assert slurm_server_urls({}) == []


@pytest.mark.usefixtures("no_scontrol")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"NUM_TRAINING_NODES": "2"}, "no inference server is left"),
        ({"INFER_TP": "16"}, "no inference server is left"),
        ({"INFER_TP": "two"}, "INFER_TP must be a whole number"),
        ({"NUM_TRAINING_NODES": "-1"}, "NUM_TRAINING_NODES must be"),
    ],
)
def test_impossible_jobs_are_refused(more: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        slurm_server_urls({"SLURM_JOB_NODELIST": "n[1-2]", **more})
