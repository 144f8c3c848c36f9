"""``atropos check-env path.py:Class``: make one group without a model and explain what is wrong."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from atroposlib.envs.base import BaseEnv
from atroposlib.errors import ConfigError, unknown_name_message


def load_env_class(target: str) -> type[BaseEnv]:
    """The class named by ``path.py:Class`` or ``package.module:Class``; without a class the only environment in there."""
    place, _, class_name = target.rpartition(":") if ":" in target else (target, "", "")
    module = _import(place)
    classes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, BaseEnv) and value.__module__ == module.__name__
    }
    if class_name:
        found = getattr(module, class_name, None)
        if not (isinstance(found, type) and issubclass(found, BaseEnv)):
            raise ConfigError(f"in {place}: {unknown_name_message('environment', class_name, classes)}")
        return found
    if len(classes) != 1:
        raise ConfigError(
            f"{place} holds {len(classes)} environments ({', '.join(classes) or 'none'}); name one: {place}:ClassName"
        )
    return next(iter(classes.values()))


def _import(place: str) -> ModuleType:
    path = Path(place)
    if path.suffix != ".py":
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"cannot import {place!r} ({error}); give a file (path.py:Class) or an installed module"
            ) from error
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    sys.path.insert(0, str(path.parent.resolve()))  # an environment may import its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


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
