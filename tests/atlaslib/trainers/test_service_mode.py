"""Training from the rollout server, with environments that sample from the live weights."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from metric_lines import read_metrics
from transformers import TrainerCallback

from atlaslib.generation.replica import whole_copy
from atlaslib.trainers import GRPOTrainer
from atroposlib.testing.api import serve_api


class StopAtEnd(TrainerCallback):
    """Ends the environment before the policy server goes away."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._environment.stopping.set()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_learns_from_environments(
    seed: int, small_model: Any, make_config: Any, tiny_tokenizer: Any, letter_environment: Any
) -> None:
    with serve_api() as api:
        config = make_config(
            rollout_server_url=api.url, policy_server_port=0, max_steps=30, seed=seed, rollout_wait_timeout_s=60
        )
        trainer = GRPOTrainer(small_model(seed), args=config, processing_class=tiny_tokenizer)
        environment = letter_environment(api.url, lambda: trainer.sampler_host.policy_server_url, tiny_tokenizer)
        trainer.add_callback(StopAtEnd(environment))
        trainer.train()
    assert environment.error is None
    metrics = read_metrics(config.output_dir)
    assert [line["step"] for line in metrics] == list(range(1, 31))
    first = statistics.fmean(line["reward"] for line in metrics[:3])
    last = statistics.fmean(line["reward"] for line in metrics[-3:])
    assert last - first > 0.3, (first, last)
    assert max(line["rollout/staleness_max"] for line in metrics) <= config.staleness_bound
    assert all(line["rollout/num_unversioned"] == 0 for line in metrics)


def test_the_copy_of_a_sharded_policy_is_served_at_the_present_weights(
    small_model: Any, make_config: Any, tiny_tokenizer: Any, letter_environment: Any
) -> None:
    with serve_api() as api:
        config = make_config(
            rollout_server_url=api.url, policy_server_port=0, max_steps=4, max_staleness=1, rollout_wait_timeout_s=20
        )
        trainer = GRPOTrainer(small_model(0), args=config, processing_class=tiny_tokenizer)
        trainer.sampler_host._replica = whole_copy(trainer.model)  # as with FSDP
        environment = letter_environment(api.url, lambda: trainer.sampler_host.policy_server_url, tiny_tokenizer)
        trainer.add_callback(StopAtEnd(environment))
        trainer.train()
    assert [line["step"] for line in read_metrics(config.output_dir)] == [1, 2, 3, 4]
    copied = zip(trainer.sampler_host._replica.parameters(), trainer.model.parameters(), strict=True)
    assert all(bool((copy == own).all()) for copy, own in copied)
