"""Both committers, with real files: what is written, and what is said when it is not."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from atroposlib.api import committer
from atroposlib.api.committer import Committed, Committer, NativeCommitter, ThreadCommitter

KINDS = [NativeCommitter, ThreadCommitter]
Kind = Callable[[committer.Done], Committer]


def _commit(
    kind: Kind, path: Path, records: list[list[tuple[bytes, bytes]]], *, offset: int = 0, sync: bool = True
) -> list[Committed]:
    """Write these commits one after the other; what was said of each."""

    async def main() -> list[Committed]:
        loop = asyncio.get_running_loop()
        done: asyncio.Queue[Committed] = asyncio.Queue()
        one = kind(done.put_nowait)
        fd, at, results = os.open(path, os.O_RDWR | os.O_CREAT), offset, []
        try:
            for record in records:
                for head, payload in record:
                    one.add(head, payload)
                started = loop.time()
                one.begin(fd, at, sync=sync)
                results.append(await asyncio.wait_for(done.get(), 20))
                assert results[-1].sync_seconds <= loop.time() - started
                at += sum(len(head) + len(payload) for head, payload in record)
        finally:
            one.close()
            os.close(fd)
        assert done.empty()
        return results

    return asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_commits_lie_one_after_the_other(tmp_path: Path, kind: Kind) -> None:
    views = [memoryview(bytearray(b"view" * 1000)), memoryview(b"read-only")]
    commits = [
        [(b"h1", b"payload"), (b"h2", b"")],
        [(b"h3", view) for view in views],  # type: ignore[misc]
        [(f"<{i}>".encode(), bytes([i % 256]) * (i % 7)) for i in range(3000)],  # more than one system call takes
    ]
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5 + b"old" * 10)
    results = _commit(kind, path, commits, offset=5)
    assert [(result.error, result.in_sync) for result in results] == [(None, True)] * 3
    assert all(result.sync_seconds > 0 for result in results)
    expected = b"".join(bytes(part) for commit in commits for record in commit for part in record)
    assert path.read_bytes() == b"x" * 5 + expected


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_sync(tmp_path: Path, kind: Kind) -> None:
    (result,) = _commit(kind, tmp_path / "file", [[(b"a", b"b")]], sync=False)
    assert result == Committed(None, False, 0.0)
    assert (tmp_path / "file").read_bytes() == b"ab"


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_and_a_failing_sync_are_told_apart(kind: Kind) -> None:
    full = _commit(kind, Path("/dev/full"), [[(b"head", b"payload")]] * 2)
    assert [(result.error.errno if result.error else 0, result.in_sync) for result in full] == [
        (errno.ENOSPC, False)
    ] * 2
    (unsynced,) = _commit(kind, Path("/dev/null"), [[(b"head", b"payload")]])  # takes all, knows no sync
    assert unsynced.error is not None
    assert (unsynced.error.errno, unsynced.in_sync) == (errno.EINVAL, True)


def test_whatever_goes_wrong_is_told(tmp_path: Path) -> None:
    (result,) = _commit(ThreadCommitter, tmp_path / "file", [[(b"head", "text")]])  # type: ignore[list-item]
    assert result.error is not None
    assert (result.error.errno, "TypeError" in str(result.error)) == (errno.EIO, True)


def test_the_compiled_one_is_used_where_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async def chosen() -> type[Committer]:
        one = committer.new_committer(lambda result: None)
        one.close()
        return type(one)

    assert asyncio.run(chosen()) is NativeCommitter
    monkeypatch.setenv("ATROPOS_NATIVE", "0")
    assert asyncio.run(chosen()) is ThreadCommitter
