"""The umbrella command ``atropos``: a table of commands, each imported only when it is called.

A command is a function that takes its arguments as a list and returns an exit code. Commands that train or
sample live in atlaslib; they are named here by their import path only, so this package stays free of torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from atroposlib import __version__
from atroposlib.errors import AtroposError, MissingExtraError, unknown_name_message
from atroposlib.utils.closed_pipe import ends_with_its_reader


class Command(NamedTuple):
    """Where a command lives and what it is for."""

    target: str
    """``module:function``, imported late."""
    summary: str


COMMANDS: dict[str, Command] = {
    "quickstart": Command(
        "atlaslib.cli.quickstart:main", "train a small model on a real task, here and now, with a live page"
    ),
    "run": Command("atlaslib.cli.run:main", "start everything one configuration file names, and watch over it"),
    "train": Command("atlaslib.cli.train:main", "train with GRPO (any parameter as key=value or --key value)"),
    "engine": Command(
        "atlaslib.cli.engine:main", "serve a model with the embedded engine (OpenAI routes, token-exact /generate)"
    ),
    "api": Command("atroposlib.cli.run_api:command", "start the rollout server (also: run-api)"),
    "status": Command("atroposlib.cli.status:main", "a table of queue, batches, environments and trainer"),
    "view": Command("atroposlib.cli.view:main", "the live page for a finished run"),
    "trace": Command("atroposlib.cli.trace:main", "which samples made a step, where a sample went"),
    "new-env": Command("atroposlib.cli.new_env:main", "write a working environment and its test"),
    "check-env": Command("atroposlib.cli.check_env:main", "run one group of an environment and explain what is wrong"),
    "serve-verifiers": Command("atroposlib.cli.serve_verifiers:main", "run a `verifiers` environment as one of ours"),
    "serve-gym": Command("atroposlib.cli.serve_gym:main", "run a gymnasium text environment as one of ours"),
}


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (0 success, 1 failure, 2 wrong usage)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        print(overview())
        return 0
    if arguments[0] in {"-V", "--version"}:
        print(f"atropos-atlas {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"atropos: {unknown_name_message('command', name, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return load(COMMANDS[name].target)(rest)
    except AtroposError as error:
        print(f"atropos {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def load(target: str) -> Callable[[list[str]], int]:
    """Import ``module:function``; a missing torch becomes a sentence that names the extra.

    It is looked for, not imported: the commands of atlaslib import it late, some only in the processes they start.
    """
    module_name, _, function = target.partition(":")
    for package in ("torch", "accelerate"):
        if module_name.startswith("atlaslib.") and importlib.util.find_spec(package) is None:
            raise MissingExtraError("this command", package=package, extra="train")
    command: Callable[[list[str]], int] = getattr(importlib.import_module(module_name), function)
    return command


def overview() -> str:
    """The help text: every command with its one-line summary."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: atropos COMMAND [ARGUMENTS]", "", *lines, "", "atropos COMMAND --help shows what a command takes."]
    )


if __name__ == "__main__":
    sys.exit(main())
