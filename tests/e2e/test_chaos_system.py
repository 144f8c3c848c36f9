"""The whole system under SIGKILL: rollout server, environment and trainer (with its policy server) die at random moments.

The run finishes by itself; every step was trained on its own batch, in order; no group is in two batches; none is missing.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from atlaslib.launch.plan import RunPlan, fix_ports, make_plan, processes, write_files
from atlaslib.launch.quickstart_model import build_quickstart_model
from atlaslib.launch.supervisor import Supervisor
from atroposlib.api.run_log import read_run_log

ENVIRONMENT = "repeat_letters"
STEADY = {
    "per_device_train_batch_size": 256,
    "num_generations": 16,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
}
"""With batches this large every undisturbed run learns; with those of the short test the last rewards lie anywhere."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_quickstart_model(tmp_path_factory.mktemp("chaos") / "model", warmup_steps=20)


def make_run(run_dir: Path, model_dir: Path, *, steps: int, **trainer: object) -> RunPlan:
    settings: dict[str, object] = {
        "max_steps": steps,
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_prompt_length": 16,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "temperature": 1.0,
        "save_steps": 2,
        "save_total_limit": 2,
        "max_staleness": 10_000,
        "max_batches_offpolicy": 1,
        **trainer,
    }
    plan = make_plan(
        {
            "run_dir": str(run_dir),
            "model": str(model_dir),
            "threads": 1,
            "trainer": settings,
            "environments": [
                {
                    "path": "atroposlib.envs.quickstart_env:RepeatLetters",
                    "config": {"group_size": settings["num_generations"], "steps_per_eval": 0},
                }
            ],
        },
        where="chaos",
    )
    fix_ports(plan)
    write_files(plan)
    return plan


def newest_step(run_dir: Path) -> int:
    try:
        log = read_run_log(run_dir)
    except FileNotFoundError:
        return 0
    try:
        return log.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()[0]
    except sqlite3.OperationalError:  # the server is about to make its tables
        return 0
    finally:
        log.close()


class Killer:
    """Kills one process after the other, each time after some progress or some time, while the supervisor watches."""

    def __init__(self, run: Supervisor, run_dir: Path, victims: list[str], seed: int, longest_wait_s: float) -> None:
        self.run, self.run_dir, self.victims, self.longest_wait_s = run, run_dir, list(victims), longest_wait_s
        self.random = random.Random(seed)
        self.killed: list[str] = []
        self._arm()

    def _arm(self) -> None:
        self.step = newest_step(self.run_dir)
        self.since = time.monotonic()
        self.extra = self.random.uniform(0.0, 1.5)
        self.due: float | None = None

    def tick(self) -> None:
        now = time.monotonic()
        if not self.victims:
            return
        if self.due is None:
            if newest_step(self.run_dir) > self.step or now - self.since > self.longest_wait_s:
                self.due = now + self.extra
            return
        child = self.run.children[self.victims[0]]
        if now >= self.due and child.running and child.popen is not None:
            os.kill(child.popen.pid, signal.SIGKILL)
            child.popen.wait()
            self.killed.append(self.victims.pop(0))
            self._arm()


def disturb(
    plan: RunPlan, victims: list[str], *, seed: int, timeout_s: float, longest_wait_s: float
) -> tuple[Supervisor, Killer]:
    with Supervisor(processes(plan), plan.run_dir) as run:
        run.start()
        killer = Killer(run, plan.run_dir, victims, seed, longest_wait_s)
        finished = run.wait(timeout_s=timeout_s, tick=killer.tick)
        logs = "\n".join(run.log_end(child) for child in run.children.values())
    assert finished, f"not finished within {timeout_s} s; killed {killer.killed}\n{logs}"
    return run, killer


def check_lineage(plan: RunPlan) -> None:
    steps, batch = int(plan.trainer["max_steps"]), int(plan.trainer["per_device_train_batch_size"])
    log = read_run_log(plan.run_dir)
    try:
        trained = log.execute("SELECT step, batch_seq FROM steps ORDER BY step").fetchall()
        assert [tuple(row) for row in trained] == [(step, step) for step in range(1, steps + 1)]
        twice = log.execute("SELECT group_id, count(*) FROM members GROUP BY group_id HAVING count(*) > 1").fetchall()
        assert twice == []
        sizes = log.execute(
            "SELECT m.batch_seq, sum(g.size) FROM members m LEFT JOIN groups g ON g.group_id = m.group_id WHERE m.batch_seq <= ? GROUP BY 1 ORDER BY 1",
            (steps,),
        ).fetchall()
        assert [tuple(row) for row in sizes] == [(seq, batch) for seq in range(1, steps + 1)]
        # Oldest first: nothing that was accepted before the newest trained group was left behind.
        newest = log.execute(
            "SELECT max(g.key) FROM groups g JOIN members m USING (group_id) WHERE m.batch_seq <= ?", (steps,)
        ).fetchone()[0]
        left = log.execute(
            "SELECT count(*) FROM groups g WHERE g.key <= ? AND g.group_id NOT IN (SELECT group_id FROM members)",
            (newest,),
        ).fetchone()[0]
        assert left == 0
        keys = [row[0] for row in log.execute("SELECT key FROM groups ORDER BY key")]
        assert keys == list(range(keys[0], keys[0] + len(keys))), "a group that was accepted is missing"
    finally:
        log.close()


def final_reward(plan: RunPlan) -> float:
    log = read_run_log(plan.run_dir)
    try:
        query = "SELECT avg(value) FROM metrics WHERE source = 'trainer' AND name = 'reward' AND step > ?"
        return float(log.execute(query, (int(plan.trainer["max_steps"]) - 5,)).fetchone()[0])
    finally:
        log.close()


@pytest.mark.timeout(600)
def test_each_role_killed_once(tmp_path: Path, model_dir: Path) -> None:
    plan = make_run(tmp_path / "run", model_dir, steps=40)
    run, killer = disturb(plan, ["server", ENVIRONMENT, "trainer"], seed=0, timeout_s=400, longest_wait_s=60)
    assert killer.killed == ["server", ENVIRONMENT, "trainer"]
    assert {name: run.children[name].restarts for name in killer.killed} == {"server": 1, ENVIRONMENT: 1, "trainer": 1}
    check_lineage(plan)
    assert (plan.run_dir / "final_model" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_kills_and_the_reward_of_an_undisturbed_run(tmp_path: Path, model_dir: Path) -> None:
    victims = ["server", ENVIRONMENT, "trainer"] * 8
    random.Random(1).shuffle(victims)
    # Save after every step: progress between two kills of the trainer is then never lost.
    disturbed = make_run(tmp_path / "disturbed", model_dir, steps=90, save_steps=1, **STEADY)
    _, killer = disturb(disturbed, victims, seed=1, timeout_s=2400, longest_wait_s=90)
    assert len(killer.killed) >= 20
    check_lineage(disturbed)
    calm = make_run(tmp_path / "calm", model_dir, steps=90, **STEADY)
    disturb(calm, [], seed=0, timeout_s=900, longest_wait_s=60)
    assert abs(final_reward(disturbed) - final_reward(calm)) < 0.25
