"""Commands whose output nobody reads any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atroposlib.utils.closed_pipe import EXIT_CODE, INTERRUPTED, ends_with_its_reader

EXAMPLE = Path(__file__).parents[3] / "examples" / "environments" / "arithmetic.py"
ENTRY = "import sys; from atroposlib.cli.{0} import main; sys.exit(main())"


def _run_unread(command: list[str], *, errors_too: bool = False) -> tuple[int, str]:
    """Exit code and standard error of a command whose standard output has no reader."""
    read, write = os.pipe()
    os.close(read)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            stdout=write,
            stderr=write if errors_too else subprocess.PIPE,
            env=buffered,
            timeout=60,
        )
    finally:
        os.close(write)
    return done.returncode, (done.stderr or b"").decode()


@pytest.mark.parametrize(
    "command",
    [
        ["-c", ENTRY.format("main"), "--help"],  # fails only when the interpreter ends
        ["-u", "-c", ENTRY.format("main"), "--help"],  # fails at once
        ["-c", ENTRY.format("main"), "trace", "--help"],  # argparse exits
        ["-c", ENTRY.format("run_api"), "--help"],
        ["-c", ENTRY.format("view_run"), "--help"],
        ["-c", ENTRY.format("view_run_multimodal"), "--help"],
        ["-c", ENTRY.format("sft"), "--help"],
        ["-c", ENTRY.format("dpo"), "--help"],
        ["-c", ENTRY.format("inference_node_wandb_watcher"), "--help"],
        [str(EXAMPLE), "serve", "--help"],
    ],
)
def test_a_command_that_nobody_reads_ends_quietly(command: list[str]) -> None:
    assert _run_unread(command) == (EXIT_CODE, "")


def test_errors_that_nobody_reads_end_it_too() -> None:
    assert _run_unread(["-c", ENTRY.format("main"), "nosuch"], errors_too=True)[0] == EXIT_CODE


def test_what_is_read_ends_as_ever() -> None:
    done = subprocess.run([sys.executable, "-c", ENTRY.format("main"), "nosuch"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown command 'nosuch'" in done.stderr


def test_another_broken_pipe_is_a_failure_like_any_other() -> None:
    @ends_with_its_reader
    def command() -> int:
        raise BrokenPipeError("a worker has gone")

    with pytest.raises(BrokenPipeError, match="a worker has gone"):
        command()


def test_an_interrupt_ends_it_quietly() -> None:
    @ends_with_its_reader
    def command() -> int:
        raise KeyboardInterrupt

    assert command() == INTERRUPTED == 130
