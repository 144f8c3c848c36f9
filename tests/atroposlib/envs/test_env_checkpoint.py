"""Where an environment's checkpoints live and which one is loaded."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from atroposlib.envs.env_checkpoint import load_env_checkpoint, newest_checkpoint, save_env_checkpoint


def test_saved_under_the_name_and_step(tmp_path: Path):
    path = save_env_checkpoint(str(tmp_path), "math_0", 20, {"position": 7})
    assert path == tmp_path / "env_checkpoints" / "math_0" / "step-20.json"
    assert load_env_checkpoint(path) == {"position": 7}
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["owner.json", "step-20.json"]


def test_the_newest_at_or_before_the_step(tmp_path: Path):
    for step in (10, 20, 100):
        save_env_checkpoint(str(tmp_path), "math_0", step, {"step": step})
    assert newest_checkpoint(str(tmp_path), "math_0", 20).name == "step-20.json"  # type: ignore[union-attr]
    assert newest_checkpoint(str(tmp_path), "math_0", 99).name == "step-20.json"  # type: ignore[union-attr]
    assert newest_checkpoint(str(tmp_path), "math_0", 5) is None
    assert newest_checkpoint(str(tmp_path), "other", 50) is None


def test_the_checkpoint_of_a_dead_process_of_the_same_name_is_found(tmp_path: Path):
    code = "import sys; from atroposlib.envs.env_checkpoint import save_env_checkpoint as save; save(sys.argv[1], sys.argv[2], 30, {})"
    for name in ("math_0", "mathematics_0"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path), name], check=True)
    save_env_checkpoint(str(tmp_path), "math_1", 40, {})  # its owner lives: this process
    found = newest_checkpoint(str(tmp_path), "math_2", 50, base_name="math")
    assert found == tmp_path / "env_checkpoints" / "math_0" / "step-30.json"
    assert (
        newest_checkpoint(str(tmp_path), "math_1", 50, base_name="math")
        == tmp_path / "env_checkpoints" / "math_1" / "step-40.json"
    )
    assert newest_checkpoint(str(tmp_path), "math_2", 50) is None


def test_a_process_of_another_machine_is_left_alone(tmp_path: Path):
    path = save_env_checkpoint(str(tmp_path), "math_0", 1, {})
    owner = path.with_name("owner.json")
    owner.write_text(json.dumps({"host": "elsewhere", "pid": 2**22 + 1, "started": "1"}))
    assert newest_checkpoint(str(tmp_path), "math_1", 9, base_name="math") is None
    owner.write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1, "started": "1"}))
    assert newest_checkpoint(str(tmp_path), "math_1", 9, base_name="math") == path
    owner.write_text("not json")
    assert newest_checkpoint(str(tmp_path), "math_1", 9, base_name="math") is None
