"""After the published environments have run: one line for each, as expected or not, with the seconds it took."""

from __future__ import annotations

import re
from typing import Any

from public_environments.driver import TABLE

COMMANDS = ("process", "serve", "evaluate", "script")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    cells: dict[tuple[str, str], str] = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            found = re.search(r"test_runs_as_published\[(.+)-(\w+)\]", getattr(report, "nodeid", ""))
            if found:
                seconds = f"{report.duration:.0f} s"
                cells[found[1], found[2]] = seconds if outcome == "passed" else f"FAILED {seconds}"
    if not cells:
        return
    write = terminalreporter.write_line
    terminalreporter.section("published environments")
    write(f"{'environment':80}" + "".join(f"{command:>13}" for command in COMMANDS))
    for file in sorted({file for file, _ in cells}):
        write(f"{file:80}" + "".join(f"{cells.get((file, command), '-'):>13}" for command in COMMANDS))
    for reason, files in TABLE["fails"].items():
        write(f"not run ({len(files)}), {reason}: {', '.join(file.removesuffix('.py') for file in files)}")
    num_failed = sum(cell.startswith("FAILED") for cell in cells.values())
    write(f"{len({file for file, _ in cells})} environments, {len(cells)} runs, {num_failed} not as expected")
