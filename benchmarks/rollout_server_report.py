"""What a run of `rollout_server.py` found: the tables on the screen and in the documentation, and which aims were reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OLD_VERSION = "0.4.0"
SEQUENCES = 8
BATCH = 256


@dataclass(kw_only=True)
class Row:
    """One server, one variant, one sequence length."""

    server: str  # old | memory | durable | page
    variant: str  # json | gzip | binary
    length: int
    groups: int
    posts_per_s: float = 0.0
    post_p50_ms: float = 0.0
    post_p99_ms: float = 0.0
    batch_ms: float = 0.0
    groups_per_s: float = 0.0
    post_cpu_ms: float = 0.0
    batch_cpu_ms: float = 0.0
    bytes_per_token: float = 0.0
    body_bytes_per_token: float = 0.0

    @property
    def cpu_ms(self) -> float:
        """Processor time of the server for a group, from its POST until it is out of the door."""
        return self.post_cpu_ms + self.batch_cpu_ms * SEQUENCES / BATCH


@dataclass(kw_only=True)
class Results:
    """Everything one run measured."""

    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    draining: dict[str, dict[str, float]] = field(default_factory=dict)
    status: dict[str, dict[int, float]] = field(default_factory=dict)

    def row(self, server: str, variant: str, length: int) -> Row | None:
        for row in self.rows:
            if (row.server, row.variant, row.length) == (server, variant, length):
                return row
        return None

    def old(self, length: int, variant: str) -> Row | None:
        """The old server's row to compare with: it knows JSON and gzip JSON; binary clients replace JSON ones."""
        wanted = self.row("old", "gzip", length) if variant == "gzip" else None
        return wanted or self.row("old", "json", length)


# ---- aims -------------------------------------------------------------------------------------------------------------

# What is asked of the new server, as ratios to the old one in groups per second: form, server -> by sequence length.
STREAM_AIMS: dict[tuple[str, str], dict[int, float]] = {
    ("json", "memory"): dict.fromkeys((512, 4096, 32768), 35),
    ("json", "durable"): dict.fromkeys((512, 4096, 32768), 25),
    ("gzip", "memory"): dict.fromkeys((512, 4096, 32768), 30),
    ("binary", "memory"): {512: 150, 4096: 350, 32768: 250},
    ("binary", "durable"): dict.fromkeys((512, 4096, 32768), 100),
}
POST_AIMS = {"json": 6.0, "binary": 25.0}
BATCH_AIM, DRAINING_AIM, STATUS_AIM_MS = 200.0, 50.0, 0.3
MEMORY_AIMS = {"json": 32.0, "binary": 13.0}


def _verdict(reached: bool) -> str:
    return "yes" if reached else "**no**"


def _by_length(results: Results, server: str, variant: str, value: str, *, lower: bool = False) -> dict[int, float]:
    """Ratios to the old server by sequence length."""
    found = {}
    for length in sorted({row.length for row in results.rows}):
        row, old = results.row(server, variant, length), results.old(length, variant)
        if row is not None and old is not None:
            ours, theirs = getattr(row, value), getattr(old, value)
            found[length] = theirs / ours if lower else ours / theirs
    return found


def _list(values: dict[int, float], unit: str = "×") -> str:
    return ", ".join(f"{length}: {value:.1f}{unit}" for length, value in values.items())


def aim_rows(results: Results) -> list[list[str]]:
    """Every aim: what, how much was asked, what was measured, whether that is enough."""
    lines = []
    for (variant, server), asked in STREAM_AIMS.items():
        got = _by_length(results, server, variant, "groups_per_s")
        cpu = _by_length(results, server, variant, "cpu_ms", lower=True)
        if got:
            enough = all(ratio >= asked.get(length, 0) for length, ratio in got.items())
            wanted = " / ".join(f"{asked[length]:.0f}" for length in got if length in asked)
            shown = f"{_list(got)} (processor time {_list(cpu)})"
            lines.append([f"{variant}, {server}: groups/s", f"{wanted}×", shown, _verdict(enough)])
    for variant, least in POST_AIMS.items():
        for server in ("memory", "durable"):
            got = _by_length(results, server, variant, "posts_per_s")
            if got:
                enough = min(got.values()) >= least
                lines.append([f"{variant}, {server}: POST alone", f"{least:.0f}×", _list(got), _verdict(enough)])
    for server in ("memory", "durable"):
        got = _by_length(results, server, "json", "batch_ms", lower=True)
        if 4096 in got:
            asked_text, shown = f"{BATCH_AIM:.0f}×", f"{got[4096]:.0f}×"
            lines.append([f"`/batch` of 256 × 4096, {server}", asked_text, shown, _verdict(got[4096] >= BATCH_AIM)])
    lines += _side_aims(results)
    for variant, most in MEMORY_AIMS.items():
        held = {
            row.length: row.bytes_per_token for row in results.rows if (row.server, row.variant) == ("memory", variant)
        }
        if held:
            enough = max(held.values()) <= most
            lines.append(
                [f"{variant}: memory per queued token", f"≤ {most:.0f} B", _list(held, " B"), _verdict(enough)]
            )
    return lines


def _side_aims(results: Results) -> list[list[str]]:
    lines = []
    base = results.draining.get("old")
    for server in ("memory", "durable"):
        drain, status = results.draining.get(server), results.status.get(server)
        if base and drain:
            ratio = base["p99_ms"] / drain["p99_ms"]
            enough = ratio >= DRAINING_AIM
            lines.append(
                [
                    f"p99 of POST while draining, {server}",
                    f"{DRAINING_AIM:.0f}× lower",
                    f"{ratio:.0f}×",
                    _verdict(enough),
                ]
            )
        if status:
            flat = max(status.values()) <= 1.25 * min(status.values())
            shown = ", ".join(f"{groups}: {ms:.2f} ms" for groups, ms in status.items())
            enough = flat and max(status.values()) < STATUS_AIM_MS
            lines.append(
                [f"`/status-env` by queued groups, {server}", f"flat, < {STATUS_AIM_MS} ms", shown, _verdict(enough)]
            )
    return lines


# ---- showing it -------------------------------------------------------------------------------------------------------


def ratio_text(value: float, base: float | None, *, lower_is_better: bool = False) -> str:
    if not base or not value:
        return "–"
    return f"{(base / value if lower_is_better else value / base):.1f}×"


def table_rows(results: Results) -> list[list[str]]:
    lines = []
    for row in results.rows:
        old = results.old(row.length, row.variant)
        base = old if old is not None and row.server != "old" else None
        lines.append(
            [
                str(row.length),
                row.variant,
                row.server,
                f"{row.groups_per_s:.1f}",
                ratio_text(row.groups_per_s, base and base.groups_per_s),
                f"{row.cpu_ms:.2f}",
                ratio_text(row.cpu_ms, base and base.cpu_ms, lower_is_better=True),
                f"{row.posts_per_s:.1f}",
                ratio_text(row.posts_per_s, base and base.posts_per_s),
                f"{row.post_p50_ms:.1f} / {row.post_p99_ms:.1f}",
                f"{row.batch_ms:.1f}",
                ratio_text(row.batch_ms, base and base.batch_ms, lower_is_better=True),
                f"{row.bytes_per_token:.1f}",
                f"{row.body_bytes_per_token:.1f}",
            ]
        )
    return lines


COLUMNS = [
    *("tokens", "form", "server", "groups/s", "ratio", "CPU ms/group", "ratio", "POST/s", "ratio", "POST p50 / p99 ms"),
    *("/batch ms", "ratio", "B/token held", "B/token sent"),
]


def show(results: Results) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Rollout server: post and take out (ratios to the old server in the same run)")
    for name in COLUMNS:
        table.add_column(name, justify="right" if name not in ("form", "server") else "left")
    for line in table_rows(results):
        table.add_row(*line)
    console = Console(width=160)
    console.print(table)
    other = Table(title="Beside the stream")
    for name in ("server", "POST p50 / p99 ms while draining", "/status-env p50 ms by queued groups"):
        other.add_column(name)
    for line in side_rows(results):
        other.add_row(*line)
    console.print(other)
    aims = Table(title="Aims")
    for name in ("what", "asked", "measured", "reached"):
        aims.add_column(name)
    for line in aim_rows(results):
        aims.add_row(*line)
    console.print(aims)
    console.print(results.machine)


def side_rows(results: Results) -> list[list[str]]:
    lines = []
    base = results.draining.get("old", {}).get("p99_ms")
    for kind, drain in results.draining.items():
        ratio = ratio_text(drain["p99_ms"], base, lower_is_better=True) if kind != "old" else "–"
        status = ", ".join(f"{groups}: {ms:.2f}" for groups, ms in results.status.get(kind, {}).items())
        lines.append([kind, f"{drain['p50_ms']:.1f} / {drain['p99_ms']:.1f} ({ratio})", status])
    return lines


def markdown(results: Results) -> str:
    def table(columns: list[str], rows: list[list[str]]) -> str:
        head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
        return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)

    machine = results.machine
    return f"""# Rollout server: measured

Made by `python benchmarks/rollout_server.py --write`; what is measured and how is in `benchmarks/README.md`.

Machine: {machine["cpu"]}, {machine["cores"]} cores, {machine["memory_gib"]} GiB, {machine["system"]}, Python
{machine["python"]}, load average {machine["load_at_start"]} before the run. The server has one core, the load generator another.

`old` is atroposlib {OLD_VERSION}, `memory` is ours with `--in-memory`, `durable` is ours as it starts by default (every
group is on disk before the reply) but for the live page, `page` is with it. Ratios are to the old server in the same run;
`binary` is compared with its JSON, as that is what such a client would otherwise send. POST and `/batch` are also shown apart.
Ours is measured after 1.2 GB have gone through it; in a new data folder, until its files are used again, `durable` makes about four
fifths of this (512 tokens, binary).

## Aims

{table(["what", "asked", "measured", "reached"], aim_rows(results))}
## Posting groups of {SEQUENCES} sequences and taking batches of {BATCH}

{table(COLUMNS, table_rows(results))}
## Beside the stream

{table(["server", "POST p50 / p99 ms while a batch is taken", "`/status-env` p50 ms by queued groups"], side_rows(results))}"""
