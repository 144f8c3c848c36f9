"""Metrics of a run: collected during a step, written as one JSON line per step, averaged for the trackers."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def memory_in_use() -> str:
    """Largest memory of the process so far, and of the GPU when there is one."""
    text = f"peak memory of the process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        text += f", GPU {torch.cuda.memory_allocated() / 2**30:.2f} GiB (peak {torch.cuda.max_memory_allocated() / 2**30:.2f})"
    return text


class StepMetrics:
    """Values of the step in progress and of the logging window; rollouts made ahead measure from a thread of their own."""

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose
        self._step: dict[str, list[float]] = defaultdict(list)
        self._counts: dict[str, float] = defaultdict(float)
        self._seconds: dict[str, float] = defaultdict(float)
        self._window: dict[str, list[float]] = defaultdict(list)
        self._started = time.perf_counter()
        self._lock = threading.Lock()

    def restart(self) -> None:
        """The clock of the next step starts now."""
        self._started = time.perf_counter()

    def put(self, name: str, value: float) -> None:
        """One observation of ``area/name``; a step's value is the mean of its observations. NaN is left out."""
        if not math.isnan(value):
            with self._lock:
                self._step[name].append(float(value))

    def count(self, name: str, number: int) -> None:
        """Add what this process saw to ``area/name``; a step's value is the sum over the processes."""
        with self._lock:
            self._counts[name] += number

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the time of the block to ``time/<name>_s``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            with self._lock:
                self._seconds[name] += seconds
            if self._verbose:
                logger.info("%s took %.4f s; %s", name, seconds, memory_in_use())

    def take_counts(self) -> dict[str, float]:
        """What this process counted since the last call."""
        with self._lock:
            counts, self._counts = dict(self._counts), defaultdict(float)
        return counts

    def close_step(self, counts: dict[str, float] | None = None) -> dict[str, float]:
        """The step's values; starts the next step. ``counts``: what all processes counted, where there are several."""
        counts = self.take_counts() if counts is None else counts
        now = time.perf_counter()
        with self._lock:
            values = {name: sum(observed) / len(observed) for name, observed in self._step.items()}
            values.update(counts)
            values.update({f"time/{name}_s": seconds for name, seconds in self._seconds.items()})
            self._step.clear()
            self._seconds.clear()
        values["time/step_s"] = now - self._started
        if "train/num_tokens" in values and values["time/step_s"] > 0:
            values["train/tokens_per_s"] = values["train/num_tokens"] / values["time/step_s"]
        self._started = now
        for name, value in values.items():
            self._window[name].append(value)
        return values

    def drain_window(self) -> dict[str, float]:
        """Means over the steps since the last call, for the trackers."""
        means = {name: sum(values) / len(values) for name, values in self._window.items()}
        self._window.clear()
        return means


class MetricsFile:
    """``metrics.jsonl``: one line per step. A resumed run drops the lines after its checkpoint and goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rewind(self, step: int) -> None:
        """Keep the lines up to ``step``."""
        if not self.path.is_file():
            return
        kept = []
        for line in self.path.read_text().splitlines():
            try:
                if json.loads(line).get("step", 0) <= step:
                    kept.append(line)
            except json.JSONDecodeError:
                continue  # a line cut off by a killed process
        self.path.write_text("".join(line + "\n" for line in kept))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append one line; values that JSON cannot hold become null."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), **clean}) + "\n")
