"""JSON lines on disk: one object per line, flushed at once, never over an existing file, and no file without a line."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any, TextIO


def to_plain(value: Any) -> Any:
    """What ``json`` cannot write by itself: numpy scalars and arrays, pydantic models, sets, paths."""
    for method in ("tolist", "model_dump", "to_dict"):
        convert = getattr(value, method, None)
        if callable(convert):
            return convert()
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    return str(value)


def unused_path(path: str | Path) -> Path:
    """``path``, or ``stem_1``, ``stem_2``, ... beside it when it exists already."""
    wanted = Path(path)
    candidate, number = wanted, 0
    while candidate.exists():
        number += 1
        candidate = wanted.with_name(f"{wanted.stem}_{number}{wanted.suffix}")
    return candidate


class JsonlWriter:
    """Appends objects to a file, each line on disk as soon as ``write`` returns.

    The file is made at once, so that the name is taken; when it closes, or the process ends, without a line it goes again.
    Example: ``JsonlWriter("data/groups.jsonl").write({"scores": [1.0]})``
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = None
        self._open()

    def _open(self) -> TextIO:
        self._file = self.path.open("a", encoding="utf-8")
        self._end = weakref.finalize(self, _close, self._file, self.path)
        return self._file

    def write(self, value: Any) -> None:
        """Write one line and flush it."""
        file = self._file or self._open()
        file.write(json.dumps(value, default=to_plain, ensure_ascii=False) + "\n")
        file.flush()

    def close(self) -> None:
        """Close the file; a later ``write`` opens it again."""
        self._end()
        self._file = None

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(file: TextIO, path: Path) -> None:
    file.close()
    if path.exists() and path.stat().st_size == 0:
        path.unlink()
