"""``atropos serve-verifiers NAME``: run an environment of the ``verifiers`` package as one of ours.

    python -m venv .venv-verifiers && .venv-verifiers/bin/pip install verifiers my-environment
    atropos serve-verifiers my-environment --python .venv-verifiers/bin/python
    atropos serve-verifiers my-environment --python ... process --env.total_steps 4      # groups to a file

What follows the options of this command are the usual ``serve | process | evaluate`` and flags of an environment.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atroposlib.cli import foreign_env

if TYPE_CHECKING:
    from atroposlib.envs.verifiers_env import VerifiersEnv


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this command, and the environment's own command line (``serve`` when none is named)."""
    parser = foreign_env.parser_of(
        "serve-verifiers", "Run a verifiers environment as one of ours.", "--env.group_size 8"
    )
    parser.add_argument("name", help="the environment, as verifiers knows it (my-env or owner/my-env)")
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
    return foreign_env.parse(parser, argv, _env_class)


def _env_class() -> type[VerifiersEnv]:
    from atroposlib.envs.verifiers_env import VerifiersEnv

    return VerifiersEnv


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``VerifiersConfig`` the options stand for, checked."""
    return {
        "verifiers_env": options.name,
        "verifiers_python": foreign_env.program(options.python),
        "verifiers_arguments": foreign_env.json_object("--args", options.args),
        "verifiers_api": options.api,
        "verifiers_runtime": None if options.runtime == "own" else options.runtime,
        "verifiers_harness": options.harness,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    options, rest = parse(sys.argv[1:] if argv is None else argv)
    return foreign_env.run_named(_env_class(), options.name, settings_of(options), rest)
