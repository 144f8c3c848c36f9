"""The run log: what happened in a run, in one SQLite file that the live page, `atropos trace` and plain SQL read.

`RunLog` watches the rollout store (`StoreObserver`). Its methods only put a record into a queue; one thread writes, a
transaction every quarter of a second, so the store never waits for the disk. The tables:

    metrics   (id, time, source, step, name, value)      numbers that processes reported, and the server's own rates
    groups    (key, group_id, env, time, scores, policy versions, batch_seq)       every accepted group
    samples   (sample_id, group_id, idx, score, num_tokens, policy_versions, components)  every sequence of every group
    batches   (seq, formed, delivered, acked, committed, step)                     which step a batch trained
    members   (batch_seq, group_id)                      the groups of every batch, as it was formed
    steps     (step, batch_seq)                          which batch a step trained on (the newest report wins)
    environments (env, groups, samples, tokens)          totals, so that nobody has to count
    rejected  (env, reason, count, last_time)            groups the server refused
    archive   (key, payload, binary)                     whole groups, bounded: the newest, and thinned older ones

A batch's step comes from the trainer, which reports `batch_seq` with the metrics of the step that used it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import operator
import queue
import shutil
import sqlite3
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atroposlib.api.observer import GroupEvent, StoreObserver
from atroposlib.errors import ConfigError

logger = logging.getLogger(__name__)

FILE_NAME = "run_log.sqlite"
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS metrics (
  id INTEGER PRIMARY KEY, time REAL NOT NULL, source TEXT NOT NULL, step INTEGER NOT NULL, name TEXT NOT NULL, value REAL NOT NULL);
CREATE INDEX IF NOT EXISTS metrics_by_name ON metrics (name, source, step);
CREATE TABLE IF NOT EXISTS groups (
  key INTEGER PRIMARY KEY, group_id TEXT NOT NULL, env_id INTEGER, env TEXT, time REAL NOT NULL, size INTEGER NOT NULL,
  num_tokens INTEGER NOT NULL, mean_score REAL, min_score REAL, max_score REAL, min_version INTEGER, max_version INTEGER,
  batch_seq INTEGER);
CREATE UNIQUE INDEX IF NOT EXISTS groups_by_id ON groups (group_id);
CREATE INDEX IF NOT EXISTS groups_by_batch ON groups (batch_seq);
CREATE TABLE IF NOT EXISTS samples (
  group_id TEXT NOT NULL, idx INTEGER NOT NULL, score REAL NOT NULL, policy_versions TEXT, components TEXT,
  sample_id TEXT GENERATED ALWAYS AS (group_id || '/' || idx) VIRTUAL, PRIMARY KEY (group_id, idx)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (
  seq INTEGER PRIMARY KEY, formed REAL, delivered REAL, acked REAL, committed REAL, deliveries INTEGER NOT NULL DEFAULT 0, step INTEGER);
CREATE INDEX IF NOT EXISTS batches_by_step ON batches (step);
CREATE TABLE IF NOT EXISTS members (batch_seq INTEGER NOT NULL, group_id TEXT NOT NULL, PRIMARY KEY (batch_seq, group_id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, batch_seq INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS environments (
  env TEXT PRIMARY KEY, groups INTEGER NOT NULL, samples INTEGER NOT NULL, tokens INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rejected (
  env TEXT NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL, last_time REAL NOT NULL, PRIMARY KEY (env, reason));
CREATE TABLE IF NOT EXISTS archive (key INTEGER PRIMARY KEY, payload BLOB NOT NULL, binary INTEGER NOT NULL, size_bytes INTEGER NOT NULL);
"""


_INTO_METRICS = "INSERT INTO metrics (time, source, step, name, value)"
_ROWS_AT_ONCE = 100


class RunLog(StoreObserver):
    """Writes the run log; an observer of the rollout store.

    Example: ``log = RunLog(folder / "run_log.sqlite"); store = RolloutStore(observers=[log]); ...; log.close()``
    """

    def __init__(
        self,
        path: str | Path | None,
        *,
        archive_bytes: int = 256 * 2**20,
        archive_per_s: float = 50.0,
        keep_every: int = 25,
        flush_s: float = 0.25,
    ) -> None:
        """Open or create the log; ``path=None`` keeps it in a temporary folder that goes with `close`.

        ``archive_bytes`` bounds the stored whole groups; half of it is for every ``keep_every``-th group of the whole run.
        ``archive_per_s`` bounds how many groups a second are stored whole, so that a fast run pays nothing for the page.
        """
        self._temporary = Path(tempfile.mkdtemp(prefix="atropos-run-log-")) if path is None else None
        self.path = Path(path) if path is not None else self._temporary / FILE_NAME  # type: ignore[operator]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.archive_bytes, self.archive_per_s, self.keep_every, self.flush_s = (
            archive_bytes,
            archive_per_s,
            keep_every,
            flush_s,
        )
        self._queue: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._archive_tokens, self._archive_refilled = archive_per_s, time.monotonic()
        self._rates: dict[str, list[float]] = defaultdict(
            lambda: [0.0, 0.0]
        )  # env -> groups, tokens since the last sample
        self._names: dict[int | None, str] = {}
        self._sampled = time.time()
        self._step = 0
        self._closed = threading.Event()
        self._db = sqlite3.connect(self.path, check_same_thread=False)
        self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + SCHEMA)
        self._archived = int(self._db.execute("SELECT coalesce(sum(size_bytes), 0) FROM archive").fetchone()[0])
        self._handlers: dict[str, Callable[..., None]] = {
            "rejected": self._write_rejected,
            "formed": self._write_formed,
            "moment": self._write_moment,
            "committed": self._write_committed,
            "reported": self._write_metrics,
        }
        self._thread = threading.Thread(target=self._run, name="run-log", daemon=True)
        self._thread.start()

    # ---- what the store calls: cheap, never raises ---------------------------------------------------------------------

    def group_accepted(self, event: GroupEvent) -> None:
        """Remember the group; its payload only as often as the archive takes it."""
        now = time.monotonic()
        self._archive_tokens = min(
            self.archive_per_s, self._archive_tokens + (now - self._archive_refilled) * self.archive_per_s
        )
        self._archive_refilled = now
        payload: bytes | None = None
        if self._archive_tokens >= 1:
            self._archive_tokens -= 1
            payload = event.payload
        self._queue.put(("group", event, payload))

    def group_rejected(self, env_id: int | None, reason: str) -> None:
        """Count a refused group."""
        self._queue.put(("rejected", env_id, reason, time.time()))

    def batch_formed(self, seq: int, group_ids: list[str]) -> None:
        """These groups became a batch."""
        self._queue.put(("formed", seq, list(group_ids), time.time()))

    def batch_delivered(self, seq: int) -> None:
        """A batch went out to the trainer (again)."""
        self._queue.put(("moment", "delivered", seq, time.time()))

    def batch_acked(self, seq: int) -> None:
        """The trainer has a batch."""
        self._queue.put(("moment", "acked", seq, time.time()))

    def committed(self, seq: int, step: int) -> None:
        """A checkpoint contains every batch up to this one."""
        self._queue.put(("committed", seq, step, time.time()))

    def reported(self, source: str, step: int, time: float, metrics: dict[str, float]) -> None:
        """A process reported numbers."""
        self._queue.put(("reported", source, step, time, metrics))

    # ---- the writer ----------------------------------------------------------------------------------------------------

    def set_meta(self, **values: str) -> None:
        """Facts about the run for the page (name, tokenizer file, model)."""
        with contextlib.closing(sqlite3.connect(self.path, timeout=10)) as connection, connection:
            connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(values.items()))

    def known_keys(self, lowest: int) -> set[int]:
        """Keys of the groups already logged, from ``lowest`` on."""
        with contextlib.closing(read_run_log(self.path)) as connection:
            return {row[0] for row in connection.execute("SELECT key FROM groups WHERE key >= ?", (lowest,))}

    def flush(self, timeout_s: float = 10.0) -> None:
        """Wait until everything told so far is in the file."""
        done = threading.Event()
        self._queue.put(("flush", done))
        if not done.wait(timeout_s):
            raise TimeoutError(
                f"the run log {self.path} did not finish writing within {timeout_s} s; is the disk full?"
            )

    def close(self) -> None:
        """Write what is left and stop the thread."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._queue.put(("wake",))
        self._thread.join(timeout=10)
        self._db.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _run(self) -> None:
        while True:
            closing = self._closed.is_set()
            records = self._take(wait=not closing)
            try:
                self._write(records)
            except sqlite3.Error:
                # The run must go on when its log cannot be written (disk full, file removed): these records are lost.
                logger.exception(
                    "the run log %s could not be written; the run goes on without these records", self.path
                )
                time.sleep(self.flush_s)
            except Exception:  # one of them does not fit into a row (a number beyond 64 bits): the others do
                self._write_one_by_one(records)
            if closing and self._queue.empty():
                return

    def _write_one_by_one(self, records: list[tuple[Any, ...]]) -> None:
        for record in records:
            try:
                self._write([record])
            except Exception:  # whatever was told, what is told later must still be written
                logger.exception("the run log %s leaves out what cannot be written: %s", self.path, record[0])

    def _write(self, records: list[tuple[Any, ...]]) -> None:
        waiting: list[threading.Event] = []
        with self._db:
            for kind, alike in itertools.groupby(records, key=operator.itemgetter(0)):
                if kind == "group":
                    self._write_groups([(event, payload) for _, event, payload in alike])
                elif kind == "flush":
                    waiting += [done for _, done in alike]
                elif kind != "wake":
                    for _, *arguments in alike:
                        self._handlers[kind](*arguments)
            self._sample_rates()
            self._trim_archive()
        for event in waiting:
            event.set()

    def _take(self, wait: bool) -> list[tuple[Any, ...]]:
        """Everything that waits, after a pause in which more may gather."""
        records: list[tuple[Any, ...]] = []
        try:
            records.append(self._queue.get(timeout=1.0) if wait else self._queue.get_nowait())
            if wait and records[0][0] not in {"flush", "wake"}:
                self._closed.wait(self.flush_s)
            while len(records) < 20_000:
                records.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return records

    def _write_groups(self, told: list[tuple[GroupEvent, bytes | None]]) -> None:
        """Groups that came one after the other."""
        told = self._insert_groups(told)
        self._insert_many(
            "INSERT OR IGNORE INTO samples (group_id, idx, score, policy_versions, components)",
            [row for event, _ in told for row in _sample_rows(event)],
        )
        metrics: list[tuple[Any, ...]] = []
        totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])  # env -> groups, samples, tokens
        for event, payload in told:
            env = event.env_name or "unnamed"
            self._names[event.env_id] = env
            metrics += _reward_rows(event, f"groups:{env}", self._step)
            for count, more in enumerate((1, event.size, event.num_tokens)):
                totals[env][count] += more
            if payload is not None:
                self._archive(event.key, payload, binary=event.binary)
        self._insert_many(_INTO_METRICS, metrics)
        for env, (groups, samples, tokens) in totals.items():
            self._db.execute(
                "INSERT INTO environments VALUES (?,?,?,?) ON CONFLICT (env) DO UPDATE SET groups = groups + excluded.groups, "
                "samples = samples + excluded.samples, tokens = tokens + excluded.tokens",
                (env, groups, samples, tokens),
            )
            rates = self._rates[env]
            rates[0] += groups
            rates[1] += tokens

    def _insert_groups(self, told: list[tuple[GroupEvent, bytes | None]]) -> list[tuple[GroupEvent, bytes | None]]:
        """The groups that are news: not those told twice, after a restart or under an id that is known."""
        known, before = self._keys_among(told), self._db.total_changes
        self._insert_many("INSERT INTO groups", [_group_row(event) for event, _ in told], "ON CONFLICT DO NOTHING")
        if self._db.total_changes - before == len(told):
            return told
        added = self._keys_among(told) - known
        return [(event, payload) for event, payload in told if event.key in added]

    def _keys_among(self, told: list[tuple[GroupEvent, bytes | None]]) -> set[int]:
        """Keys in the table that lie between the lowest and the highest of these."""
        keys = [event.key for event, _ in told]
        rows = self._db.execute("SELECT key FROM groups WHERE key BETWEEN ? AND ?", (min(keys), max(keys)))
        return {key for (key,) in rows}

    def _insert_many(self, into: str, rows: list[tuple[Any, ...]], tail: str = "") -> None:
        """Many rows with few statements: every statement gives the interpreter's lock away and has to get it back."""
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[start : start + _ROWS_AT_ONCE]
            marks = ",".join(["(" + ",".join("?" * len(some[0])) + ")"] * len(some))
            self._db.execute(f"{into} VALUES {marks} {tail}", list(itertools.chain.from_iterable(some)))

    def _archive(self, key: int, payload: bytes, *, binary: bool) -> None:
        import zstandard

        packed = zstandard.ZstdCompressor(level=1).compress(payload)
        self._db.execute("INSERT OR IGNORE INTO archive VALUES (?,?,?,?)", (key, packed, int(binary), len(packed)))
        self._archived += len(packed)

    def _trim_archive(self) -> None:
        """Over the bound: drop the oldest groups that are not kept for the whole run, then the oldest of all."""
        if self._archived <= self.archive_bytes:
            return
        for condition in (f"WHERE key % {self.keep_every} != 0", ""):
            target = self.archive_bytes * (0.8 if condition else 0.9)
            rows = self._db.execute(f"SELECT key, size_bytes FROM archive {condition} ORDER BY key").fetchall()
            newest = rows[-1][0] if rows else None
            for key, size in rows:
                if self._archived <= target or key == newest:
                    break
                self._db.execute("DELETE FROM archive WHERE key = ?", (key,))
                self._archived -= size

    def _write_rejected(self, env_id: int | None, reason: str, when: float) -> None:
        env = self._names.get(env_id, "unnamed" if env_id is None else f"environment {env_id}")
        self._db.execute(
            "INSERT INTO rejected VALUES (?,?,1,?) ON CONFLICT (env, reason) DO UPDATE SET count = count + 1, last_time = excluded.last_time",
            (env, reason[:500], when),
        )

    def _write_formed(self, seq: int, group_ids: list[str], when: float) -> None:
        self._db.execute(
            "INSERT INTO batches (seq, formed) VALUES (?,?) ON CONFLICT (seq) DO UPDATE SET formed = excluded.formed",
            (seq, when),
        )
        self._insert_many("INSERT OR IGNORE INTO members", [(seq, group_id) for group_id in group_ids])
        for start in range(0, len(group_ids), _ROWS_AT_ONCE):
            some = group_ids[start : start + _ROWS_AT_ONCE]
            marks = ",".join("?" * len(some))
            self._db.execute(f"UPDATE groups SET batch_seq = ? WHERE group_id IN ({marks})", (seq, *some))

    def _write_moment(self, column: str, seq: int, when: float) -> None:
        count = ", deliveries = deliveries + 1" if column == "delivered" else ""
        self._db.execute("INSERT OR IGNORE INTO batches (seq) VALUES (?)", (seq,))
        self._db.execute(f"UPDATE batches SET {column} = ?{count} WHERE seq = ?", (when, seq))

    def _write_committed(self, seq: int, step: int, when: float) -> None:
        self._db.execute("UPDATE batches SET committed = ? WHERE seq <= ? AND committed IS NULL", (when, seq))
        self._write_metrics("server", step, when, {"commit/batch_seq": float(seq)})

    def _write_metrics(self, source: str, step: int, when: float, metrics: dict[str, float]) -> None:
        rows = [(when, source, step, name, float(value)) for name, value in metrics.items() if value == value]
        self._insert_many(_INTO_METRICS, rows)
        if source == "trainer":
            if (seq := metrics.get("batch_seq")) is not None:
                self._write_step(step, int(seq))
            self._step = max(self._step, step)

    def _write_step(self, step: int, seq: int) -> None:
        """A step was trained on a batch. Steps whose report a killed server took with it are filled in where they are certain:
        every step takes at least one batch, so as many batches as steps since the last known one means one each."""
        known = self._db.execute("SELECT step, batch_seq FROM steps WHERE step < ? ORDER BY step DESC LIMIT 1", (step,))
        last_step, last_seq = known.fetchone() or (step, seq)
        rows = [(step, seq)]
        if step - last_step == seq - last_seq:
            rows += [(last_step + offset, last_seq + offset) for offset in range(1, step - last_step)]
        for one_step, one_seq in rows:
            self._db.execute("INSERT OR REPLACE INTO steps VALUES (?,?)", (one_step, one_seq))
            self._db.execute(
                "INSERT INTO batches (seq, step) VALUES (?,?) ON CONFLICT (seq) DO UPDATE SET step = excluded.step",
                (one_seq, one_step),
            )

    def _sample_rates(self) -> None:
        """Once a second while something happens: groups and tokens per second by environment, and what waits."""
        now = time.time()
        if now - self._sampled < 1.0 or (not self._rates and now - self._sampled < 10.0):
            return
        span = now - self._sampled
        self._sampled = now
        waiting, sequences = self._db.execute(
            "SELECT count(*), coalesce(sum(size), 0) FROM groups WHERE batch_seq IS NULL"
        ).fetchone()
        self._write_metrics("server", self._step, now, {"queue/groups": waiting, "queue/sequences": sequences})
        for env, (groups, tokens) in self._rates.items():
            self._write_metrics(
                f"groups:{env}", self._step, now, {"groups_per_s": groups / span, "tokens_per_s": tokens / span}
            )
        self._rates.clear()


def _group_row(event: GroupEvent) -> tuple[Any, ...]:
    """Of the table `groups`."""
    scores, versions = event.scores, [version for row in event.policy_versions or [] for version in row]
    return (
        event.key, event.group_id, event.env_id, event.env_name or "unnamed", event.time, event.size, event.num_tokens,
        sum(scores) / len(scores) if scores else None, min(scores, default=None), max(scores, default=None),
        min(versions, default=None), max(versions, default=None), None,
    )  # fmt: skip


def _sample_rows(event: GroupEvent) -> list[tuple[Any, ...]]:
    """Of the table `samples`."""
    versions, components = event.policy_versions, event.reward_components
    return [
        (
            event.group_id,
            index,
            score,
            json.dumps(versions[index]) if versions else None,
            json.dumps({name: values[index] for name, values in components.items()}) if components else None,
        )
        for index, score in enumerate(event.scores)
    ]


def _reward_rows(event: GroupEvent, source: str, step: int) -> list[tuple[Any, ...]]:
    """Of the table `metrics`: one point per group for the reward chart, the mean score and the mean of each component."""
    if not event.scores:
        return []
    means = {"reward": sum(event.scores) / len(event.scores)}
    means |= {
        f"reward/{name}": sum(values) / len(values)
        for name, values in (event.reward_components or {}).items()
        if values
    }
    return [(event.time, source, step, name, mean) for name, mean in means.items() if mean == mean]


def read_run_log(path: str | Path) -> sqlite3.Connection:
    """A read-only connection to a run log, of a live or a finished run; rows can be addressed by column name."""
    file = Path(path)
    if file.is_dir():
        file = next(
            (found for found in (file / FILE_NAME, file / "server" / FILE_NAME) if found.exists()), file / FILE_NAME
        )
    if not file.exists():
        raise FileNotFoundError(f"no run log at {file}; give the folder of a run (it holds {FILE_NAME})")
    connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True, check_same_thread=False, timeout=10)
    connection.row_factory = sqlite3.Row
    try:
        connection.execute("SELECT 1 FROM steps, groups LIMIT 1")
    except sqlite3.DatabaseError as error:
        connection.close()
        raise ConfigError(
            f"{file} is not a run log ({error}); give the folder of a run (it holds {FILE_NAME})"
        ) from error
    return connection
