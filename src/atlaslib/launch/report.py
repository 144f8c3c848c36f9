"""The report of a run: one HTML file without scripts, made from the run log; charts are inline SVG, all text is escaped."""

from __future__ import annotations

import html
import json
import time
from pathlib import Path
from typing import Any

STYLE = (
    ":root{color-scheme:light dark;--fg:#1d2330;--dim:#667085;--bg:#fff;--card:#f6f7f9;--line:#dfe3ea;--accent:#2563eb}"
    "@media (prefers-color-scheme:dark){:root{--fg:#e6e9f0;--dim:#96a0b5;--bg:#12151c;--card:#1b202b;--line:#2d3444;--accent:#7aa2ff}}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:980px;margin:2rem auto;padding:0 1rem;color:var(--fg);background:var(--bg);overflow-wrap:anywhere}"
    "h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse}td,th{text-align:left;padding:.2rem .8rem .2rem 0;"
    "border-bottom:1px solid var(--line);font-variant-numeric:tabular-nums}td:not(:nth-child(2)),th{overflow-wrap:normal}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:1rem}"
    "figure{margin:0}figcaption{color:var(--dim);font-size:.85rem}svg{width:100%;background:var(--card);border-radius:6px}"
    "polyline{fill:none;stroke:var(--accent);stroke-width:1.6}text{font-size:11px;fill:var(--dim)}"
    "pre{background:var(--card);padding:.6rem;border-radius:6px;white-space:pre-wrap}"
)
CHARTS = (
    ("Reward of the batches trained on", "trainer", "reward"),
    ("Held-out prompts answered exactly", "env:", "eval/held_out_exact"),
    ("Student right with teaching", "trainer", "student_accuracy"),
    ("Student right without teaching", "trainer", "baseline_accuracy"),
    ("Tokens per second, update", "trainer", "train/tokens_per_s"),
    ("Entropy", "trainer", "policy/entropy"),
    ("Staleness (policy versions)", "trainer", "rollout/staleness_mean"),
    ("Mismatch between sampler and trainer (KL)", "trainer", "policy/mismatch_kl"),
)


def write_report(run_dir: Path) -> Path | None:
    """Write `report.html` into the run's folder; None when the run has no log yet."""
    from atroposlib.frontend.live.history import RunHistory

    try:
        history = RunHistory(run_dir)
    except FileNotFoundError:
        return None
    path = run_dir / "report.html"
    path.write_text(report_page(history, run_dir), encoding="utf-8")
    return path


def report_page(history: Any, run_dir: Path) -> str:
    """The whole page."""
    series = read_series(history)
    overview = history.overview(after=2**62)
    name = overview["meta"].get("name", run_dir.name)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width'>",
        f"<title>{html.escape(name)}</title><style>{STYLE}</style></head><body><h1>{html.escape(name)}</h1>",
        f"<p>{html.escape(summary(series, overview))}</p>",
        numbers_table(series, overview),
        "<h2>Curves</h2><div class='charts'>",
    ]
    for title, source, metric in CHARTS:
        for (found_source, found_name), points in sorted(series.items()):
            if found_name == metric and found_source.startswith(source):
                parts.append(f"<figure>{svg_line(points)}<figcaption>{html.escape(title)}</figcaption></figure>")
    parts.append("</div>")
    parts += [
        rollouts_section("First rollouts", history, newest=False),
        rollouts_section("Last rollouts", history, newest=True),
        teaching_section(run_dir),
    ]
    parts.append(settings_section(run_dir))
    parts.append(
        f"<p>Written {time.strftime('%Y-%m-%d %H:%M:%S')}. The page of this run: <code>atropos view {html.escape(str(run_dir))}</code></p></body></html>"
    )
    return "".join(parts)


def read_series(history: Any) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(source, metric) -> (step, value) in order; a step reported again after a restart keeps its newest value."""
    series: dict[tuple[str, str], dict[int, float]] = {}
    after, more = 0, True
    while more:
        news = history.overview(after=after)
        for number, _, source, step, name, value in news["metrics"]:
            after = max(after, number)
            if source == "trainer" or source.startswith("env:"):
                series.setdefault((source, name), {})[step] = value
        more = news["more"]
    return {key: sorted(points.items()) for key, points in series.items()}


def _ends(points: list[tuple[int, float]]) -> tuple[float, float]:
    part = max(1, len(points) // 20)
    return sum(value for _, value in points[:part]) / part, sum(value for _, value in points[-part:]) / part


def summary(series: dict[tuple[str, str], list[tuple[int, float]]], overview: dict[str, Any]) -> str:
    """One sentence."""
    rewards = series.get(("trainer", "reward"))
    if not rewards:
        return "No step has been trained yet."
    first, last = _ends(rewards)
    counts = overview["counts"]
    # A trainer that makes its own rollouts sends no groups.
    groups = f" on {counts['samples']} samples ({counts['tokens']} tokens) in {counts['groups']} groups"
    text = f"{rewards[-1][0]} steps{groups if counts['groups'] else ''}; reward {first:.3f} at the start, {last:.3f} at the end."
    return f"{text} {teaching_summary(series)}".rstrip()


def teaching_summary(series: dict[tuple[str, str], list[tuple[int, float]]]) -> str:
    """What became of the student of a teaching run; empty for others."""
    taught, alone = series.get(("trainer", "student_accuracy")), series.get(("trainer", "baseline_accuracy"))
    if not taught or not alone:
        return ""
    (first, last), (_, untaught) = _ends(taught), _ends(alone)
    return (
        f"With teaching the student is right in {first:.0%} of the cases at the start and in {last:.0%} at the end; "
        f"without, in {untaught:.0%}."
    )


def numbers_table(series: dict[tuple[str, str], list[tuple[int, float]]], overview: dict[str, Any]) -> str:
    """Start and end of every metric of the trainer and of the evaluations."""
    rows = []
    for (source, name), points in sorted(series.items()):
        if source == "trainer" or name.startswith("eval"):
            first, last = _ends(points)
            rows.append(
                f"<tr><td>{html.escape(source)}</td><td>{html.escape(name)}</td><td>{first:.4g}</td><td>{last:.4g}</td></tr>"
            )
    refused = "".join(
        f"<li>{html.escape(row['env'])}: {html.escape(row['reason'])}: {row['count']}</li>"
        for row in overview["rejected"]
    )
    return (
        "<details><summary>All numbers, start and end</summary><table><tr><th>source</th><th>metric</th><th>start</th><th>end</th></tr>"
        + "".join(rows) + "</table></details>" + (f"<h2>Refused groups</h2><ul>{refused}</ul>" if refused else "")
    )  # fmt: skip


def svg_line(points: list[tuple[int, float]], width: int = 360, height: int = 160) -> str:
    """A curve with its axes' ends written on; as wide as a phone, so that they can be read there."""
    xs, ys = [step for step, _ in points], [value for _, value in points]
    low, high = min([0.0, *ys]), max(ys)
    high = high if high > low else low + 1
    span = max(1, xs[-1] - xs[0])
    coordinates = " ".join(
        f"{54 + (x - xs[0]) / span * (width - 64):.1f},{height - 20 - (y - low) / (high - low) * (height - 35):.1f}"
        for x, y in points
    )
    return (
        f"<svg viewBox='0 0 {width} {height}' role='img'><polyline points='{coordinates}'/>"
        f"<text x='4' y='16'>{high:.3g}</text><text x='4' y='{height - 20}'>{low:.3g}</text>"
        f"<text x='54' y='{height - 5}'>step {xs[0]}</text><text x='{width - 10}' y='{height - 5}' text-anchor='end'>step {xs[-1]}</text></svg>"
    )


def rollouts_section(title: str, history: Any, *, newest: bool, count: int = 5) -> str:
    """A few samples with their scores."""
    shown = []
    for key in history.archived_keys(newest=newest, limit=count):
        group = history.group(key)
        messages = ((group or {}).get("content") or {}).get("messages") or []
        if group and messages and group["samples"]:
            text = "\n".join(f"{message['role']}: {message['content']}" for message in messages[0])
            where = "not trained" if group["step"] is None else f"step {group['step']}"
            shown.append(f"<pre>{html.escape(text)}\n\nscore {group['samples'][0]['score']:g}, {where}</pre>")
    return f"<h2>{title}</h2>{''.join(shown)}" if shown else ""


def teaching_section(run_dir: Path, count: int = 3) -> str:
    """The first and the last dialogues a teacher's run wrote down."""
    lines: list[dict[str, Any]] = []
    for path in sorted((run_dir / "checkpoints" / "teacher_chats").glob("*.jsonl")):
        lines += [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    lines.sort(key=lambda line: line["step"])
    parts = []
    for title, some in (("First dialogues", lines[:count]), ("Last dialogues", lines[count:][-count:])):
        shown = "".join(f"<pre>{html.escape(dialogue_text(line))}</pre>" for line in some)
        parts.append(f"<h2>{title}</h2>{shown}" if shown else "")
    return "".join(parts)


def dialogue_text(line: dict[str, Any]) -> str:
    """One teaching dialogue, for people."""
    return (
        f"question: {line['prompt']}\nright answer: {line['ground_truth']}\nstudent alone: {line['baseline_full_response']}\n"
        f"teacher: {line['teaching_content']}\nstudent taught: {line['student_full_response']}\n\nreward {line['reward']:.3g}, step {line['step'] + 1}"
    )


def settings_section(run_dir: Path) -> str:
    """The resolved plan."""
    try:
        plan = json.loads((run_dir / "plan.json").read_text())
    except (OSError, ValueError):
        return ""
    if isinstance(plan.get("rollout_server"), dict) and plan["rollout_server"].get("token"):
        plan["rollout_server"]["token"] = "***"
    return f"<h2>Settings</h2><details><summary>the resolved plan</summary><pre>{html.escape(json.dumps(plan, indent=1))}</pre></details>"
