"""Runs in processes of their own: killed and resumed, one and two processes, sharded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).parent / "process_run.py"
LAYOUT = {"train/row_tokens", "train/tokens_per_s"}


@pytest.fixture
def launch(tmp_path: Path, tiny_tokenizer_dir: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the script with config ``options``; ``processes`` > 1 goes through torchrun."""

    def start(
        name: str,
        *,
        processes: int = 1,
        here: bool = False,
        extra: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> Any:
        config: dict[str, Any] = {
            "output_dir": str(tmp_path / name),
            "per_device_train_batch_size": 8 // processes,
            "num_generations": 4,
            "max_completion_length": 6,
            "max_steps": 5,
            "beta": 0.04,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        }
        settings = tmp_path / f"{name}.json"
        settings.write_text(json.dumps({"config": config, "tokenizer": str(tiny_tokenizer_dir), **(extra or {})}))
        if here:
            return run_here(settings)
        command = [sys.executable, str(SCRIPT), str(settings)]
        if processes > 1:
            command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
        return subprocess.run(command, env=variables, text=True, capture_output=True, timeout=280, check=False)

    return start


def run_here(settings: Path) -> subprocess.CompletedProcess[str]:
    """The same run in the test's own process, which has torch loaded already."""
    was = torch.are_deterministic_algorithms_enabled()
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import process_run

        process_run.main(str(settings))
    finally:
        sys.path.remove(str(SCRIPT.parent))
        torch.use_deterministic_algorithms(was)
    return subprocess.CompletedProcess([], 0, "", "")


def metrics(tmp_path: Path, name: str) -> list[dict[str, float]]:
    """What the steps say about rollouts and the update; times and the layout in memory depend on the number of processes."""
    lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not key.startswith("time") and key not in LAYOUT}
        for line in lines
    ]


def weights(tmp_path: Path, name: str) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(tmp_path / name / "weights.pt")
    return loaded


def succeeded(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


DETERMINISTIC = {
    "deterministic": True,
    "save_strategy": "steps",
    "save_steps": 1,
    "num_iterations": 2,
    "gradient_accumulation_steps": 1,
}


def check_resumed(tmp_path: Path) -> None:
    first, second = weights(tmp_path, "straight"), weights(tmp_path, "broken")
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    steps = [json.loads(line)["step"] for line in (tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]


def test_killed_and_resumed_equals_uninterrupted_to_the_bit(launch: Any, tmp_path: Path) -> None:
    launch("straight", here=True, **DETERMINISTIC)
    # SIGKILL in the middle of the iterations on one batch
    assert launch("broken", extra={"kill_at": 3}, **DETERMINISTIC).returncode == -signal.SIGKILL
    launch("broken", here=True, extra={"resume": True}, **DETERMINISTIC)
    check_resumed(tmp_path)


@pytest.mark.slow
def test_killed_while_writing_a_checkpoint(launch: Any, tmp_path: Path) -> None:
    succeeded(launch("straight", **DETERMINISTIC))
    assert launch("broken", extra={"kill_at": 2}, **DETERMINISTIC).returncode == -signal.SIGKILL
    assert (
        launch("broken", extra={"resume": True, "kill_while_saving": 4}, **DETERMINISTIC).returncode == -signal.SIGKILL
    )
    succeeded(launch("broken", extra={"resume": True}, **DETERMINISTIC))
    check_resumed(tmp_path)


def test_sigterm_saves_and_leaves(launch: Any, tmp_path: Path) -> None:
    result = launch(
        "stopped",
        here=True,
        extra={"kill_at": 2, "signal": int(signal.SIGTERM)},
        max_steps=50,
        save_strategy="steps",
        save_steps=40,
    )
    succeeded(result)
    # the signal arrives at the end of step 2; the step in progress is finished and saved
    state = json.loads((tmp_path / "stopped" / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["global_step"] == 3


@pytest.mark.slow
def test_two_processes_stopped_between_the_iterations_on_a_batch(launch: Any, tmp_path: Path) -> None:
    # with a correction for the sampler the ratio needs each process's log-probs from before the first iteration
    options = {**DETERMINISTIC, "importance_correction": "tis"}
    succeeded(launch("straight", processes=2, **options))
    stopped = launch("broken", processes=2, extra={"kill_at": 2, "signal": int(signal.SIGTERM)}, **options)
    succeeded(stopped)
    assert stopped.stderr.count("stopping on request after step 3") == 1
    assert (tmp_path / "broken" / "checkpoint-3").is_dir()
    assert not (tmp_path / "broken" / "checkpoint-4").exists()
    succeeded(launch("broken", processes=2, extra={"resume": True}, **options))
    check_resumed(tmp_path)


def test_a_batch_begun_by_two_processes_is_finished_by_one(launch: Any, tmp_path: Path) -> None:
    options = {
        "num_iterations": 2,
        "gradient_accumulation_steps": 1,
        "importance_correction": "tis",
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "save_strategy": "steps",
        "save_steps": 3,
    }
    launch("straight", here=True, max_steps=4, **options)
    succeeded(launch("begun", processes=2, max_steps=3, **options))
    launch("begun", here=True, extra={"resume": True}, max_steps=4, **options)
    *_, alone = metrics(tmp_path, "straight")
    *_, together = metrics(tmp_path, "begun")
    del together["train/skipped_share"]  # of the layout, which is made once for both iterations
    assert alone["policy/clip_low_share"] > 0
    assert together == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
def test_a_killed_process_ends_the_others(launch: Any) -> None:
    result = launch("killed", processes=3, extra={"kill_at": 2, "kill_rank": 1}, per_device_train_batch_size=4)
    assert result.returncode == 1
    assert result.stderr.count("by peer") >= 2
    assert "exitcode  : -9" in result.stderr


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_processes_equal_one(accumulation: int, launch: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "extra": {"reward": "reward_but_last_row"},  # a prompt of the second process
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_grad_norm": 0.0,
        "max_steps": 2,
        "gradient_accumulation_steps": accumulation,
    }
    succeeded(launch("one", here=True, **options))
    succeeded(launch("two", processes=2, **options))
    alone, together = metrics(tmp_path, "one"), metrics(tmp_path, "two")
    assert sum(line["rewards/reward_but_last_row_failed"] for line in alone) == 4
    assert together == [pytest.approx(line, abs=1e-5) for line in alone]
    first, second = weights(tmp_path, "one"), weights(tmp_path, "two")
    for name, value in first.items():
        torch.testing.assert_close(
            second[name], value, rtol=0, atol=3e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


@pytest.mark.parametrize(
    ("lora", "sampling"),
    [(False, {}), (True, {"sampler": "transformers", "num_generations": 8})],
    ids=["all weights", "adapter, one prompt sampled on the shards of two"],
)
def test_sharded_over_two_processes_equals_one(
    lora: bool, sampling: dict[str, Any], launch: Any, tmp_path: Path
) -> None:
    # 7 samples, so 3 and 4: with at most 3 in a backward pass one process has one piece, the other two
    options: dict[str, Any] = {
        "extra": {"reward": "reward_but_one", "rows": 2, "lora": lora},
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_grad_norm": 0.5,  # clips
        "max_steps": 2,
        "backprop_accumulation_micro_batch_size": 3,
        **sampling,
    }
    succeeded(launch("one", here=True, **options))
    succeeded(launch("sharded", processes=2, environment=FSDP, **options))
    assert metrics(tmp_path, "sharded") == [pytest.approx(line, abs=1e-5) for line in metrics(tmp_path, "one")]
    first, second = weights(tmp_path, "one"), weights(tmp_path, "sharded")
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(
            second[name], value, rtol=0, atol=3e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_two_groups_sharded_over_three_processes_equal_one(launch: Any, tmp_path: Path) -> None:
    # one process has no group, one only a group whose reward fails; checkpoints would be made of shards
    environment = {**FSDP, "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    options = {
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "max_steps": 1,
        "num_generations": 6,
    }
    extra = {"reward": "reward_but_second_row", "rows": 2}
    launch("one", here=True, extra=extra, per_device_train_batch_size=12, **options)
    extra["final_model"] = str(tmp_path / "final")
    succeeded(
        launch("three", processes=3, environment=environment, extra=extra, per_device_train_batch_size=4, **options)
    )
    alone, together = metrics(tmp_path, "one"), metrics(tmp_path, "three")
    assert [line["rewards/reward_but_second_row_failed"] for line in alone] == [6]
    assert together == [pytest.approx(line, abs=1e-5) for line in alone]
    final = load_file(tmp_path / "final" / "model.safetensors")
    for name, value in weights(tmp_path, "one").items():
        torch.testing.assert_close(final[name], value, rtol=0, atol=3e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_supervised_evaluation_is_shared_out(launch: Any, tmp_path: Path) -> None:
    options = {"beta": 0.0, "max_steps": 1, "lr_scheduler_type": "constant", "per_device_eval_batch_size": 1}
    extra = {"sft": True, "rows": 3}
    launch("one", here=True, extra=extra, **options)
    succeeded(launch("two", processes=2, environment=FSDP, extra=extra, **options))
    alone, together = (json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("one", "two"))
    assert alone.pop("rows") == [[1, 1, 1]]
    # the first process has one row, and a blank one while the second needs its shards
    assert together.pop("rows") == [[1, 1], [1, 1]]
    assert together == pytest.approx(alone, abs=1e-5)


def test_a_batch_that_trains_nothing_keeps_processes_and_checkpointing_in_step(launch: Any, tmp_path: Path) -> None:
    # every completion of the untrained model is cut by the length limit: no process has anything to train
    options = {"gradient_checkpointing": True, "mask_truncated_completions": True, "beta": 0.0, "max_steps": 2}
    succeeded(launch("nothing", processes=2, weight_decay=0.0, **options))
    lines = [json.loads(line) for line in (tmp_path / "nothing" / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/num_trained_tokens"] for line in lines] == [0.0, 0.0]
