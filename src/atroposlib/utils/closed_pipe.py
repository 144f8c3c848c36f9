"""What a command does when nobody reads its output any more (``atropos ... | head``), and on Ctrl-C: it ends, without a word."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import sys
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")
EXIT_CODE = 141
"""As a shell shows the end of other tools there: 128 and the number of SIGPIPE."""
INTERRUPTED = 130
"""Likewise 128 and the number of SIGINT."""


def ends_with_its_reader(command: Callable[P, int]) -> Callable[P, int]:
    """Decorator of an entry point. SIGPIPE itself stays ignored: it would also end a server whose client has gone."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            try:
                return command(*args, **kwargs)
            finally:  # also when argparse exits: what is still buffered would be written, and fail, after us
                for stream in filter(None, (sys.stdout, sys.stderr)):
                    stream.flush()
        except BrokenPipeError:
            if not _drop_what_nobody_reads():
                raise  # another pipe or connection: a failure like any other
            return EXIT_CODE
        except KeyboardInterrupt:
            return INTERRUPTED

    return run


def _drop_what_nobody_reads() -> bool:
    """Send what is left of the output streams without a reader to nowhere; False when both have one."""
    found = False
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # no file behind it, or closed
            poll = select.poll()
            poll.register(stream.fileno(), select.POLLOUT)
            if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
                found = True
    return found
