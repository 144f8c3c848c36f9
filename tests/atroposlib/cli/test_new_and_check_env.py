"""``atropos new-env`` writes an environment that works at once; ``atropos check-env`` says so, or says why not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atroposlib.cli.check_env import load_env_class
from atroposlib.cli.check_env import main as check_env
from atroposlib.cli.main import main as atropos
from atroposlib.cli.new_env import names_of, write_environment
from atroposlib.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("word-puzzles", ("word_puzzles", "WordPuzzlesEnv")),
        ("WordPuzzles", ("word_puzzles", "WordPuzzlesEnv")),
        ("my_env", ("my_env", "MyEnv")),
        ("sums2", ("sums2", "Sums2Env")),
    ],
)
def test_names(name: str, expected: tuple[str, str]) -> None:
    assert names_of(name) == expected


@pytest.mark.parametrize("name", ["", "1st", "class", "---"])
def test_impossible_names(name: str) -> None:
    with pytest.raises(ConfigError, match="makes no Python module"):
        names_of(name)


def test_the_new_environment_works_and_its_test_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert atropos(["new-env", "word-puzzles", "--dir", str(tmp_path)]) == 0
    path = tmp_path / "word_puzzles.py"
    assert "check-env" in capsys.readouterr().out
    assert 40 <= len(path.read_text().splitlines()) <= 75
    assert "$" not in path.read_text()
    assert check_env([f"{path}:WordPuzzlesEnv", "--show-prompt"]) == 0
    output = capsys.readouterr().out
    assert "no errors" in output
    assert "What is" in output
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_word_puzzles.py")]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed" in run.stdout


def test_existing_files_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_environment("a-b", tmp_path)
    (tmp_path / "a_b.py").write_text("precious")
    assert atropos(["new-env", "a-b", "--dir", str(tmp_path)]) == 2
    assert "exist already" in capsys.readouterr().err
    assert (tmp_path / "a_b.py").read_text() == "precious"
    write_environment("a-b", tmp_path, overwrite=True)
    assert "class ABEnv" in (tmp_path / "a_b.py").read_text()


def test_check_env_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = write_environment("broken-one", tmp_path)
    path.write_text(
        path.read_text().replace('return float(text.strip() == item["answer"])', "raise RuntimeError('no idea')")
    )
    assert check_env([str(path)]) == 1
    output = capsys.readouterr().out
    assert "RuntimeError: no idea" in output
    assert "not ready yet" in output


def test_load_env_class_says_what_it_found(tmp_path: Path) -> None:
    path, _ = write_environment("some-task", tmp_path)
    assert load_env_class(str(path)).__name__ == "SomeTaskEnv"
    with pytest.raises(ConfigError, match="did you mean 'SomeTaskEnv'"):
        load_env_class(f"{path}:SomeTask")
    with pytest.raises(ConfigError, match="unknown environment 'Path'"):
        load_env_class("pathlib:Path")
    with pytest.raises(ConfigError, match="no environment file"):
        load_env_class(str(tmp_path / "nothing.py:X"))
    with pytest.raises(ConfigError, match="no environment module"):
        load_env_class("no.such.module:X")
    empty = tmp_path / "empty.py"
    empty.write_text("")
    with pytest.raises(ConfigError, match="defines 0 environments"):
        load_env_class(str(empty))


def test_new_env_where_no_folder_can_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert atropos(["new-env", "puzzles", "--dir", str(tmp_path / "file")]) == 2
    assert "--dir: the folder" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value"), [("--group-size", "0"), ("--timeout", "0")])
def test_check_env_refuses_impossible_numbers(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        check_env(["any.py", flag, value])
    assert end.value.code == 2
    assert f"{flag} is {value}; it must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import nosuch_package",
            "ModuleNotFoundError: No module named 'nosuch_package' at {0}:1; install that package",
        ),
        ("def broken(:", "SyntaxError: invalid syntax (broken_env.py, line 1)"),
        ("\nnumber = 1 / 0", "ZeroDivisionError: division by zero at {0}:2"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken_env.py"
    file.write_text(text)
    assert atropos(["check-env", f"{file}:BrokenEnv"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"atropos check-env: {file} cannot be imported: {message.format(file)}")
    assert error.count("\n") == 1


def test_a_missing_package_is_named_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_environment("a-b", tmp_path)[0]
    file.write_text(file.read_text().replace("self.random = random.Random(0)", "import nosuch_package"))
    assert atropos(["check-env", str(file)]) == 1
    shown = capsys.readouterr().out
    assert "setup() raised ModuleNotFoundError: No module named 'nosuch_package'" in shown
    assert "install that package" in shown
