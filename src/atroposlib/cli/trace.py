"""`atropos trace`: which groups, environments and policy versions made a step; where a sample went."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError


def main(argv: list[str]) -> int:
    """Answer one question about a run's lineage; exit code 1 when the run does not know the step or sample."""
    parser = argparse.ArgumentParser(
        prog="atropos trace",
        description="Which groups made a step, where a sample went. The run log is plain SQLite: any SQL works on it too.",
    )
    parser.add_argument("step", type=int, nargs="?", help="optimizer step")
    parser.add_argument("--sample", metavar="ID", help="a sample (GROUP_ID/INDEX) or a group (GROUP_ID)")
    parser.add_argument(
        "--run", type=Path, default=None, help="folder of the run (default: the newest under ./runs, or here)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    if (arguments.step is None) == (arguments.sample is None):
        parser.error("give a step or --sample ID")

    from atroposlib.frontend.live.history import RunHistory

    try:
        history = RunHistory(arguments.run or newest_run(Path.cwd()))
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
    found = history.trace_step(arguments.step) if arguments.step is not None else history.trace_sample(arguments.sample)
    if found is None:
        print(_unknown(history, arguments))
        return 1
    if arguments.json:
        print(json.dumps(found, indent=1))
    elif arguments.step is not None:
        print(step_text(found))
    else:
        print(sample_text(found))
    return 0


def newest_run(folder: Path) -> Path:
    """The run log written last under ``folder`` (itself, its ``runs/*``)."""
    logs = [
        path
        for pattern in ("run_log.sqlite", "*/run_log.sqlite", "runs/**/run_log.sqlite")
        for path in folder.glob(pattern)
    ]
    if not logs:
        raise ConfigError(f"no run found under {folder}; name its folder with --run")
    return max(logs, key=lambda path: path.stat().st_mtime)


def _unknown(history: Any, arguments: argparse.Namespace) -> str:
    if arguments.sample is not None:
        return f"no sample or group {arguments.sample!r} in {history.path}; ids are shown by the page and by atropos trace STEP"
    steps = history.known_steps()
    known = f"it has steps {steps[0]} to {steps[1]}" if steps else "no step has been trained yet"
    return f"no batch of the run in {history.path} trained step {arguments.step}; {known}"


def step_text(found: dict[str, Any]) -> str:
    """The lineage of a step as a table."""
    lines = [f"step {found['step']}"]
    for batch in found["batches"]:
        lines.append(
            f"  batch {batch['seq']}: formed {_when(batch['formed'])}, trained {_when(batch['acked'])}, in a checkpoint {_when(batch['committed'])}"
        )
    lines.append(f"  {'group':<34} {'environment':<20} {'samples':>7} {'score':>7}  policy versions")
    for group in found["groups"]:
        lines.append(
            f"  {group['group_id']:<34} {group['env'] or '':<20} {group['size']:>7} {group['mean_score']:>7.3f}  {_versions(group)}"
        )
    return "\n".join(lines)


def sample_text(found: dict[str, Any]) -> str:
    """Where a sample went, in sentences."""
    lines = [
        f"group {found['group_id']} of {found['env']}, accepted {_when(found['time'])}, policy versions {_versions(found)}"
    ]
    for sample in found["samples"]:
        parts = "".join(f", {name} {value:g}" for name, value in sample["components"].items())
        lines.append(f"  sample {sample['sample_id']}: score {sample['score']:g}{parts}")
    if found["batch_seq"] is None:
        lines.append("  in no batch")
    else:
        lines.append(
            f"  batch {found['batch_seq']}, formed {_when(found['formed'])}, delivered {_when(found['delivered'])}"
        )
        trained = f"trained step {found['step']}" if found["step"] is not None else "no step has reported it yet"
        lines.append(f"  {trained}; in a checkpoint {_when(found['committed'])}")
    return "\n".join(lines)


def _versions(group: dict[str, Any]) -> str:
    low, high = group["min_version"], group["max_version"]
    return "unknown" if low is None else str(low) if low == high else f"{low} to {high}"


def _when(moment: float | None) -> str:
    return "not yet" if moment is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
