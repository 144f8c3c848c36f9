"""Run any environment by name: `python -m atroposlib.cli.serve_env SPEC [serve | process | evaluate | check] [flags]`.

SPEC is `path/to/file.py:Class` or `package.module:Class`; the class may be left out where the file defines one
environment. `check` resolves the flags as `serve` would and leaves: exit code 2 and a sentence when something is wrong.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from atroposlib.errors import PACKAGE_ADVICE, AtroposError, ConfigError, unknown_name_message

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv


WAIT_VARIABLE = "ATROPOS_WAIT_FOR"


def load_env_class(spec: str) -> type[BaseEnv]:
    """The class named by ``path.py:Class`` or ``package.module:Class``; without a class the only environment in there."""
    from atroposlib.envs.base import BaseEnv

    place, _, name = spec.rpartition(":") if ":" in spec else (spec, "", "")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    except AtroposError:
        raise
    except Exception as error:  # somebody's code: what it raises is what is wrong with it
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames[-1].filename != __file__ else ""
        raise ConfigError(
            f"{place} cannot be imported: {type(error).__name__}: {error}{at}"
            + (f"; {PACKAGE_ADVICE}" if isinstance(error, ModuleNotFoundError) else "")
        ) from error
    known = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, BaseEnv) and value.__module__ == module.__name__
    }
    if name:
        found = getattr(module, name, None)
        if inspect.isclass(found) and issubclass(found, BaseEnv):
            return found
        raise ConfigError(f"{place}: {unknown_name_message('environment', name, known)}")
    if len(known) != 1:
        raise ConfigError(
            f"{place} defines {len(known)} environments ({', '.join(known) or 'none'}); name one as {place}:CLASS"
        )
    return next(iter(known.values()))


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"no environment file {path} (looked in {Path.cwd()})")
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be loaded as a Python file")
    sys.path.insert(0, str(path.parent.resolve()))  # an environment may import its neighbours
    module = importlib.util.module_from_spec(spec)
    if name not in sys.stdlib_module_names:  # others go on importing what they mean
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"no environment module {name!r}; give a file (path/to/env.py:Class) or an installed module"
            ) from error
        raise


def main(argv: list[str]) -> int:
    """Run one command of the environment that the first argument names."""
    if not argv or argv[0] in {"-h", "--help"}:
        print(__doc__)
        return 0 if argv else 2
    spec, *rest = argv
    try:
        env_cls = load_env_class(spec)
        if rest[:1] == ["check"]:
            from atroposlib.envs.env_cli import resolve

            resolve(env_cls, "serve", rest[1:])
            return 0
    except AtroposError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    wait_for_model(os.environ.get(WAIT_VARIABLE))
    from atroposlib.envs.env_cli import main as env_main

    return env_main(env_cls, rest)


def wait_for_model(file: str | None) -> None:
    """Until the file is there that says the model's folder is complete; what is slow to load is loaded meanwhile."""
    if not file or Path(file).exists():
        return
    import transformers  # noqa: F401

    print(f"waiting for {file}", flush=True)
    while not Path(file).exists():
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
