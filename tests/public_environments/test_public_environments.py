"""The environments published with atropos 0.4.0 run as they are: `make environments` fetches them and runs this, two at a time.

Each runs in a process of its own through its own command line; only data sets, tokenizers of the hub and remote models are stand-ins.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from public_environments import stand_ins
from public_environments.driver import LIMIT_S, RUNS, TABLE, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.fixture(scope="session")
def root() -> Path:
    named = os.environ.get("ATROPOS_ENVIRONMENTS")
    if named is None:
        pytest.skip("the published environments are not at hand: `make environments` fetches and runs them")
    return Path(named)


@pytest.fixture(scope="session")
def stand_in_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stand_ins")
    stand_ins.write_files(folder)
    return folder


def test_the_table_names_every_environment_once(root: Path) -> None:
    named = [*TABLE["works"], *(file for files in TABLE["fails"].values() for file in files)]
    with_command_line = {
        str(file.relative_to(root / "environments"))
        for file in (root / "environments").rglob("*.py")
        if ".cli()" in file.read_text()
    }
    assert len(named) == len(set(named)) == 120
    assert [file for file in named if not (root / "environments" / file).exists()] == []
    assert with_command_line - set(named) == {"intern_bootcamp/run_intern_bootcamp.py"}  # starts intern_bootcamp_env


@pytest.mark.parametrize(("file", "command"), RUNS, ids=[f"{file}-{command}" for file, command in RUNS])
def test_runs_as_published(
    file: str, command: str, root: Path, stand_in_folder: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    run = Run(file=file, command=command, root=root, stand_ins=stand_in_folder, folder=tmp_path)
    problem = run.run(tiny_tokenizer)
    if problem is not None:
        pytest.fail(f"{problem}; its log ends:\n{run.log.read_text(errors='replace')[-3000:]}", pytrace=False)
