"""What ``serve-gym`` and ``serve-verifiers`` share: environments of another package, run as one of ours from its own Python."""

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


def parser_of(command: str, description: str, example_flag: str) -> argparse.ArgumentParser:
    """A parser with the options every such command has."""
    parser = argparse.ArgumentParser(
        prog=f"atropos {command}",
        description=description,
        epilog=f"Then: serve (default), process or evaluate, with the flags of any environment, e.g. {example_flag}.",
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="Python of the virtual environment it is installed in (default: this one)",
    )
    return parser


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], env_cls: Callable[[], type[BaseEnv]]
) -> tuple[argparse.Namespace, list[str]]:
    """The options of the command, and the environment's own command line; ``--help`` shows the flags of both and ends."""
    own, rest = split_command(argv)
    if any(word in ("-h", "--help") for word in own):
        from atroposlib.envs.env_help import command_help

        print(f"{parser.format_help()}\n{command_help(env_cls(), 'serve')}")
        raise SystemExit(0)
    return parser.parse_args(own), rest


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words, and the environment's: from ``serve | process | evaluate`` or its first flag on (``serve`` by default)."""
    from atroposlib.envs.env_cli import COMMANDS

    words = list(argv)
    flags = ("--env.", "--openai.", "--config", "--slurm", "--testing")
    start = next((index for index, word in enumerate(words) if word in COMMANDS or word.startswith(flags)), len(words))
    own, rest = words[:start], words[start:]
    return own, rest if rest and rest[0] in COMMANDS else ["serve", *rest]


def json_object(flag: str, text: str) -> dict[str, Any]:
    """The JSON object given to a flag."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is not JSON ({error}): {text!r}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} must be a JSON object, got {text!r}")
    return value


def program(name: str) -> str:
    """The absolute path of the Python to use."""
    found = shutil.which(name)
    if found is None:
        raise ConfigError(
            f"--python {name!r} is not a program; name the python of the environment's virtual environment"
        )
    return str(Path(found).absolute())


def run_named(env_cls: type[BaseEnv], name: str, settings: dict[str, Any], argv: list[str]) -> int:
    """The environment's own command line, for ``env_cls`` with these settings and this name."""
    from atroposlib.envs import env_cli

    def config_init(cls: type[BaseEnv]) -> tuple[Any, Any]:
        config, servers = env_cls.config_init()
        return config.model_copy(update=settings), servers

    members = {"name": re.sub(r"\W+", "_", name), "config_init": classmethod(config_init), "__doc__": env_cls.__doc__}
    return env_cli.main(type(f"Named{env_cls.__name__}", (env_cls,), members), argv)
