"""Four environments on one rollout server: ours throws no work away, the published rule most of it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "worker_budget_simulation.py"
    spec = importlib.util.spec_from_file_location("worker_budget_simulation", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("num_envs", [2, 4])
def test_no_work_is_thrown_away_and_the_trainer_gets_as_many_batches(simulation: ModuleType, num_envs: int):
    setting = simulation.Setting(num_envs=num_envs)
    old = simulation.simulate(simulation.cancel_policy, setting, seed=1)
    new = simulation.simulate(simulation.budget_policy, setting, seed=1)
    assert old.cancelled_share > 0.4
    assert new.cancelled_share < 0.03
    assert new.batches == old.batches == 14
    bound = setting.max_batches_offpolicy * setting.batch_size // setting.group_size
    assert new.most_groups <= 1.3 * bound
    assert old.most_groups > 1.5 * bound
