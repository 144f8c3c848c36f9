"""Where an environment's checkpoints live and which one is loaded."""

from __future__ import annotations

from pathlib import Path

from atroposlib.envs.env_checkpoint import load_env_checkpoint, newest_checkpoint, save_env_checkpoint


def test_saved_under_the_name_and_step(tmp_path: Path):
    path = save_env_checkpoint(str(tmp_path), "math_0", 20, {"position": 7})
    assert path == tmp_path / "env_checkpoints" / "math_0" / "step-20.json"
    assert load_env_checkpoint(path) == {"position": 7}
    assert [entry.name for entry in path.parent.iterdir()] == ["step-20.json"]


def test_the_newest_at_or_before_the_step(tmp_path: Path):
    for step in (10, 20, 100):
        save_env_checkpoint(str(tmp_path), "math_0", step, {"step": step})
    assert newest_checkpoint(str(tmp_path), "math_0", 20).name == "step-20.json"  # type: ignore[union-attr]
    assert newest_checkpoint(str(tmp_path), "math_0", 99).name == "step-20.json"  # type: ignore[union-attr]
    assert newest_checkpoint(str(tmp_path), "math_0", 5) is None
    assert newest_checkpoint(str(tmp_path), "other", 50) is None
