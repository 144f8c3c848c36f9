"""What the terminal shows and what the report says, from a run log."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from atlaslib.launch.display import RunDisplay, RunState
from atlaslib.launch.report import svg_line, write_report
from atlaslib.launch.running import finished_step
from atroposlib.api.observer import GroupEvent
from atroposlib.api.run_log import RunLog

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    log = RunLog(folder / "server" / "run_log.sqlite", flush_s=0.01)
    log.set_meta(name="demo " + HOSTILE)
    for step in range(1, 21):
        content = {
            "tokens": [[1, 2]],
            "masks": [[-100, 2]],
            "scores": [step / 20],
            "messages": [
                [{"role": "user", "content": "D3"}, {"role": "assistant", "content": f"answer {step} {HOSTILE}"}]
            ],
        }
        log.group_accepted(
            GroupEvent(
                key=step, group_id=f"g{step}", env_id=0, env_name="letters_0", size=1, num_tokens=2, scores=[step / 20], policy_versions=None,
                reward_components=None, payload=json.dumps(content).encode(), binary=False,
            )
        )  # fmt: skip
        log.batch_formed(step, [f"g{step}"])
        log.reported(
            "trainer", step, 100.0 + step, {"reward": step / 20, "batch_seq": step, "rollout/staleness_mean": 1.0}
        )
    rejected = {"": 3.0, "_equal_scores": 2.0, "_too_long": 1.0}
    counts = {f"rollout/num_groups_rejected{reason}": count for reason, count in rejected.items()}
    log.reported("env:letters_0", 20, 130.0, {"eval/held_out_exact": 0.75, **counts})
    log.group_rejected(0, HOSTILE)
    log.close()
    return folder


def test_the_report_has_curves_samples_and_no_markup_of_strangers(run_dir: Path) -> None:
    (run_dir / "plan.json").write_text(json.dumps({"rollout_server": {"token": "s3cret"}, "name": HOSTILE}))
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    text = path.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "s3cret" not in text
    assert "20 steps on 20 samples (40 tokens) in 20 groups; reward 0.050 at the start, 1.000 at the end." in text
    assert text.count("<svg") >= 2
    assert "answer 1 " in text
    assert "answer 20 " in text


def test_no_report_without_a_log(tmp_path: Path) -> None:
    assert write_report(tmp_path) is None


def test_a_curve_runs_from_corner_to_corner() -> None:
    points = re.search(r"points='([^']*)'", svg_line([(0, 0.0), (10, 1.0)]))
    assert points is not None
    assert points.group(1).split() == ["54.0,140.0", "350.0,15.0"]


def test_the_terminal_shows_step_reward_queue_and_the_newest_rollout(run_dir: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    display = RunDisplay(
        title="demo", run_dir=run_dir, page="http://127.0.0.1:1/live", total_steps=20, console=console, live=False
    )
    display.event("server ready")
    display.tick()
    display.close()
    line = display.line()
    assert line.startswith("step 20/20, reward 0.")
    assert "held-out 0.75" in line
    assert "staleness 1.0" in line
    assert "rejected 3 (mostly equal scores)" in line
    assert f"newest: D3 → answer 20 {HOSTILE} (1.00)" in line
    console.print(display.render())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "server ready" in shown
    assert "http://127.0.0.1:1/live" in shown


def test_a_display_without_a_log_yet(tmp_path: Path) -> None:
    display = RunDisplay(
        title="x", run_dir=tmp_path, page="", total_steps=5, console=Console(file=io.StringIO()), live=False
    )
    display.tick()
    assert display.line() == "step 0/5 (the first one takes loading torch and the model)"
    display._told -= 6.0  # seconds without a word
    display._next = 0.0
    display.tick()
    assert "step 0/5" in display.console.file.getvalue()  # type: ignore[attr-defined]


def test_rejected_groups_are_summed_over_environments() -> None:
    state = RunState()
    assert state.rejected() is None
    name = "rollout/num_groups_rejected"
    for number, source in enumerate(("env:a", "env:b")):
        state.take([[number, 0.0, source, 1, name, 4.0]])
    assert state.rejected() == "8"
    for number, source in enumerate(("env:a", "env:b")):
        state.take([[number, 0.0, source, 1, f"{name}_equal_scores", 4.0]])
    assert state.rejected() == "8 (equal scores)"


def test_sparkline_rises() -> None:
    state = RunState()
    state.take([[i, float(i), "trainer", i, "reward", i / 10] for i in range(1, 11)])
    assert state.sparkline()[0] == "▁"
    assert state.sparkline()[-1] == "█"


def test_the_step_a_run_finished_with(tmp_path: Path) -> None:
    assert finished_step(tmp_path) is None
    (tmp_path / "done.json").write_text('{"step": 7}')
    assert finished_step(tmp_path) == 7


def test_a_teaching_run_shows_what_became_of_the_student(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    log = RunLog(folder / "server" / "run_log.sqlite", flush_s=0.01)
    log.set_meta(name="teacher")
    chats = folder / "checkpoints" / "teacher_chats"
    chats.mkdir(parents=True)
    for step in range(1, 21):
        values = {"reward": step / 10, "student_accuracy": step / 20, "baseline_accuracy": 0.1}
        log.reported("trainer", step, 100.0 + step, values)
        line = {
            "step": step - 1, "prompt": "a", "ground_truth": "a", "baseline_full_response": "z", "teaching_content": f"hint {step} {HOSTILE}",
            "student_full_response": "a", "reward": 1.99,
        }  # fmt: skip
        (chats / f"step_{step - 1:06d}.jsonl").write_text(json.dumps(line) + "\n")
    log.close()
    report = write_report(folder)
    assert report is not None
    text = report.read_text()
    assert "20 steps; reward 0.100 at the start, 2.000 at the end." in text
    assert "right in 5% of the cases at the start and in 100% at the end; without, in 10%." in text
    assert "Student right with teaching" in text
    assert "teacher: hint 1 " in text
    assert "teacher: hint 20 " in text
    assert "<script" not in text
    console = Console(file=io.StringIO(), width=200)
    display = RunDisplay(title="t", run_dir=folder, page="p", total_steps=20, console=console, live=False)
    display._read()
    assert "student taught 1.00, untaught 0.10" in display.line()
    with console.capture() as shown:
        console.print(display.render())
    assert "student taught" in shown.get()
