"""Small C sources of this project, compiled once by the machine's C compiler into the user's cache folder.

Every one has a Python counterpart that gives the same results: where there is no compiler, or ATROPOS_NATIVE=0 is set,
:func:`load` says None and the counterpart does the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


def load(source: Path, *flags: str) -> ctypes.CDLL | None:
    """The library of this source, compiled if it is not in the cache; None, and a line in the log, when that is not possible."""
    if not enabled():
        return None
    try:
        return ctypes.CDLL(str(_compiled(source, flags)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("Python does the work of %s: it could not be compiled or loaded (%s)", source.name, error)
        return None


def enabled() -> bool:
    """Whether compiled code may be used at all."""
    return os.environ.get("ATROPOS_NATIVE", "1") != "0"


def address(data: bytes | bytearray | memoryview) -> bytes | int | None:
    """What to give to C as the place of these bytes; None where that is not cheap to find out. The caller keeps the bytes alive."""
    if isinstance(data, bytes) or not data:
        return bytes(data)
    if isinstance(data, memoryview) and (data.readonly or not data.c_contiguous):
        return None
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _compiled(source: Path, flags: tuple[str, ...]) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atropos-atlas"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = source.read_bytes() + " ".join((os.uname().machine, *flags)).encode()
    path = folder / f"{source.stem}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not path.exists():
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            raise FileNotFoundError("there is no C compiler")
        with tempfile.TemporaryDirectory(dir=folder) as made:
            target = Path(made) / "made.so"
            command = [compiler, "-O3", "-std=gnu11", "-fPIC", "-shared", *flags, "-o", str(target), str(source), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            os.replace(target, path)
    for checked in (folder, path):  # code is loaded from here: nobody else may write to it
        found = checked.stat()
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{checked} can be written by others")
    return path
