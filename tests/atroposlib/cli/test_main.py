"""The umbrella command where packages are missing."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from atroposlib.cli.main import COMMANDS, main


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.target.startswith("atlaslib.")])
@pytest.mark.parametrize("package", ["torch", "accelerate"])
def test_a_command_that_trains_names_the_extra_it_needs(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec

    def without(wanted: str, *args: Any) -> Any:
        return None if wanted == package else found(wanted, *args)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert main([name, "nosuch"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"atropos {name}: this command needs the package {package!r}")
    assert "pip install 'atropos-atlas[train]'" in error
