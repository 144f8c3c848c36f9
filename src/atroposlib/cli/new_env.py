"""``atropos new-env NAME``: write a working environment and its test."""

from __future__ import annotations

import argparse
import keyword
import re
import string
from collections.abc import Sequence
from pathlib import Path

from atroposlib.errors import ConfigError
from atroposlib.utils.cli import make_folder

TEMPLATES = Path(__file__).with_name("templates")


def names_of(name: str) -> tuple[str, str]:
    """``my-task`` -> (module ``my_task``, class ``MyTaskEnv``)."""
    words = [word for word in re.split(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])", name) if word]
    module = "_".join(words).lower()
    if not module.isidentifier() or keyword.iskeyword(module):
        raise ConfigError(
            f"the name {name!r} makes no Python module; use letters, digits and -, beginning with a letter"
        )
    if words[-1].lower() == "env" and len(words) > 1:
        words.pop()
    return module, "".join(word[0].upper() + word[1:] for word in words) + "Env"


def write_environment(name: str, folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Write ``{module}.py`` and ``test_{module}.py`` into ``folder``; refuses to replace files unless told to."""
    module, class_name = names_of(name)
    values = {
        "module": module,
        "class_name": class_name,
        "title": module.replace("_", " ").capitalize(),
        "test_file": f"test_{module}.py",
    }
    targets = {folder / f"{module}.py": "environment.py.txt", folder / f"test_{module}.py": "environment_test.py.txt"}
    if not overwrite and (there := [str(path) for path in targets if path.exists()]):
        raise ConfigError(
            f"{' and '.join(there)} exist{'s' if len(there) == 1 else ''} already; choose another name or pass --force"
        )
    make_folder(folder, "--dir")
    for path, template in targets.items():
        text = (TEMPLATES / template).read_text(encoding="utf-8")
        path.write_text(string.Template(text).substitute(values), encoding="utf-8")
    return list(targets)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="atropos new-env", description="Write a working environment of about 60 lines and a test for it."
    )
    parser.add_argument("name", help="name of the environment, e.g. word-puzzles")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to put the two files (default: here)")
    parser.add_argument("--force", action="store_true", help="replace existing files")
    arguments = parser.parse_args(argv)
    environment, test = write_environment(arguments.name, arguments.dir, overwrite=arguments.force)
    _, class_name = names_of(arguments.name)
    print(f"wrote {environment} and {test}\n\nnext:")
    print(
        f"  atropos check-env {environment}:{class_name}\n  python -m pytest {test}\n"
        f"  atropos quickstart --env {environment}:{class_name} --model smollm2"
    )
    return 0
