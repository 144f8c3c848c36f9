"""A foreign environment's process, spoken to in JSON lines; started again when it has died."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.errors import WorkerError

logger = logging.getLogger(__name__)

_LONGEST_LINE = 64 * 2**20
_STOP_TIMEOUT_S = 10.0


class WorkerProcess:
    """``await call("group", index=3, n=8)`` from any number of tasks at once.

    ``command`` gets ``--reply-fd N`` appended: the descriptor its replies go to. Its standard output and error are
    this process's own.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> None:
        self._command, self._environment, self._cwd = list(command), environment, cwd
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # calls of the present process
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.num_starts = 0

    async def call(self, operation: str, **fields: Any) -> Any:
        """Send one request and wait for its result; ``WorkerError`` when the worker fails or dies."""
        process, waiting = await self._running()
        request_id = next(self._ids)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting[request_id] = reply
        line = json.dumps({"id": request_id, "op": operation, **fields}) + "\n"
        try:
            assert process.stdin is not None
            process.stdin.write(line.encode())
            await process.stdin.drain()
            return await reply
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorkerError(
                f"{self._command[0]} ended before it took a request (exit code {process.returncode})"
            ) from error
        finally:
            waiting.pop(request_id, None)

    async def stop(self) -> None:
        """Close its input, wait for it to end, end it if it does not."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _running(self) -> tuple[asyncio.subprocess.Process, dict[int, asyncio.Future[Any]]]:
        """The process, started if there is none, and the calls that wait for it."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                if self._process is not None:
                    logger.warning("the worker ended with exit code %s; starting it again", self._process.returncode)
                self._process = await self._start()
            return self._process, self._waiting

    async def _start(self) -> asyncio.subprocess.Process:
        read_fd, write_fd = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                "--reply-fd",
                str(write_fd),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(write_fd,),
                env=None if self._environment is None else {**os.environ, **self._environment},
                cwd=self._cwd,
            )
        except OSError as error:
            os.close(read_fd)
            raise WorkerError(
                f"cannot start {self._command[0]!r} ({error}); name the Python of the environment's virtual environment"
            ) from error
        finally:
            os.close(write_fd)
        self.num_starts += 1
        self._waiting = {}
        self._reader = asyncio.create_task(self._read(read_fd, process, self._waiting), name="worker-replies")
        return process

    async def _read(
        self, read_fd: int, process: asyncio.subprocess.Process, waiting: dict[int, asyncio.Future[Any]]
    ) -> None:
        """Deliver replies until the process ends, or is ended because it sent something else; then fail what still waits."""
        stream, problem = asyncio.StreamReader(limit=_LONGEST_LINE), ""
        with os.fdopen(read_fd, "rb") as pipe:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stream), pipe
            )
            try:
                while line := await stream.readline():
                    _deliver(json.loads(line), waiting)
            except (ValueError, KeyError, TypeError) as error:  # too long, cut off, or not in the form of a reply
                problem = f" after a reply that cannot be read ({type(error).__name__}: {error})"
                if not stream.at_eof():  # else it is ending by itself; a kill now would take its exit code away
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
            finally:
                transport.close()
        code = await process.wait()
        for reply in waiting.values():
            if not reply.done():
                reply.set_exception(
                    WorkerError(f"the worker ended with exit code {code}{problem}; its messages are on standard error")
                )


def _deliver(reply: dict[str, Any], waiting: dict[int, asyncio.Future[Any]]) -> None:
    call = waiting.get(reply["id"])
    if call is None or call.done():
        return
    if "error" in reply:
        logger.debug("in the worker: %s", reply.get("traceback") or reply["error"])
        call.set_exception(WorkerError(str(reply["error"])))
    else:
        call.set_result(reply["result"])
