"""The environments that feed the rollout server: names, weights, who is alive.

An environment is alive while it is connected and was heard from (status, heartbeat, data) within the time-out; one that is not
stops counting, including its minimum allocation. It is back, under its id and name, as soon as it speaks again or registers
with the same desired name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from atroposlib.api.batching import PartialGroups
from atroposlib.api.events import EnvRegistered

MIN_ENV_WEIGHT = 0.01
"""No environment's share falls below this."""


@dataclass(kw_only=True, slots=True)
class Environment:
    """One registered environment."""

    env_id: int
    desired_name: str
    wandb_name: str
    max_token_length: int
    weight: float
    group_size: int
    min_batch_allocation: float | None
    last_seen: float
    pieces: PartialGroups
    connected: bool = True
    largest_group: int = 0
    """Sequences in the largest group it ever queued."""
    num_groups: int = 0
    num_tokens: int = 0
    last_group: float | None = None

    @property
    def share(self) -> float:
        """What it weighs before normalisation; a weight of zero or less counts as nothing."""
        return max(0, self.max_token_length) * max(0.0, self.weight)


class Environments:
    """All environments ever registered, by id (0, 1, 2, ...)."""

    def __init__(self, *, timeout_s: float, clock: Callable[[], float]) -> None:
        self.timeout_s = timeout_s
        self.clock = clock
        self.all: list[Environment] = []

    def get(self, env_id: int | None) -> Environment | None:
        """The environment with this id, if there is one."""
        return self.all[env_id] if env_id is not None and 0 <= env_id < len(self.all) else None

    def touch(self, env_id: int | None) -> Environment | None:
        """It spoke: it is alive (again)."""
        env = self.get(env_id)
        if env is not None:
            env.last_seen = self.clock()
            env.connected = True
        return env

    def is_alive(self, env: Environment) -> bool:
        return env.connected and self.clock() - env.last_seen <= self.timeout_s

    def alive(self) -> Iterator[Environment]:
        return (env for env in self.all if self.is_alive(env))

    def plan(self, desired_name: str | None) -> tuple[int, str, str]:
        """Id, desired name and full name for one that registers now: those of the first of that name that is gone, or new ones."""
        desired = desired_name or "env"
        same = [env for env in self.all if env.desired_name == desired]
        for env in same:
            if not self.is_alive(env):
                return env.env_id, desired, env.wandb_name
        return len(self.all), desired, f"{desired}_{len(same)}"

    def apply(self, event: EnvRegistered) -> Environment:
        """It registered. What it had sent in pieces stays."""
        known = self.get(event.env_id)
        env = Environment(
            env_id=event.env_id,
            desired_name=event.desired_name,
            wandb_name=event.wandb_name,
            max_token_length=event.max_token_length,
            weight=event.weight,
            group_size=event.group_size,
            min_batch_allocation=event.min_batch_allocation,
            last_seen=self.clock(),
            pieces=PartialGroups(event.group_size),
        )
        if known is None:
            self.all.append(env)
            return env
        env.largest_group, env.num_groups, env.num_tokens = known.largest_group, known.num_groups, known.num_tokens
        env.last_group = known.last_group
        if known.group_size == env.group_size:
            env.pieces = known.pieces
        self.all[event.env_id] = env
        return env

    def minimums(self) -> dict[int, float]:
        """The minimum allocations that count now."""
        return {env.env_id: env.min_batch_allocation for env in self.alive() if env.min_batch_allocation is not None}

    def weight_of(self, env: Environment) -> float:
        """Its share of the batch among those alive."""
        others = list(self.alive())
        total = sum(other.share for other in others)
        if total <= 0:
            return 1.0 / max(1, len(others))
        return max(MIN_ENV_WEIGHT, env.share / total)

    def unallocated_fraction(self) -> float:
        """What the minimum allocations leave free."""
        return 1.0 - min(1.0, sum(self.minimums().values()))
