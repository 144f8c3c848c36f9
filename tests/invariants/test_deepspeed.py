"""With a real DeepSpeed: its configuration is accepted, and a sharded run equals one process. `make deepspeed` installs it and runs this."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from atlaslib.models.tiny import tiny_llama

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "process_run.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def python() -> str:
    if find_spec("deepspeed") is not None:
        return sys.executable
    named = os.environ.get("ATROPOS_DEEPSPEED", str(ROOT / ".cache" / "deepspeed-venv" / "bin" / "python"))
    if not Path(named).exists():
        pytest.skip("no DeepSpeed: the package deepspeed is not installed (`make deepspeed` does it)")
    return named


def run(python: str, name: str, folder: Path, tokenizer: Path, *, processes: int, **options: Any) -> dict[str, Any]:
    """Final weights and metrics of a run of two steps."""
    extra = options.pop("extra", {})
    config = {
        "output_dir": str(folder / name), "per_device_train_batch_size": 8 // processes, "num_generations": 4, "max_completion_length": 6,
        "max_steps": 2, "beta": 0.04, "learning_rate": 0.5, "optim": "sgd", "max_grad_norm": 0.0, "report_to": "none", "save_strategy": "no",
        "sync_ref_model": True, "ref_model_sync_steps": 1, "use_cpu": True, "disable_tqdm": True, **options,
    }  # fmt: skip
    settings = folder / f"{name}.json"
    settings.write_text(json.dumps({"config": config, "tokenizer": str(tokenizer), **extra}))
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", str(SCRIPT), str(settings)]  # fmt: skip
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=variables, text=True, capture_output=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return {"weights": torch.load(folder / name / "weights.pt"), "metrics": lines}


@pytest.fixture(scope="module")
def plain(python: str, tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> dict[str, Any]:
    return run(python, "plain", tmp_path_factory.mktemp("plain"), tiny_tokenizer_dir, processes=1)


ZERO = {
    "zero_allow_untested_optimizer": True, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto", "gradient_clipping": "auto",
}  # fmt: skip


@pytest.mark.parametrize(
    "cut", [{"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, {"backprop_accumulation_steps": 2}]
)
def test_a_step_in_parts_equals_the_step(
    cut: dict[str, int], python: str, plain: dict[str, Any], tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    zero = {"zero_optimization": {"stage": 2}, **ZERO}
    found = run(python, "parts", tmp_path, tiny_tokenizer_dir, processes=2, deepspeed=zero, **cut)
    for name, value in plain["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lora", [False, True], ids=["all-weights", "adapter"])
def test_processes_with_unequal_shares_stay_in_step(
    lora: bool, python: str, tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    # one prompt for two processes that generate on their shards; of 7 samples one process trains 3 in one piece, the other 4 in two
    zero = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, **ZERO}
    options: dict[str, Any] = {
        "num_generations": 8, "backprop_accumulation_micro_batch_size": 3, "sync_ref_model": False, "sampler": "transformers",
        "extra": {"reward": "reward_but_one", "rows": 2, "lora": lora},
    }  # fmt: skip
    alone = run(python, "alone", tmp_path, tiny_tokenizer_dir, processes=1, **options)
    sharded = {"deepspeed": zero, "ds3_gather_for_generation": False}
    found = run(python, "sharded", tmp_path, tiny_tokenizer_dir, processes=2, **options, **sharded)
    for name, value in alone["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("stage", "gather", "by_name"),
    [(2, True, False), (3, True, False), (3, True, True), (3, False, False)],
    ids=["zero2", "zero3", "zero3-loaded-by-name", "zero3-generating-on-shards"],
)
def test_two_sharded_processes_equal_one(
    stage: int,
    gather: bool,
    by_name: bool,
    python: str,
    plain: dict[str, Any],
    tmp_path: Path,
    tiny_tokenizer_dir: Path,
) -> None:
    # without the threshold, parameters as small as these stay whole
    zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **ZERO}
    if by_name:
        tokenizer = AutoTokenizer.from_pretrained(str(tiny_tokenizer_dir))
        model = tiny_llama(len(tokenizer), hidden=32, seed=1, eos_token_id=tokenizer.eos_token_id)
        model.save_pretrained(str(tmp_path / "model"))
    found = run(
        python, "sharded", tmp_path, tiny_tokenizer_dir, processes=2, deepspeed=zero, ds3_gather_for_generation=gather,
        extra={"model": str(tmp_path / "model")} if by_name else {},
    )  # fmt: skip
    assert [line["step"] for line in found["metrics"]] == [1, 2]
    assert all(line["policy/mismatch_abs"] < 1e-4 for line in found["metrics"])
    if gather:  # transformers' generate draws from one random stream, so its completions are others
        for name, value in plain["weights"].items():
            torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-5)
