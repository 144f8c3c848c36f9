"""Metrics of a step: means, times, and a file that survives a killed run."""

from __future__ import annotations

import json
import math
import sys
import threading
from pathlib import Path

import pytest

from atlaslib.trainers.step_metrics import MetricsFile, StepMetrics


def test_a_step_is_the_mean_of_its_observations_and_a_window_the_mean_of_its_steps() -> None:
    metrics = StepMetrics()
    metrics.put("reward", 1.0)
    metrics.put("reward", 3.0)
    metrics.put("reward", math.nan)
    metrics.put("train/num_tokens", 100.0)
    metrics.count("rewards/a_failed", 2)
    metrics.count("rewards/a_failed", 3)
    with metrics.time("forward"):
        pass
    first = metrics.close_step()
    assert first["reward"] == 2.0
    assert first["rewards/a_failed"] == 5.0
    assert first["time/forward_s"] >= 0.0
    assert first["train/tokens_per_s"] == pytest.approx(100.0 / first["time/step_s"])
    metrics.put("reward", 4.0)
    assert "train/num_tokens" not in metrics.close_step()
    assert metrics.drain_window()["reward"] == 3.0
    assert metrics.drain_window() == {}


def test_another_thread_may_measure_while_a_step_is_closed() -> None:
    metrics, closing, errors = StepMetrics(), threading.Event(), []

    def measure() -> None:
        try:
            while not closing.is_set():
                for number in range(50):
                    metrics.put(f"rewards/{number}", 1.0)
                    with metrics.time(f"phase{number}"):
                        pass
        except RuntimeError as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        worker = threading.Thread(target=measure)
        worker.start()
        for _ in range(400):
            metrics.close_step()
        metrics.drain_window()
    finally:
        sys.setswitchinterval(before)
        closing.set()
        worker.join()
    assert errors == []


def test_the_file_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "deep" / "metrics.jsonl")
    for step in (1, 2, 3):
        file.write(step, {"reward": float(step), "odd": math.inf})
    with file.path.open("a") as handle:
        handle.write('{"step": 4, "rew')  # a line cut off by a killed process
    file.rewind(2)
    lines = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["odd"] is None
