"""``atropos serve-verifiers NAME``: run an environment of the ``verifiers`` package as one of ours.

    python -m venv .venv-verifiers && .venv-verifiers/bin/pip install verifiers my-environment
    atropos serve-verifiers my-environment --python .venv-verifiers/bin/python
    atropos serve-verifiers my-environment --python ... process --env.total_steps 4      # groups to a file

What follows the options of this command are the usual ``serve | process | evaluate`` and flags of an environment.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atroposlib.errors import ConfigError

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this command, and the environment's own command line (``serve`` when none is named)."""
    parser = argparse.ArgumentParser(
        prog="atropos serve-verifiers",
        description="Run a verifiers environment as one of ours.",
        epilog="Then: serve (default), process or evaluate, with the flags of any environment, e.g. --env.group_size 8.",
    )
    parser.add_argument("name", help="the environment, as verifiers knows it (my-env or owner/my-env)")
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="Python of the virtual environment it is installed in (default: this one)",
    )
    parser.add_argument(
        "--args",
        default="{}",
        help="JSON: its configuration (current API) or arguments of load_environment (older API)",
    )
    parser.add_argument(
        "--api",
        choices=("auto", "v1", "legacy"),
        default="auto",
        help="which API it is written for (default: looked up)",
    )
    parser.add_argument(
        "--runtime",
        default="subprocess",
        help="where harnesses run: subprocess, docker, ... or 'own' for what it says itself",
    )
    parser.add_argument("--harness", help="harness to use instead of its own")
    own, rest = split_command(argv)
    explain(parser, own, _env_class)
    return parser.parse_args(own), rest


def explain(parser: argparse.ArgumentParser, argv: Sequence[str], env_cls: Callable[[], type[BaseEnv]]) -> None:
    """With ``--help`` among our own words: show our options, then every flag of the environment, and end."""
    if any(word in ("-h", "--help") for word in argv):
        from atroposlib.envs.env_help import command_help

        print(f"{parser.format_help()}\n{command_help(env_cls(), 'serve')}")
        raise SystemExit(0)


def _env_class() -> type[BaseEnv]:
    from atroposlib.envs.verifiers_env import VerifiersEnv

    return VerifiersEnv


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words, and the environment's: from ``serve | process | evaluate`` or its first flag on (``serve`` by default)."""
    from atroposlib.envs.env_cli import COMMANDS

    words = list(argv)
    flags = ("--env.", "--openai.", "--config", "--slurm", "--testing")
    start = next((index for index, word in enumerate(words) if word in COMMANDS or word.startswith(flags)), len(words))
    own, rest = words[:start], words[start:]
    return own, rest if rest and rest[0] in COMMANDS else ["serve", *rest]


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``VerifiersConfig`` the options stand for, checked."""
    try:
        arguments = json.loads(options.args)
    except ValueError as error:
        raise ConfigError(f"--args is not JSON ({error}): {options.args!r}") from error
    if not isinstance(arguments, dict):
        raise ConfigError(f"--args must be a JSON object, got {options.args!r}")
    python = shutil.which(options.python)
    if python is None:
        raise ConfigError(
            f"--python {options.python!r} is not a program; name the python of the environment's virtual environment"
        )
    return {
        "verifiers_env": options.name,
        "verifiers_python": str(Path(python).absolute()),
        "verifiers_arguments": arguments,
        "verifiers_api": options.api,
        "verifiers_runtime": None if options.runtime == "own" else options.runtime,
        "verifiers_harness": options.harness,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    options, rest = parse(sys.argv[1:] if argv is None else argv)
    from atroposlib.envs import env_cli
    from atroposlib.envs.verifiers_env import VerifiersConfig, VerifiersEnv

    settings = settings_of(options)

    class NamedVerifiersEnv(VerifiersEnv):
        """The environment named on the command line."""

        name = re.sub(r"\W+", "_", options.name)

        @classmethod
        def config_init(cls) -> tuple[VerifiersConfig, Any]:
            config, servers = super().config_init()
            return config.model_copy(update=settings), servers

    return env_cli.main(NamedVerifiersEnv, rest)
