"""``atropos check-env path.py:Class``: make one group without a model and explain what is wrong."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from atroposlib.cli.serve_env import load_env_class


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit code 0 when no error was found, 1 otherwise, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="atropos check-env", description="Make one group without a model and explain what is wrong."
    )
    parser.add_argument("target", help="path.py:Class, or package.module:Class")
    parser.add_argument("--group-size", type=int, help="rollouts in the group (default: the environment's own)")
    parser.add_argument("--tokenizer", help="use this tokenizer instead of a tiny one")
    parser.add_argument(
        "--reply", action="append", help="what the model answers; give several for different answers in turn"
    )
    parser.add_argument("--evaluate", action="store_true", help="also run evaluate()")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a stage may take")
    parser.add_argument("--show-prompt", action="store_true", help="print what the model was asked first")
    arguments = parser.parse_args(argv)
    if arguments.group_size is not None and arguments.group_size < 1:
        parser.error(f"--group-size is {arguments.group_size}; it must be 1 or more")
    if arguments.timeout <= 0:
        parser.error(f"--timeout is {arguments.timeout:g}; it must be more than 0 seconds")
    from atroposlib.testing.env_checker import check_env

    report = asyncio.run(
        check_env(
            load_env_class(arguments.target),
            group_size=arguments.group_size,
            tokenizer_name=arguments.tokenizer,
            replies=arguments.reply,
            evaluate=arguments.evaluate,
            timeout_s=arguments.timeout,
        )
    )
    print(report)
    if arguments.show_prompt and report.prompts:
        print(f"\n--- first prompt ---\n{report.prompts[0]}")
    print("\nno errors" if report.ok else "\nnot ready yet")
    return 0 if report.ok else 1
