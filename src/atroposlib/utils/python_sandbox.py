"""Run untrusted Python in a process of its own, with limits on time, memory, files and network.

What it does: a fresh interpreter in isolated mode, in an empty folder that is removed afterwards, without the parent's
environment variables; limits on CPU time, memory, file size and open files by the kernel; a wall-clock limit that ends the whole
process group; no network: a network namespace of its own where the kernel allows one, and an audit hook that refuses
sockets and child processes everywhere. What it is not: a virtual machine. Code that escapes the interpreter (through
ctypes, say) can read what this user can read; run it as a user with nothing to lose, or in a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_LONGEST_OUTPUT = 20_000
_GUARD = """
import sys
def _refuse(event, args):
    if event.startswith(("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system", "ctypes.", "pty.")):
        raise PermissionError("not allowed here: " + event)
sys.addaudithook(_refuse)
del _refuse
"""


@dataclass(kw_only=True, slots=True)
class SandboxResult:
    """What a run left behind."""

    returncode: int
    stdout: str
    stderr: str
    timed_out: bool

    @property
    def ok(self) -> bool:
        """Ended by itself, without an error."""
        return self.returncode == 0 and not self.timed_out


async def run_python(code: str, *, stdin: str = "", timeout_s: float = 5.0, memory_mb: int = 512) -> SandboxResult:
    """Run ``code`` with the given input and limits.

    Example: ``(await run_python("print(6 * 7)")).stdout == "42\\\\n"``
    """
    folder = Path(tempfile.mkdtemp(prefix="sandbox_"))
    try:
        (folder / "main.py").write_text(_GUARD + code, encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            *(_namespace_prefix() or ()),
            sys.executable,
            "-I",
            "-B",
            "main.py",
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=functools.partial(_limit, timeout_s, memory_mb),
        )
        return await _finish(process, stdin, timeout_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _finish(process: asyncio.subprocess.Process, stdin: str, timeout_s: float) -> SandboxResult:
    timed_out = False
    try:
        stdout, stderr = await asyncio.wait_for(process.communicate(stdin.encode()), timeout_s)
    except TimeoutError:
        timed_out, stdout, stderr = True, b"", f"stopped after {timeout_s:g} s".encode()
    finally:
        _end_group(process)
        await process.wait()
    texts = [stream[-_LONGEST_OUTPUT:].decode(errors="replace") for stream in (stdout, stderr)]
    return SandboxResult(returncode=process.returncode or 0, stdout=texts[0], stderr=texts[1], timed_out=timed_out)


def _end_group(process: asyncio.subprocess.Process) -> None:
    """End the process and whatever it started; it leads a session of its own, so its pid names the group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already, its number perhaps somebody else's
        os.killpg(process.pid, signal.SIGKILL)


def _limit(timeout_s: float, memory_mb: int) -> None:
    """Runs in the child before Python starts there."""
    seconds = max(1, int(timeout_s) + 1)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20, memory_mb * 2**20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 * 2**20, 10 * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


@functools.cache
def _namespace_prefix() -> tuple[str, ...] | None:
    """The command that puts a process into its own network namespace; None where the kernel does not let us."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return None
    prefix = (unshare, "--user", "--map-root-user", "--net")
    works = subprocess.run([*prefix, "true"], capture_output=True, timeout=10, check=False).returncode == 0
    return prefix if works else None
