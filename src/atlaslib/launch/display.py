"""What the terminal shows while a run goes: a panel that refreshes, or a line now and then where there is no terminal."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from atlaslib.errors import AtroposError

SAY_EVERY_S = 30.0
SAY_AT_START_S = 5.0
"""Without a terminal: a line at least this often, so that a run that waits shows for what."""
TEACHING = frozenset({"student taught", "untaught"})
"""Shown for runs that have them: share of right answers with and without teaching."""
REJECTED = " rollout/num_groups_rejected"
SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(kw_only=True, slots=True)
class RunState:
    """The few numbers the terminal shows, gathered from the run log as it grows."""

    step: int = 0
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    """mean reward of the newest groups"""
    reward_by_step: dict[int, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    """newest value of every metric, ``source name``"""
    first_step_time: float | None = None
    after: int = 0

    def take(self, rows: list[list[Any]]) -> None:
        """Metric rows of the run log: id, time, source, step, name, value."""
        for number, when, source, step, name, value in rows:
            self.after = max(self.after, number)
            self.latest[f"{source} {name}"] = value
            if source.startswith("groups:") and name == "reward":
                self.rewards.append(value)
            if source == "trainer":
                self.step = max(self.step, step)
                self.first_step_time = self.first_step_time or when
                if name == "reward":
                    self.reward_by_step[step] = value

    def find(self, ending: str) -> float | None:
        """The newest value of the metrics whose name ends so, summed over sources."""
        found = [value for name, value in self.latest.items() if name.endswith(ending)]
        return sum(found) if found else None

    def rejected(self) -> str | None:
        """How many groups were rejected and why most of them; None when there are none."""
        reasons: Counter[str] = Counter()
        for name, value in self.latest.items():
            if f"{REJECTED}_" in name:
                reasons[name.split(f"{REJECTED}_")[1]] += int(value)
        count = self.find(REJECTED)
        if not count or not reasons:
            return f"{count:.0f}" if count else None
        most = reasons.most_common(1)[0][0].replace("_", " ")
        return f"{count:.0f} ({'mostly ' if len(reasons) > 1 else ''}{most})"

    def reward(self) -> float | None:
        """Mean reward of the newest groups; without groups, of the newest step."""
        if not self.rewards:
            return self.reward_by_step[max(self.reward_by_step)] if self.reward_by_step else None
        return sum(self.rewards) / len(self.rewards)

    def sparkline(self, width: int = 48) -> str:
        """The reward over all steps so far, as little bars between 0 and the largest."""
        values = [self.reward_by_step[step] for step in sorted(self.reward_by_step)]
        if not values:
            return ""
        size = max(1, -(-len(values) // width))
        means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
        top = max(1e-9, *means, 1.0 if max(means) <= 1 else 0)
        return "".join(SPARKS[min(7, max(0, int(value / top * 7.99)))] for value in means)


class RunDisplay:
    """Shows a run until it is closed; `tick` is cheap and may be called often."""

    def __init__(
        self,
        *,
        title: str,
        run_dir: Path,
        page: str,
        total_steps: int,
        console: Console | None = None,
        live: bool | None = None,
    ) -> None:
        self.console = console or Console()
        self.title, self.run_dir, self.page, self.total_steps = title, run_dir, page, total_steps
        self.state = RunState()
        self.events: deque[str] = deque(maxlen=3)
        self.rollout: tuple[str, float] | None = None
        self.started = time.time()
        self._history: Any = None
        self._next = 0.0
        self._told_step = 0
        self._told = time.monotonic()
        use_live = self.console.is_terminal if live is None else live
        self._live = Live(console=self.console, refresh_per_second=4, transient=False) if use_live else None
        if self._live is not None:
            self._live.start()

    def event(self, text: str) -> None:
        """Something happened to a process."""
        self.events.append(text)
        if self._live is None:
            self.console.print(
                f"{time.time() - self.started:6.1f} s  {text}", highlight=False, markup=False, soft_wrap=True
            )

    def tick(self) -> None:
        """Read what is new and show it, twice a second."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 0.5
        self._read()
        if self._live is not None:
            self._live.update(self.render())
        elif self.state.step >= self._told_step + max(1, self.total_steps // 20) or now - self._told > self._pause():
            self._told_step, self._told = self.state.step, now
            self.console.print(
                f"{time.time() - self.started:6.1f} s  {self.line()}", highlight=False, markup=False, soft_wrap=True
            )

    def _pause(self) -> float:
        """Seconds without a line; fewer while nobody can know yet whether it works."""
        return SAY_EVERY_S if self.state.step else SAY_AT_START_S

    def close(self) -> None:
        """Show the last state and leave it on the screen."""
        self._read()
        if self._live is not None:
            self._live.update(self.render())
            self._live.stop()
            self._live = None

    def _read(self) -> None:
        from atroposlib.frontend.live.history import GroupFilter, RunHistory

        try:
            self._history = self._history or RunHistory(self.run_dir)
            more = True
            while more:
                news = self._history.overview(after=self.state.after)
                self.state.take(news["metrics"])
                more = news["more"]
            newest = self._history.groups(GroupFilter(limit=1))
            if newest and newest[0]["archived"]:
                self.rollout = newest_rollout(self._history.group(newest[0]["key"]))
        except (FileNotFoundError, sqlite3.Error, AtroposError):
            return  # the server has not made its log yet, or is just starting again

    def line(self) -> str:
        """The state in one line."""
        waiting = "" if self.state.step else " (the first one takes loading torch and the model)"
        parts = [f"step {self.state.step}/{self.total_steps}{waiting}"]
        parts += [f"{label} {value}" for label, value in self._numbers() if value is not None]
        if self.rollout:
            parts.append(f"newest: {self.rollout[0]} ({self.rollout[1]:.2f})")
        return ", ".join(parts)

    def _numbers(self) -> list[tuple[str, str | None]]:
        state = self.state
        numbers = [
            ("reward", state.reward(), ".3f"),
            ("held-out", state.find("held_out_exact"), ".2f"),
            ("student taught", state.latest.get("trainer student_accuracy"), ".2f"),
            ("untaught", state.latest.get("trainer baseline_accuracy"), ".2f"),
            ("tokens/s", _sampled(state), ".0f"),
            ("staleness", state.latest.get("trainer rollout/staleness_mean"), ".1f"),
            ("queue", state.latest.get("server queue/groups"), ".0f"),
        ]
        shown = [(label, None if value is None else f"{value:{form}}") for label, value, form in numbers]
        return [*shown, ("rejected", state.rejected())]

    def render(self) -> Panel:
        """The panel."""
        table = Table.grid(padding=(0, 3))
        labels, values = [], []
        for label, value in [("step", str(self.state.step)), *self._numbers()]:
            if value is None and label in TEACHING:
                continue
            labels.append(Text(label, style="dim"))
            values.append(Text(value or "–", style="bold"))
        table.add_row(*labels)
        table.add_row(*values)
        parts: list[Any] = [
            table,
            progress(self.state.step, self.total_steps),
            Text(f"reward {self.state.sparkline()}"),
        ]
        if self.rollout:
            parts.append(
                Text(
                    f"newest rollout  {self.rollout[0]}   score {self.rollout[1]:.2f}",
                    no_wrap=True,
                    overflow="ellipsis",
                )
            )
        parts += [
            Text(f"page {self.page}", style="cyan"),
            Text("  ".join(reversed(self.events)), style="dim", no_wrap=True, overflow="ellipsis"),
        ]
        return Panel(
            Group(*parts), title=self.title, subtitle=f"{time.time() - self.started:.0f} s, Ctrl-C stops", expand=False
        )


def progress(step: int, total: int, width: int = 60) -> Text:
    """A bar."""
    done = min(width, width * step // max(1, total))
    return Text("━" * done, style="green").append("━" * (width - done), style="dim")


def _sampled(state: RunState) -> float | None:
    found = [
        value for name, value in state.latest.items() if name.startswith("groups:") and name.endswith(" tokens_per_s")
    ]
    return sum(found) if found else None


def newest_rollout(group: dict[str, Any] | None) -> tuple[str, float] | None:
    """Prompt and answer of the first sample of a group, on one line, and its score."""
    if group is None or not group["content"] or not group["samples"]:
        return None
    messages = (group["content"].get("messages") or [[]])[0]
    text = " → ".join(" ".join(str(message.get("content", "")).split()) for message in messages)
    return (text[:100] or "(no messages)", float(group["samples"][0]["score"]))
