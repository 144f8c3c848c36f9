"""The run log: what the store tells is in the SQLite file, bounded, and survives a second opening."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from atroposlib.api.observer import GroupEvent
from atroposlib.api.run_log import RunLog, read_run_log


def make_group(key: int, *, scores: list[float] | None = None, env: str = "sums", filler: int = 0) -> GroupEvent:
    scores = scores if scores is not None else [0.0, 1.0]
    content = {
        "tokens": [[1, 2, 3]] * len(scores),
        "masks": [[-100, 2, 3]] * len(scores),
        "scores": scores,
        "messages": [[{"role": "user", "content": "x" * filler}]] * len(scores),
    }
    return GroupEvent(
        key=key, group_id=f"g{key}", env_id=0, env_name=env, size=len(scores), num_tokens=3 * len(scores), scores=scores,
        policy_versions=[[4], [4, 5]][: len(scores)] if len(scores) == 2 else None,
        reward_components={"right": scores}, payload=json.dumps(content).encode(), binary=False,
    )  # fmt: skip


@pytest.fixture
def log(tmp_path: Path):
    log = RunLog(tmp_path / "run_log.sqlite", flush_s=0.01)
    yield log
    log.close()


def query(log: RunLog, sql: str) -> list[tuple[object, ...]]:
    log.flush()
    connection = read_run_log(log.path)
    try:
        return [tuple(row) for row in connection.execute(sql)]
    finally:
        connection.close()


def test_lineage_of_a_group_from_acceptance_to_checkpoint(log: RunLog) -> None:
    log.group_accepted(make_group(1))
    log.group_accepted(make_group(2, scores=[0.5, 0.5]))
    log.batch_formed(7, ["g1", "g2"])
    log.batch_delivered(7)
    log.batch_delivered(7)
    log.batch_acked(7)
    log.reported("trainer", 3, 100.0, {"loss": 0.25, "batch_seq": 7.0})
    log.committed(7, 3)
    assert query(
        log, "SELECT group_id, env, batch_seq, mean_score, min_version, max_version FROM groups ORDER BY key"
    ) == [
        ("g1", "sums", 7, 0.5, 4, 5),
        ("g2", "sums", 7, 0.5, 4, 5),
    ]
    assert query(
        log, "SELECT sample_id, score, policy_versions, components FROM samples WHERE group_id = 'g1' ORDER BY idx"
    ) == [
        ("g1/0", 0.0, "[4]", '{"right": 0.0}'),
        ("g1/1", 1.0, "[4, 5]", '{"right": 1.0}'),
    ]
    assert query(
        log, "SELECT seq, step, deliveries FROM batches WHERE acked IS NOT NULL AND committed IS NOT NULL"
    ) == [(7, 3, 2)]
    assert query(log, "SELECT * FROM steps") == [(3, 7)]
    assert query(log, "SELECT source, step, value FROM metrics WHERE name = 'loss'") == [("trainer", 3, 0.25)]


def test_a_report_lost_with_a_killed_server_is_filled_in_where_it_is_certain(log: RunLog) -> None:
    for step, seq in ((1, 1), (2, 2), (5, 5), (7, 9)):
        log.reported("trainer", step, 1.0, {"batch_seq": seq})
    assert query(log, "SELECT * FROM steps ORDER BY step") == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (7, 9)]
    assert query(log, "SELECT seq, step FROM batches WHERE seq IN (3, 4)") == [(3, 3), (4, 4)]


def test_rejections_are_counted_by_reason(log: RunLog) -> None:
    log.group_accepted(make_group(1))
    for _ in range(3):
        log.group_rejected(0, "scores are not finite")
    log.group_rejected(None, "empty")
    assert query(log, "SELECT env, reason, count FROM rejected ORDER BY count") == [
        ("unnamed", "empty", 1),
        ("sums", "scores are not finite", 3),
    ]


def test_archive_is_bounded_and_keeps_the_newest_and_some_of_the_old(tmp_path: Path) -> None:
    import random

    log = RunLog(tmp_path / "log.sqlite", archive_bytes=40_000, archive_per_s=1e9, keep_every=10, flush_s=0.001)
    noise = random.Random(0)
    for key in range(1, 201):
        event = make_group(key)
        event.payload = noise.randbytes(1000)
        log.group_accepted(event)
        if key % 20 == 0:
            log.flush()
    rows = [row[0] for row in query(log, "SELECT key FROM archive ORDER BY key")]
    total = query(log, "SELECT sum(size_bytes) FROM archive")[0][0]
    log.close()
    assert total <= 40_000
    assert rows[-1] == 200
    assert any(key < 100 and key % 10 == 0 for key in rows)
    assert not any(key < 100 and key % 10 for key in rows)


def test_a_fast_run_archives_only_its_share(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.sqlite", archive_per_s=5, flush_s=0.001)
    for key in range(1, 101):
        log.group_accepted(make_group(key))
    archived = query(log, "SELECT count(*) FROM archive")[0][0]
    groups = query(log, "SELECT count(*) FROM groups")[0][0]
    log.close()
    assert groups == 100
    assert 5 <= archived <= 12


def test_reopening_goes_on_and_the_same_group_is_logged_once(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    first = RunLog(path)
    first.group_accepted(make_group(1))
    first.close()
    second = RunLog(path)
    second.group_accepted(make_group(1))
    second.group_accepted(make_group(2))
    assert query(second, "SELECT group_id FROM groups ORDER BY key") == [("g1",), ("g2",)]
    second.close()
    second.close()


def test_telling_is_cheap_and_does_not_wait_for_the_disk(log: RunLog) -> None:
    events = [make_group(key) for key in range(2000)]
    start = time.perf_counter()
    for event in events:
        log.group_accepted(event)
    per_event = (time.perf_counter() - start) / len(events)
    assert per_event < 200e-6
    assert query(log, "SELECT count(*) FROM groups") == [(2000,)]


def test_the_server_rates_and_queue_are_sampled(log: RunLog) -> None:
    for key in range(1, 5):
        log.group_accepted(make_group(key))
    log.batch_formed(1, ["g1"])
    time.sleep(1.1)
    log.reported("trainer", 1, 5.0, {"loss": 1.0})
    assert query(log, "SELECT value FROM metrics WHERE name = 'queue/groups' ORDER BY id DESC LIMIT 1") == [(3.0,)]
    assert query(log, "SELECT count(*) FROM metrics WHERE source = 'groups:sums' AND name = 'tokens_per_s'")[0][0] >= 1


def test_a_log_without_a_path_goes_with_its_folder() -> None:
    log = RunLog(None)
    folder = log.path.parent
    assert folder.is_dir()
    log.close()
    assert not folder.exists()


def test_a_missing_log_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run_log\.sqlite"):
        read_run_log(tmp_path)


@pytest.mark.parametrize("bad", [{"step": 2**70}, {"metrics": {"batch_seq": float("nan")}}])
def test_what_no_row_can_hold_is_left_out_and_nothing_else(
    log: RunLog, caplog: pytest.LogCaptureFixture, bad: dict[str, Any]
) -> None:
    log.reported("trainer", 1, 1.0, {"loss": 0.5})
    log.reported(**{"source": "trainer", "step": 2, "time": 1.0, "metrics": {"loss": 0.4}, **bad})
    log.group_accepted(make_group(1))
    assert query(log, "SELECT step, value FROM metrics WHERE name = 'loss'") == [(1, 0.5)]
    assert query(log, "SELECT group_id FROM groups") == [("g1",)]
    assert "leaves out what cannot be written: reported" in caplog.text
    log.reported("trainer", 3, 1.0, {"loss": 0.3})
    assert query(log, "SELECT max(step) FROM metrics WHERE name = 'loss'") == [(3,)]
