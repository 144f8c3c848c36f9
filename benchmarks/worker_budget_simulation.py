"""How much rollout work is thrown away when several environments share one rollout server?

A simulation in virtual time. Each environment makes groups (1 to 8 s each) with at most 16 workers, looks at the queue
ten times a second and decides how many groups may be in flight; the trainer takes one batch every 4 s. Two policies:

  cancel    the published rule of atroposlib 0.4: the cap is min(workers, places - queue); when the cap falls below the
            groups in flight the oldest are cancelled, when the queue is full all are cancelled
  budget    ours (atroposlib.envs.worker_budget): a share of the free places; running groups always finish

Printed per policy: the share of worker-seconds that was cancelled, batches the trainer got, how long it waited, and the
most batches that were waiting or in the making at once (the staleness bound is 3).

    python benchmarks/worker_budget_simulation.py
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from atroposlib.envs.worker_budget import BudgetLimits, QueueStatus, allowed_workers

TICK_S = 0.1
TRAINER_S = 4.0


@dataclass(kw_only=True)
class Environment:
    """One simulated environment: the start and end times of its groups in flight, oldest first."""

    running: list[tuple[float, float]] = field(default_factory=list)


@dataclass(kw_only=True)
class Outcome:
    """Worker-seconds and batches of one simulated run."""

    finished_s: float = 0.0
    cancelled_s: float = 0.0
    batches: int = 0
    trainer_waited_s: float = 0.0
    most_groups: int = 0

    @property
    def cancelled_share(self) -> float:
        return self.cancelled_s / max(1e-9, self.finished_s + self.cancelled_s)


@dataclass(frozen=True, kw_only=True)
class Setting:
    num_envs: int = 4
    workers: int = 16
    group_size: int = 8
    batch_size: int = 64
    max_batches_offpolicy: int = 3
    seconds: float = 60.0

    @property
    def places(self) -> int:
        return self.max_batches_offpolicy * self.batch_size // self.group_size


Policy = Callable[[Setting, int, int], tuple[int, int]]
"""(setting, groups queued, groups in flight) -> (how many may be in flight, how many of the running to cancel)."""


def cancel_policy(setting: Setting, queued: int, running: int) -> tuple[int, int]:
    if queued >= setting.places:
        return 0, running
    allowed = min(setting.workers, setting.places - queued)
    return allowed, max(0, running - allowed)


def budget_policy(setting: Setting, queued: int, running: int) -> tuple[int, int]:
    limits = BudgetLimits(
        group_size=setting.group_size,
        batch_size=setting.batch_size,
        max_num_workers=setting.workers,
        max_batches_offpolicy=setting.max_batches_offpolicy,
    )
    status = QueueStatus(queue_size=queued, env_weight=1.0 / setting.num_envs)
    return allowed_workers(limits, status), 0


def simulate(policy: Policy, setting: Setting, seed: int) -> Outcome:
    """One run of ``setting.seconds`` virtual seconds."""
    rng = random.Random(seed)
    outcome = Outcome()
    envs = [Environment() for _ in range(setting.num_envs)]
    groups_per_batch = setting.batch_size // setting.group_size
    queued = 0
    next_batch_at = TRAINER_S
    # The environments look one after the other, each with its own phase, as separate processes do.
    looks = [(rng.uniform(0, TICK_S), index) for index in range(setting.num_envs)]
    heapq.heapify(looks)
    while looks[0][0] < setting.seconds:
        now, index = heapq.heappop(looks)
        for env in envs:
            ended = [group for group in env.running if group[1] <= now]
            env.running = [group for group in env.running if group[1] > now]
            queued += len(ended)
            outcome.finished_s += sum(end - start for start, end in ended)
        if now >= next_batch_at and queued >= groups_per_batch:
            outcome.trainer_waited_s += now - next_batch_at
            queued -= groups_per_batch
            outcome.batches += 1
            next_batch_at = now + TRAINER_S
        env = envs[index]
        allowed, cancel = policy(setting, queued, len(env.running))
        outcome.cancelled_s += sum(now - start for start, _ in env.running[:cancel])
        env.running = env.running[cancel:]
        while len(env.running) < allowed:
            env.running.append((now, now + rng.uniform(1.0, 8.0)))
        outcome.most_groups = max(outcome.most_groups, queued + sum(len(other.running) for other in envs))
        heapq.heappush(looks, (now + TICK_S, index))
    return outcome


POLICIES: dict[str, Policy] = {"cancel": cancel_policy, "budget": budget_policy}
SETTINGS = {
    "1 env": Setting(num_envs=1),
    "2 envs": Setting(num_envs=2),
    "4 envs": Setting(num_envs=4),
    "4 envs, 8 workers": Setting(num_envs=4, workers=8),
    "4 envs, 32 workers, group 4": Setting(
        num_envs=4, workers=32, group_size=4, batch_size=32, max_batches_offpolicy=2, seconds=90.0
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs to average over")
    arguments = parser.parse_args()
    print(
        f"{'setting':<30} {'policy':<8} {'cancelled':>10} {'batches':>8} {'trainer waited':>15} {'most batches ahead':>19}"
    )
    for name, setting in SETTINGS.items():
        for policy_name, policy in POLICIES.items():
            runs = [simulate(policy, setting, seed) for seed in range(arguments.seeds)]
            n = len(runs)
            print(
                f"{name:<30} {policy_name:<8} {100 * sum(r.cancelled_share for r in runs) / n:>9.1f}% "
                f"{sum(r.batches for r in runs) / n:>8.1f} {sum(r.trainer_waited_s for r in runs) / n:>13.1f} s "
                f"{max(r.most_groups for r in runs) * setting.group_size / setting.batch_size:>19.1f}"
            )


if __name__ == "__main__":
    main()
