"""Positions in service mode: what is acknowledged, committed with a checkpoint, and asked for after a restart."""

from __future__ import annotations

import json
import statistics
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atlaslib.errors import RolloutTimeoutError
from atlaslib.trainers import GRPOTrainer


class RecordedBatches:
    """A client with prepared batches that writes down what the trainer tells it."""

    def __init__(self, batches: int, on_empty: Callable[[], None] = lambda: None) -> None:
        self._left = list(range(1, batches + 1))
        self._on_empty = on_empty
        self.registered: dict[str, Any] = {}
        self.acked: list[int] = []
        self.committed: list[tuple[int, int]] = []
        self.reports: list[tuple[str, int]] = []

    def register(self, **settings: Any) -> int:
        self.registered = settings
        self._left = [number for number in self._left if number > (settings["resume_after"] or 0)]
        return 1

    def next_batch(self, *, timeout_s: float | None = None) -> Any:
        if not self._left:
            self._on_empty()
            return None
        number = self._left.pop(0)
        tokens = [[5, 6, 10 + number, 20 + i] for i in range(4)]
        group = {
            "tokens": tokens, "masks": [[-100, -100, *row[2:]] for row in tokens], "scores": [0.0, 1.0, 0.5, float(number % 2)],
            "policy_versions": [[number - 1]] * 4, "group_id": f"g{number}", "reward_components": {"style": [1.0, 2.0, 3.0, 4.0]},
        }  # fmt: skip
        return SimpleNamespace(seq=number, groups=[group], group_ids=[f"g{number}"])

    def ack(self, seq: int) -> None:
        self.acked.append(seq)

    def commit(self, seq: int, step: int) -> None:
        self.committed.append((seq, step))

    def status(self) -> dict[str, Any]:
        return {"queue_size": 0}

    def report(self, source: str, step: int, metrics: dict[str, float]) -> None:
        self.reports.append((source, step))

    def close(self) -> None:
        pass


def make_trainer(
    client: RecordedBatches, small_model: Any, make_config: Any, tokenizer: Any, **options: Any
) -> GRPOTrainer:
    config = make_config(
        **{
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_steps": 4,
            "save_strategy": "steps",
            "save_steps": 2,
            **options,
        }
    )
    return GRPOTrainer(small_model(), args=config, processing_class=tokenizer, rollout_client=client)


def test_commits_with_checkpoints_and_resumes_after_them(
    small_model: Any, make_config: Any, tiny_tokenizer: Any
) -> None:
    client = RecordedBatches(4)
    make_trainer(client, small_model, make_config, tiny_tokenizer).train()
    assert client.registered["batch_size"] == 4
    assert client.registered["resume_after"] is None
    assert client.acked == [1, 2, 3, 4]
    assert client.committed == [(2, 2), (4, 4)]
    assert client.reports == [("trainer", step) for step in (1, 2, 3, 4)]
    again = RecordedBatches(6)
    trainer = make_trainer(again, small_model, make_config, tiny_tokenizer, max_steps=6)
    trainer.train(resume_from_checkpoint=True)
    assert (again.registered["resume_after"], again.registered["starting_step"]) == (4, 4)
    assert again.acked == [5, 6]
    lines = [json.loads(line) for line in (Path(trainer.config.output_dir) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["rewards/style"] == 2.5
    assert lines[-1]["rollout/staleness_max"] == 0.0


def test_a_stop_while_waiting_saves_and_leaves(small_model: Any, make_config: Any, tiny_tokenizer: Any) -> None:
    trainers: list[GRPOTrainer] = []
    client = RecordedBatches(1, on_empty=lambda: setattr(trainers[0].stop_signal, "requested", True))
    trainers.append(make_trainer(client, small_model, make_config, tiny_tokenizer, save_steps=100))
    trainers[0].train()
    assert trainers[0].state.global_step == 1
    assert (Path(trainers[0].config.output_dir) / "checkpoint-1" / "trainer_state.json").is_file()
    assert client.committed == [(1, 1)]


def test_no_batch_in_time_is_an_error(small_model: Any, make_config: Any, tiny_tokenizer: Any) -> None:
    trainer = make_trainer(RecordedBatches(0), small_model, make_config, tiny_tokenizer, rollout_wait_timeout_s=0.1)
    with pytest.raises(RolloutTimeoutError, match="no batch within"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scale_rewards": "batch"}, [-0.5, 0.5, -4.5, 4.5]),
        ({"loss_type": "reinforce++"}, [-2.75, -1.75, -2.25, 6.75]),
    ],
    ids=["scale_rewards", "reinforce++"],
)
def test_advantages_of_the_batch_see_all_its_groups(
    options: dict[str, Any], expected: list[float], small_model: Any, make_config: Any, tiny_tokenizer: Any
) -> None:
    client = RecordedBatches(1)
    batch = client.next_batch()
    (group,) = batch.groups
    halves = [{**group, "tokens": group["tokens"][:2], "masks": group["masks"][:2], "policy_versions": None}] * 2
    scores = ([0.0, 1.0], [0.5, 9.5])
    batch.groups = [
        {**half, "scores": row, "group_id": name} for half, row, name in zip(halves, scores, "ab", strict=True)
    ]
    client.next_batch = lambda **_: batch  # type: ignore[method-assign]
    trainer = make_trainer(client, small_model, make_config, tiny_tokenizer, max_steps=1, save_strategy="no", **options)
    trainer.train()
    spread = statistics.stdev([0.0, 1.0, 0.5, 9.5])
    found = [sample.advantages[-1] * (spread + 1e-4) for sample in trainer.step_samples]
    assert found == pytest.approx(expected)


def test_what_the_rollout_server_is_told(small_model: Any, make_config: Any, tiny_tokenizer: Any) -> None:
    client = RecordedBatches(4)
    options = {"rollout_batch_size": 8, "rollout_max_token_len": 77, "save_steps": 0.5, "run_name": "this"}
    make_trainer(client, small_model, make_config, tiny_tokenizer, **options).train()
    told = {name: client.registered[name] for name in ("batch_size", "max_token_len", "num_steps", "wandb_group")}
    assert told == {"batch_size": 8, "max_token_len": 77, "num_steps": 4, "wandb_group": "this"}
    assert client.registered["save_checkpoint_interval"] == 2  # half of the steps
    assert client.committed == [(2, 2), (4, 4)]


def test_the_policy_server_listens_where_and_as_what_it_is_told(
    small_model: Any, make_config: Any, tiny_tokenizer: Any
) -> None:
    trainers: list[GRPOTrainer] = []
    served: list[str] = []

    def look() -> None:
        with urllib.request.urlopen(f"{trainers[0].sampler_host.policy_server_url}/v1/models") as reply:
            served.append(json.load(reply)["data"][0]["id"])
        trainers[0].stop_signal.requested = True

    options = {"policy_server_port": 0, "policy_server_host": "127.0.0.2", "policy_model_name": "mine"}
    client = RecordedBatches(0, on_empty=look)
    trainers.append(make_trainer(client, small_model, make_config, tiny_tokenizer, save_strategy="no", **options))
    trainers[0].train()
    assert served == ["mine"]
