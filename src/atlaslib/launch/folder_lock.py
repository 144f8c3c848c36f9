"""One user at a time for a folder that a run writes into."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atlaslib.errors import ConfigError
from atroposlib.utils.cli import make_folder

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"


@contextmanager
def hold_folder(folder: Path, setting: str) -> Iterator[None]:
    """Make the folder that ``setting`` names and keep others out of it inside this block.

    The lock belongs to the open file, so it goes with the process, however that ends. The file itself stays: were it
    removed, one process could lock the file that is gone and another a new one.
    """
    path = make_folder(folder, setting) / LOCK_FILE
    try:
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be written ({error.strerror}); name another folder") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip()
            raise ConfigError(
                f"{setting}: {folder} is used by another run{f' (process {owner})' if owner else ''}, and nothing was changed; "
                "wait for it, stop it, or name another folder"
            ) from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked (%s); take care that only one run uses it", folder, error.strerror)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
