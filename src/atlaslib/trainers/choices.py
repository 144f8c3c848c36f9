"""What the config's names mean for the algorithm: loss options, advantage estimator, reward scaling."""

from __future__ import annotations

from typing import Any, cast

from atlaslib.algorithms.advantages import Estimator, ScaleRewards
from atlaslib.algorithms.losses import LossOptions
from atlaslib.trainers.grpo_config import GRPOConfig


def default_config(model: Any) -> GRPOConfig:
    """``GRPOConfig`` for a trainer that was given none."""
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "") or "model"
    return GRPOConfig(output_dir=f"{name.rstrip('/').split('/')[-1]}-GRPO")


def loss_options(config: GRPOConfig) -> LossOptions:
    """The loss's options from the config."""
    return LossOptions(
        loss_type=cast(Any, config.loss_type),
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        delta=config.delta,
        beta=config.beta,
        kl_estimator=cast(Any, config.kl_estimator),
        entropy_coef=config.entropy_coef,
        importance_correction=cast(Any, config.importance_correction),
        importance_cap=config.importance_correction_cap,
        importance_level=cast(Any, config.importance_correction_level),
        max_completion_length=config.completion_limit,
        distill_coef=config.distill_coef,
    )


def estimator_of(config: GRPOConfig) -> Estimator:
    """Which advantage the loss type asks for."""
    if config.loss_type == "rloo":
        return "rloo"
    return "batch" if config.loss_type == "reinforce++" else "group"


def scale_of(config: GRPOConfig) -> ScaleRewards:
    """``scale_rewards``, or what the loss type prescribes."""
    if config.scale_rewards is not None:
        return cast(ScaleRewards, config.scale_rewards)
    return "none" if config.loss_type == "dr_grpo" else "group"
