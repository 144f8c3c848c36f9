"""An environment's own checkpoint: ``{checkpoint_dir}/env_checkpoints/{name}/step-{step}.json``.

The rollout server gives a restarted environment a new number (``math_1``) while it still counts the killed one
(``math_0``) among the living. Beside the checkpoints therefore lies ``owner.json``, which process wrote them: an
environment continues from its own folder or from one of the same name whose owner is dead, whichever is newer.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atroposlib.envs.group_writer import to_plain

OWNER_FILE = "owner.json"


def checkpoint_folder(checkpoint_dir: str, name: str | None) -> Path:
    """Where the checkpoints of the environment called ``name`` live."""
    return Path(checkpoint_dir) / "env_checkpoints" / str(name)


def save_env_checkpoint(checkpoint_dir: str, name: str | None, step: int, data: dict[str, Any]) -> Path:
    """Write ``data`` as JSON; the file appears whole or not at all."""
    folder = checkpoint_folder(checkpoint_dir, name)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / OWNER_FILE, {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())})
    path = folder / f"step-{step}.json"
    _write(path, data)
    return path


def _write(path: Path, data: dict[str, Any]) -> None:
    partial = path.with_suffix(f".json.{os.getpid()}.partial")
    partial.write_text(json.dumps(data, default=to_plain), encoding="utf-8")
    partial.replace(path)


def newest_checkpoint(checkpoint_dir: str, name: str | None, step: int, base_name: str | None = None) -> Path | None:
    """The newest checkpoint at or before ``step``: of ``name``, or of a dead process's ``{base_name}_{number}``."""
    folders = [checkpoint_folder(checkpoint_dir, name), *_abandoned(checkpoint_dir, base_name)]
    found = [entry for folder in folders for entry in _checkpoints(folder) if entry[0] <= step]
    return max(found, key=lambda entry: entry[0])[1] if found else None


def _checkpoints(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("step-*.json"):
        match = re.fullmatch(r"step-(\d+)\.json", path.name)
        if match:
            yield int(match[1]), path


def _abandoned(checkpoint_dir: str, base_name: str | None) -> Iterator[Path]:
    """Folders of that name whose owner ran on this machine and is gone."""
    if base_name is None:
        return
    for folder in sorted(checkpoint_folder(checkpoint_dir, None).parent.glob("*")):
        if re.fullmatch(re.escape(base_name) + r"_\d+", folder.name) and _owner_is_dead(folder / OWNER_FILE):
            yield folder


def _owner_is_dead(path: Path) -> bool:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    ran_here = owner.get("host") == socket.gethostname()
    return bool(ran_here and owner.get("started") != _started(int(owner.get("pid", -1))))


def _started(pid: int) -> str | None:
    """When the process with this id started (a number is used again, a start is not); None when there is none."""
    try:
        # The name in parentheses may hold spaces; the start time is the twentieth field after it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError):
        return None
    return "alive"


def load_env_checkpoint(path: Path) -> dict[str, Any]:
    """The saved attributes."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data
