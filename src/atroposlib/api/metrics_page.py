"""The `/metrics` page: Prometheus text, written by hand."""

from __future__ import annotations

from collections.abc import Mapping

from atroposlib.api.service import RolloutService


def prometheus_text(service: RolloutService, requests: Mapping[tuple[str, int], list[float]]) -> str:
    """Counters and gauges of a rollout server."""
    store, journal = service.store, service.journal
    lines: list[str] = []

    def metric(name: str, kind: str, text: str, *values: tuple[str, float]) -> None:
        lines.append(f"# HELP atropos_{name} {text}")
        lines.append(f"# TYPE atropos_{name} {kind}")
        lines.extend(
            f"atropos_{name}{labels} {value:g}" if value % 1 else f"atropos_{name}{labels} {int(value)}"
            for labels, value in values
        )

    for name in store.counters.__slots__:
        metric(
            f"{name}_total",
            "counter",
            f"{name.replace('_', ' ')} since the server started",
            ("", getattr(store.counters, name)),
        )
    metric("step", "gauge", "batches delivered, on top of the starting step", ("", store.current_step))
    metric("queue_groups", "gauge", "groups waiting for a trainer", ("", store.queue_groups))
    metric("queue_sequences", "gauge", "sequences waiting for a batch", ("", store.queue.num_sequences))
    metric("queue_bytes", "gauge", "bytes of the groups waiting for a batch", ("", store.queued_bytes))
    metric(
        "oversized_groups",
        "gauge",
        "queued groups that no batch of the registered size can hold",
        ("", store.oversized_groups),
    )
    metric(
        "retained_bytes",
        "gauge",
        "bytes of acknowledged batches kept for a trainer that resumes",
        ("", store.retained_bytes),
    )
    metric("last_batch_seq", "gauge", "number of the newest batch", ("", store.ledger.next_seq - 1))
    metric(
        "committed_batch_seq", "gauge", "newest batch the trainer's checkpoint contains", ("", store.ledger.committed)
    )
    envs = store.envs.all
    metric("environments", "gauge", "environments that are alive", ("", sum(1 for _ in store.envs.alive())))
    now = store.clock()
    metric(
        "env_groups", "counter", "groups accepted by environment", *((_label(e.wandb_name), e.num_groups) for e in envs)
    )
    metric(
        "env_silent_seconds",
        "gauge",
        "seconds since it was heard from",
        *((_label(e.wandb_name), now - e.last_seen) for e in envs),
    )
    metric("env_queued_sequences", "gauge", "sequences queued by environment",
           *((_label(e.wandb_name), store.queue.env_sequences(e.env_id)) for e in envs))  # fmt: skip
    if journal is not None:
        metric("journal_bytes", "gauge", "size of the journal on disk", ("", journal.disk_bytes()))
        metric("journal_syncs_total", "counter", "group commits", ("", journal.sync_count))
        metric("journal_sync_seconds_total", "counter", "seconds spent syncing", ("", journal.sync_seconds))
        metric(
            "journal_failed_writes_total", "counter", "records that could not be written", ("", journal.failed_writes)
        )
    metric(
        "http_requests_total",
        "counter",
        "requests",
        *((_request(key), value[0]) for key, value in sorted(requests.items())),
    )
    metric(
        "http_request_seconds_total",
        "counter",
        "seconds spent",
        *((_request(key), value[1]) for key, value in sorted(requests.items())),
    )
    return "\n".join(lines) + "\n"


def _label(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{env="{escaped}"}}'


def _request(key: tuple[str, int]) -> str:
    return f'{{path="{key[0]}",status="{key[1]}"}}'
