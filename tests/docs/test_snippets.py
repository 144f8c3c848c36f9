"""Every snippet of the documentation is run.

Per page, in order, in one empty folder:

* ``python`` blocks are executed (they share one namespace); one that starts with ``# file: NAME`` is written to that file instead;
* ``yaml`` and ``json`` blocks with ``# file: NAME`` are written to that file, others must parse;
* ``bash`` blocks are executed; the info string ``bash no-run REASON`` is for what cannot end or cannot exist on a test machine: there
  every flag of our own commands must be one that the command's help knows.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```\s*$", re.DOTALL | re.MULTILINE)
FILE_MARK = re.compile(r"^#\s*file:\s*(\S+)\s*\n")
OWN_COMMANDS = ("atropos", "run-api", "view-run", "atropos-sft-gen", "atropos-dpo-gen")


@dataclass(frozen=True)
class Snippet:
    kind: str
    reason: str | None
    body: str
    line: int


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        name, *words = match["info"].split() or [""]
        reason = " ".join(words[1:]) if words[:1] == ["no-run"] else None
        found.append(Snippet(name, reason, match["body"], text.count("\n", 0, match.start()) + 1))
    return found


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def check_flags(snippet: Snippet, page: Path) -> None:
    assert snippet.reason, f"{page.name}:{snippet.line}: no-run needs a reason"
    for line in snippet.body.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        words = words[next((i for i, word in enumerate(words) if "=" not in word), len(words)) :]  # VAR=value in front
        if not words or words[0] not in OWN_COMMANDS:
            continue
        command = words[:2] if words[0] == "atropos" else words[:1]
        shown = subprocess.run([*command, "--help"], env=environment(), capture_output=True, text=True, timeout=60)
        assert shown.returncode == 0, f"{page.name}:{snippet.line}: {command} --help failed: {shown.stderr}"
        for word in words[len(command) :]:
            if word.startswith("--"):
                flag = word.split("=")[0]
                assert flag in shown.stdout, f"{page.name}:{snippet.line}: {' '.join(command)} knows no {flag}"


def run_page(page: Path, folder: Path) -> int:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for snippet in snippets(page):
        mark = FILE_MARK.match(snippet.body)
        where = f"{page.relative_to(ROOT)}:{snippet.line}"
        if mark is not None:
            target = folder / mark[1]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(snippet.body)
        elif snippet.kind == "python":
            exec(compile(snippet.body, where, "exec"), namespace)
        elif snippet.kind == "yaml":
            yaml.safe_load(snippet.body)
        elif snippet.kind == "json":
            json.loads(snippet.body)
        elif snippet.kind == "bash" and snippet.reason is None:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", snippet.body],
                cwd=folder,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert done.returncode == 0, (
                f"{where}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            )
        elif snippet.kind == "bash":
            check_flags(snippet, page)
        else:
            assert snippet.kind in {"text", "", "jinja", "sql"}, f"{where}: unknown kind of block {snippet.kind!r}"
            continue
        count += 1
    return count


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.filterwarnings("default")
def test_snippets_of_the_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = sum(1 for snippet in snippets(page) if snippet.kind in {"python", "bash", "yaml", "json"})
    assert run_page(page, tmp_path) == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://", "#")):
            continue
        assert (page.parent / target.split("#")[0]).exists(), f"{page.relative_to(ROOT)} links to {target}"
