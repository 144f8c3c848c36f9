"""Questions the live page and `atropos trace` ask of a run log (SQLite, read only)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atroposlib.api.run_log import read_run_log

MAX_POINTS = 4000
"""Metric rows in one reply; the page asks again for the rest."""


@dataclass(kw_only=True, slots=True)
class GroupFilter:
    """Which groups the reader shows; None means any."""

    env: str | None = None
    min_score: float | None = None
    max_score: float | None = None
    step: int | None = None
    before: int | None = None
    """Only keys below this one (paging towards the past)."""
    limit: int = 50


class RunHistory:
    """Read access to one run log; every call uses its own connection, so threads may share the object."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        read_run_log(self.path).close()

    def _rows(self, query: str, *arguments: Any) -> list[dict[str, Any]]:
        connection = read_run_log(self.path)
        try:
            return [dict(row) for row in connection.execute(query, arguments)]
        finally:
            connection.close()

    def overview(self, *, after: int = 0) -> dict[str, Any]:
        """What is new since metric row ``after``, and the counters of the run."""
        rows = self._rows("SELECT * FROM metrics WHERE id > ? ORDER BY id LIMIT ?", after, MAX_POINTS)
        counts = self._rows(
            "SELECT coalesce(sum(groups), 0) AS groups, coalesce(sum(samples), 0) AS samples, coalesce(sum(tokens), 0) AS tokens, "
            "(SELECT count(*) FROM groups WHERE batch_seq IS NULL) AS queued, (SELECT max(key) FROM groups) AS newest_key "
            "FROM environments"
        )[0]
        batches = self._rows(
            "SELECT count(*) AS formed, sum(acked IS NOT NULL) AS acked, sum(committed IS NOT NULL) AS committed, "
            "max(step) AS step, sum(deliveries > 1) AS redelivered FROM batches"
        )[0]
        return {
            "metrics": [
                [row["id"], row["time"], row["source"], row["step"], row["name"], row["value"]] for row in rows
            ],
            "more": len(rows) == MAX_POINTS,
            "counts": counts,
            "batches": batches,
            "rejected": self._rows("SELECT env, reason, count, last_time FROM rejected ORDER BY count DESC LIMIT 100"),
            "envs": [row["env"] for row in self._rows("SELECT env FROM environments ORDER BY env")],
            "meta": self.meta(),
        }

    def meta(self) -> dict[str, str]:
        """Facts about the run (name, model, tokenizer file)."""
        return {row["name"]: row["value"] for row in self._rows("SELECT name, value FROM meta")}

    def groups(self, wanted: GroupFilter) -> list[dict[str, Any]]:
        """Groups newest first, with the step that trained them."""
        conditions, arguments = ["1"], []
        for column, operator, value in (
            ("g.env", "=", wanted.env),
            ("g.max_score", ">=", wanted.min_score),
            ("g.min_score", "<=", wanted.max_score),
            ("b.step", "=", wanted.step),
            ("g.key", "<", wanted.before),
        ):
            if value is not None:
                conditions.append(f"{column} {operator} ?")
                arguments.append(value)
        return self._rows(
            "SELECT g.*, b.step AS step, EXISTS (SELECT 1 FROM archive a WHERE a.key = g.key) AS archived FROM groups g "
            f"LEFT JOIN batches b ON b.seq = g.batch_seq WHERE {' AND '.join(conditions)} ORDER BY g.key DESC LIMIT ?",
            *arguments,
            max(1, min(wanted.limit, 500)),
        )

    def group(self, key: int) -> dict[str, Any] | None:
        """One group: where it went, its samples and, when it is archived, the whole content as posted."""
        rows = self._rows(
            "SELECT g.*, b.step AS step, b.formed, b.delivered, b.acked, b.committed FROM groups g "
            "LEFT JOIN batches b ON b.seq = g.batch_seq WHERE g.key = ?",
            key,
        )
        if not rows:
            return None
        group = rows[0]
        group["samples"] = self._samples(group["group_id"])
        stored = self._rows("SELECT payload, binary FROM archive WHERE key = ?", key)
        group["content"] = _decode(stored[0]["payload"], bool(stored[0]["binary"])) if stored else None
        return group

    def _samples(self, group_id: str) -> list[dict[str, Any]]:
        rows = self._rows("SELECT * FROM samples WHERE group_id = ? ORDER BY idx", group_id)
        for row in rows:
            row["policy_versions"] = json.loads(row["policy_versions"]) if row["policy_versions"] else None
            row["components"] = json.loads(row["components"]) if row["components"] else {}
        return rows

    def trace_step(self, step: int) -> dict[str, Any] | None:
        """The batches and groups that made a step; None when no batch trained it."""
        batches = self._rows("SELECT b.* FROM steps s JOIN batches b ON b.seq = s.batch_seq WHERE s.step = ?", step)
        if not batches:
            return None
        marks = ",".join("?" * len(batches))
        groups = self._rows(
            f"SELECT * FROM groups WHERE batch_seq IN ({marks}) ORDER BY key", *[batch["seq"] for batch in batches]
        )
        return {"step": step, "batches": batches, "groups": groups}

    def trace_sample(self, sample_id: str) -> dict[str, Any] | None:
        """Where a sample (``GROUP_ID/INDEX``) or a group (``GROUP_ID``) went; None when the log does not know it."""
        group_id, _, index = sample_id.rpartition("/")
        for wanted_group, wanted_index in ((sample_id, None), (group_id, index)):
            rows = self._rows("SELECT key FROM groups WHERE group_id = ?", wanted_group)
            if rows:
                group = self.group(rows[0]["key"])
                if group is not None and wanted_index is not None:
                    group["samples"] = [sample for sample in group["samples"] if str(sample["idx"]) == wanted_index]
                    return group if group["samples"] else None
                return group
        return None

    def archived_keys(self, *, newest: bool, limit: int) -> list[int]:
        """Keys of groups whose content is kept, from one end of the run."""
        order = "DESC" if newest else "ASC"
        return [row["key"] for row in self._rows(f"SELECT key FROM archive ORDER BY key {order} LIMIT ?", limit)]

    def known_steps(self) -> tuple[int, int] | None:
        """First and last step that has a batch."""
        row = self._rows("SELECT min(step) AS low, max(step) AS high FROM steps")[0]
        return None if row["low"] is None else (row["low"], row["high"])


def _decode(payload: bytes, binary: bool) -> dict[str, Any]:
    import zstandard

    raw = zstandard.ZstdDecompressor().decompress(payload)
    if not binary:
        content: dict[str, Any] = json.loads(raw)
        return content
    from atroposlib.api.binary import decode_group

    return {name: _plain(value) for name, value in decode_group(raw).items()}


def _plain(value: Any) -> Any:
    """Arrays as lists, through any nesting, so that the result is JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
