"""``atropos serve-gym ID``: run a gymnasium environment in words as one of ours.

    atropos serve-gym FrozenLake-v1 --actions left,down,right,up --make-args '{"is_slippery": false}'
    atropos serve-gym my-game-v0 --python .venv-game/bin/python --module my_game process --env.total_steps 4

What follows the options of this command are the usual ``serve | process | evaluate`` and flags of an environment.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atroposlib.cli.serve_verifiers import explain, split_command
from atroposlib.errors import ConfigError

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this command, and the environment's own command line."""
    parser = argparse.ArgumentParser(
        prog="atropos serve-gym",
        description="Run a gymnasium environment in words as one of ours.",
        epilog="Then: serve (default), process or evaluate, with the flags of any environment, e.g. --env.max_turns 30.",
    )
    parser.add_argument("gym_id", help="gymnasium id, e.g. Taxi-v3")
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="Python of the virtual environment it is installed in (default: this one)",
    )
    parser.add_argument("--make-args", default="{}", help="JSON: arguments of gymnasium.make")
    parser.add_argument("--module", help="a module whose import registers the environment")
    parser.add_argument("--actions", default="", help="names of the discrete actions 0, 1, 2, ..., separated by commas")
    parser.add_argument("--instructions", help="what the model is told first")
    own, rest = split_command(argv)
    explain(parser, own, _env_class)
    return parser.parse_args(own), rest


def _env_class() -> type[BaseEnv]:
    from atroposlib.envs.gym_env import GymEnv

    return GymEnv


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``GymConfig`` the options stand for, checked."""
    try:
        arguments = json.loads(options.make_args)
    except ValueError as error:
        raise ConfigError(f"--make-args is not JSON ({error}): {options.make_args!r}") from error
    python = shutil.which(options.python)
    if python is None:
        raise ConfigError(
            f"--python {options.python!r} is not a program; name the python of the environment's virtual environment"
        )
    settings = {
        "gym_id": options.gym_id,
        "gym_python": str(Path(python).absolute()),
        "gym_arguments": arguments,
        "gym_module": options.module,
        "action_names": [name.strip() for name in options.actions.split(",") if name.strip()],
    }
    return settings | ({"instructions": options.instructions} if options.instructions else {})


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    options, rest = parse(sys.argv[1:] if argv is None else argv)
    from atroposlib.envs import env_cli
    from atroposlib.envs.gym_env import GymConfig, GymEnv

    settings = settings_of(options)

    class NamedGymEnv(GymEnv):
        """The environment named on the command line."""

        name = re.sub(r"\W+", "_", options.gym_id)

        @classmethod
        def config_init(cls) -> tuple[GymConfig, Any]:
            config, servers = super().config_init()
            return config.model_copy(update=settings), servers

    return env_cli.main(NamedGymEnv, rest)
