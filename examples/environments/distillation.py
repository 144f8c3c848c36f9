"""Distillation: the arithmetic environment, with a teacher's log-probs on every token the student sampled.

    python examples/environments/distillation.py serve --teacher.base_url http://localhost:9002/v1 --teacher.model_name big-model

Any environment becomes one with a teacher by adding ``TeacherDistillationEnv`` to its bases. Teacher and student must
share a tokenizer. The trainer reads ``distill_token_ids`` and ``distill_logprobs`` of each group.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the neighbour below, however this file is started

from arithmetic import ArithmeticConfig, ArithmeticEnv

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.teacher_distillation_env import TeacherDistillationConfig, TeacherDistillationEnv


class DistillationConfig(ArithmeticConfig, TeacherDistillationConfig):
    """Arithmetic's settings and the teacher's."""


class DistillationEnv(ArithmeticEnv, TeacherDistillationEnv):
    """Arithmetic with a teacher."""

    name = "distillation"
    env_config_cls = DistillationConfig

    @classmethod
    def config_init(cls) -> tuple[DistillationConfig, list[APIServerConfig]]:
        config = DistillationConfig(
            group_size=4, max_token_length=256, use_wandb=False, teacher_enabled=True, teacher_top_k=8
        )
        return config, [APIServerConfig(model_name="default", base_url="http://localhost:9004/v1", server_type="vllm")]


if __name__ == "__main__":
    DistillationEnv.cli()
