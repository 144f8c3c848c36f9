"""Rollout server, inference endpoint, two environments and a trainer client, all real, over HTTP.

The rollout server is killed in the middle and started again; the environments and the trainer go on, and what the
trainer gets is complete, in order and without repetition.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atroposlib.api.client import TrainerClient
from atroposlib.testing.harness_server import HarnessServer
from atroposlib.utils.tokenizers.loading import load_tokenizer
from tests.rollout_process import ServerProcess

NUM_STEPS = 20
SCRIPT = Path(__file__).with_name("question_env.py")


@contextmanager
def environment(folder: Path, name: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """One environment in its own process, ended with the block."""
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "serve", "--env.wandb_name", name, *flags],
            stdout=out,
            stderr=out,
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def texts_of(batch: Any, tokenizer: Any) -> list[str]:
    return [tokenizer.decode([int(token) for token in group["tokens"][0]]).split("\n")[1] for group in batch.groups]


def test_twenty_steps_over_a_killed_rollout_server(tiny_tokenizer_dir: Path, tmp_path: Path):
    tokenizer = load_tokenizer(str(tiny_tokenizer_dir))
    server = ServerProcess(tmp_path, "--data-dir", str(tmp_path / "journal"))
    endpoint = HarnessServer(tokenizer=tokenizer, policy_versions=[7])
    flags = (
        *("--env.rollout_server_url", server.url, "--env.tokenizer_name", str(tiny_tokenizer_dir)),
        *("--openai.tokenizer_name", str(tiny_tokenizer_dir), "--env.total_steps", "-1", "--slurm", "false"),
    )
    with endpoint, server:
        flags = (*flags, "--openai.base_url", endpoint.base_url)
        trainer = TrainerClient(server.url)
        trainer.register(
            batch_size=16,
            max_token_len=256,
            num_steps=NUM_STEPS,
            checkpoint_dir=str(tmp_path / "checkpoints"),
            save_checkpoint_interval=5,
            wandb_group="g",
            wandb_project="p",
        )
        trainer.next_batch(timeout_s=0.0)
        with (
            environment(tmp_path, "alpha", "--env.group_size", "4", *flags) as alpha,
            environment(tmp_path, "beta", "--env.group_size=8", *flags) as beta,
        ):
            batches = []
            for step in range(1, NUM_STEPS + 1):
                batch = trainer.next_batch(timeout_s=90)
                assert batch is not None, _logs(tmp_path)
                batches.append(batch)
                trainer.ack(batch.seq)
                if step % 5 == 0:
                    trainer.commit(batch.seq, step)
                if step == NUM_STEPS // 2:
                    server.kill()
                    time.sleep(0.5)
                    assert alpha.poll() is None
                    assert beta.poll() is None
                    server.start()
            assert alpha.wait(timeout=30) == 0, _logs(tmp_path)
            assert beta.wait(timeout=30) == 0, _logs(tmp_path)
        trainer.close()

    assert [batch.seq for batch in batches] == list(range(1, NUM_STEPS + 1))
    assert all(sum(len(group["tokens"]) for group in batch.groups) == 16 for batch in batches)
    ids = [group_id for batch in batches for group_id in batch.group_ids]
    assert len(ids) == len(set(ids))
    sizes = {len(group["tokens"]) for batch in batches for group in batch.groups}
    assert sizes == {4, 8}
    group = batches[-1].groups[0]
    assert [[int(v) for v in versions] for versions in group["policy_versions"]] == [[7]] * len(group["tokens"])
    assert all(int(mask) in (-100, int(token)) for token, mask in zip(group["tokens"][0], group["masks"][0], strict=True))
    saved = sorted((tmp_path / "checkpoints" / "env_checkpoints").glob("*/step-*.json"))
    assert {path.parent.name for path in saved} == {"alpha_0", "beta_0"}, saved
    assert json.loads(saved[-1].read_text())["asked"] > 0
    for name in ("alpha", "beta"):
        log = (tmp_path / f"{name}.log").read_text()
        assert "Traceback" not in log, log


def _logs(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.log")))
