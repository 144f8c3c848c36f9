"""An environment's own checkpoint: ``{checkpoint_dir}/env_checkpoints/{name}/step-{step}.json``."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from atroposlib.envs.group_writer import to_plain


def checkpoint_folder(checkpoint_dir: str, name: str | None) -> Path:
    """Where the checkpoints of the environment called ``name`` live."""
    return Path(checkpoint_dir) / "env_checkpoints" / str(name)


def save_env_checkpoint(checkpoint_dir: str, name: str | None, step: int, data: dict[str, Any]) -> Path:
    """Write ``data`` as JSON; the file appears whole or not at all."""
    folder = checkpoint_folder(checkpoint_dir, name)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step}.json"
    partial = path.with_suffix(f".json.{os.getpid()}.partial")
    partial.write_text(json.dumps(data, default=to_plain), encoding="utf-8")
    partial.replace(path)
    return path


def newest_checkpoint(checkpoint_dir: str, name: str | None, step: int) -> Path | None:
    """The checkpoint of ``step``, or the newest one before it."""
    best: tuple[int, Path] | None = None
    for path in checkpoint_folder(checkpoint_dir, name).glob("step-*.json"):
        match = re.fullmatch(r"step-(\d+)\.json", path.name)
        if match and int(match[1]) <= step and (best is None or int(match[1]) > best[0]):
            best = (int(match[1]), path)
    return best[1] if best else None


def load_env_checkpoint(path: Path) -> dict[str, Any]:
    """The saved attributes."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data
