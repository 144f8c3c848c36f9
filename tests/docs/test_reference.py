"""The reference pages are what the code says, and every metric of a run is written down."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from atlaslib.models.tiny import tiny_llama
from atlaslib.trainers.grpo import GRPOTrainer
from atlaslib.trainers.grpo_config import GRPOConfig
from atlaslib.trainers.metric_names import describe_metric

ROOT = Path(__file__).resolve().parents[2]


def test_reference_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/reference/generate.py"), "--check"],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stderr


def test_every_metric_of_a_run_is_described(tmp_path: Path, tiny_tokenizer: Any) -> None:
    config = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        max_steps=1,
        beta=0.02,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"prompt": "a"}] * 4
    GRPOTrainer(
        tiny_llama(),
        lambda completions, **_: [len(c) for c in completions],
        config,
        rows,
        processing_class=tiny_tokenizer,
    ).train()
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert [name for name in line if name not in {"step", "time"} and describe_metric(name) is None] == []


def test_environments_ask_where_the_engine_listens() -> None:
    from atlaslib.cli.engine import build_parser

    files = [*(ROOT / "examples/environments").glob("*.py"), ROOT / "src/atroposlib/cli/templates/environment.py.txt"]
    ports = {
        (file.name, int(port))
        for file in files
        for port in re.findall(r'config, \[APIServerConfig\(.*base_url="http://localhost:(\d+)/v1"', file.read_text())
    }
    assert len(ports) > 5
    assert {port for _, port in ports} == {build_parser().parse_args(["model"]).port}
