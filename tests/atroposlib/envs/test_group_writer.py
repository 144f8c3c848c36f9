"""JSON lines on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from atroposlib.envs.group_writer import JsonlWriter, unused_path


class Point(BaseModel):
    x: int


def test_a_line_is_on_disk_when_write_returns(tmp_path: Path):
    path = tmp_path / "deep" / "groups.jsonl"
    writer = JsonlWriter(path)
    writer.write({"scores": [np.float32(0.5)], "tokens": np.array([1, 2]), "point": Point(x=3), "text": "é</script>"})
    assert json.loads(path.read_text()) == {"scores": [0.5], "tokens": [1, 2], "point": {"x": 3}, "text": "é</script>"}
    writer.close()
    writer.write({"a": 1})
    writer.close()
    assert len(path.read_text().splitlines()) == 2


def test_an_existing_file_is_never_taken(tmp_path: Path):
    path = tmp_path / "groups.jsonl"
    assert unused_path(path) == path
    path.touch()
    assert unused_path(path) == tmp_path / "groups_1.jsonl"
    (tmp_path / "groups_1.jsonl").touch()
    assert unused_path(path) == tmp_path / "groups_2.jsonl"


def test_a_file_without_a_line_does_not_stay(tmp_path: Path):
    path = tmp_path / "groups.jsonl"
    writer = JsonlWriter(path)
    assert unused_path(path).name == "groups_1.jsonl"  # the name is taken meanwhile
    writer.close()
    writer.close()
    assert not path.exists()
    writer.write({"a": 1})
    writer.close()
    assert path.read_text() == '{"a": 1}\n'
    code = "import sys; from atroposlib.envs.group_writer import JsonlWriter; writer = JsonlWriter(sys.argv[1]); sys.exit(1)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "stopped.jsonl")], check=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["groups.jsonl"]
