"""``atropos serve-gym ID``: run a gymnasium environment in words as one of ours.

    atropos serve-gym FrozenLake-v1 --actions left,down,right,up --make-args '{"is_slippery": false}'
    atropos serve-gym my-game-v0 --python .venv-game/bin/python --module my_game process --env.total_steps 4

What follows the options of this command are the usual ``serve | process | evaluate`` and flags of an environment.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atroposlib.cli import foreign_env

if TYPE_CHECKING:
    from atroposlib.envs.gym_env import GymEnv


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this command, and the environment's own command line."""
    parser = foreign_env.parser_of(
        "serve-gym", "Run a gymnasium environment in words as one of ours.", "--env.max_turns 30"
    )
    parser.add_argument("gym_id", help="gymnasium id, e.g. FrozenLake-v1")
    parser.add_argument("--make-args", default="{}", help="JSON: arguments of gymnasium.make")
    parser.add_argument("--module", help="a module whose import registers the environment")
    parser.add_argument("--actions", default="", help="names of the discrete actions 0, 1, 2, ..., separated by commas")
    parser.add_argument("--instructions", help="what the model is told first")
    return foreign_env.parse(parser, argv, _env_class)


def _env_class() -> type[GymEnv]:
    from atroposlib.envs.gym_env import GymEnv

    return GymEnv


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``GymConfig`` the options stand for, checked."""
    settings = {
        "gym_id": options.gym_id,
        "gym_python": foreign_env.program(options.python),
        "gym_arguments": foreign_env.json_object("--make-args", options.make_args),
        "gym_module": options.module,
        "action_names": [name.strip() for name in options.actions.split(",") if name.strip()],
    }
    return settings | ({"instructions": options.instructions} if options.instructions else {})


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    options, rest = parse(sys.argv[1:] if argv is None else argv)
    return foreign_env.run_named(_env_class(), options.gym_id, settings_of(options), rest)
