"""Reward functions: score completions, by name from the registry, one by one or combined.

    from atroposlib.envs.reward_fns import registry
    reward = registry.create({"type": "accuracy", "weight": 2.0})
    reward(completions, solution=["\\boxed{4}", "\\boxed{5}"])     # [2.0, 0.0]

A completion whose reward could not be computed is ``None`` in the result, never 0.0; when all of them fail the call
raises ``RewardComputationError``.
"""

from atroposlib.envs.reward_fns.combined_reward import CombinedReward
from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

__all__ = ["CombinedReward", "RewardFunction", "registry"]
