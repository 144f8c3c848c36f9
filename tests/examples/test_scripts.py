"""Every script and plan of `examples/` runs, in a small form."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, text=True, capture_output=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def example(name: str) -> str:
    return str(ROOT / "examples" / name)


def test_the_whole_idea_in_one_file(tmp_path: Path) -> None:
    assert len((ROOT / "examples" / "minimal_grpo_loop.py").read_text().splitlines()) < 250
    output = run(tmp_path, example("minimal_grpo_loop.py"), "--steps", "20", "--warmup-steps", "60", "--prompts", "8")
    rewards = [float(value) for value in re.findall(r"reward (\d\.\d+)", output)]
    assert len(rewards) == 2
    assert "held-out exactly right" in output


def test_train_arithmetic(tmp_path: Path) -> None:
    output = run(
        tmp_path, example("train_arithmetic.py"), "--model", "tiny", "--steps", "2", "--group", "4", "--output", "out"
    )
    assert "held-out reward" in output
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2


def test_train_teacher(tmp_path: Path) -> None:
    output = run(tmp_path, example("train_teacher.py"), "--steps", "2", "--warmup-steps", "10", "--output", "out")
    assert "eval_student_accuracy" in output


def test_distill(tmp_path: Path) -> None:
    output = run(tmp_path, example("distill.py"), "--steps", "12", "--warmup-steps", "60", "--output", "out")
    before, after = (float(value) for value in re.findall(r"(-?\d+\.\d+) (?:before|after)", output))
    assert after > before


@pytest.mark.timeout(500)
def test_multi_environment(tmp_path: Path) -> None:
    from atlaslib.models.tiny import tiny_model_folder
    from atroposlib.api.run_log import read_run_log

    model = tiny_model_folder(tmp_path / "model")
    settings = [f"model={model}", f"run_dir={tmp_path / 'run'}", "trainer.max_steps=2", "trainer.learning_rate=0"]
    settings += [f"environments.1.path={ROOT}/examples/environments/letter_counting.py"]
    settings += [f"environments.{index}.config.ensure_scores_are_not_same=false" for index in range(2)]
    output = run(tmp_path, "-m", "atroposlib.cli.main", "run", example("multi_environment.yaml"), *settings, "--plain")
    assert "trainer has finished" in output
    log = read_run_log(tmp_path / "run")
    envs = {row[0] for row in log.execute("SELECT DISTINCT env FROM groups")}
    log.close()
    assert envs <= {"sums_0", "letters_0"}
    assert envs
