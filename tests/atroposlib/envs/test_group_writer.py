"""JSON lines on disk."""

from __future__ import annotations

import json
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
