"""`atropos api`: settings with which no server can start."""

from __future__ import annotations

from pathlib import Path

import pytest

from atroposlib.cli.main import main


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_a_port_that_is_none(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["api", "--in-memory", "--port", port]) == 2
    assert f"--port is {port}; it must be from 0 (any free one) to 65535" in capsys.readouterr().err


def test_a_data_dir_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["api", "--port", "0", "--data-dir", str(tmp_path / "file")]) == 2
    assert "--data-dir: the folder" in capsys.readouterr().err
