"""Rollout server, inference endpoint, two environments and a trainer client, all real, over HTTP.

The rollout server is killed in the middle and started again; the environments and the trainer go on, and what the
trainer gets is complete, in order and without repetition.
"""

from __future__ import annotations

import asyncio
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
from rollout_process import ServerProcess
from simple_env import make_env

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


def questions_of(batch: Any, tokenizer: Any) -> list[str]:
    """What each group of a batch asked."""
    texts = [tokenizer.decode([int(token) for token in group["tokens"][0]]) for group in batch.groups]
    return [text.split("\n")[1].removesuffix("<|im_end|>") for text in texts]


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
    assert all(
        int(mask) in (-100, int(token)) for token, mask in zip(group["tokens"][0], group["masks"][0], strict=True)
    )
    saved = sorted((tmp_path / "checkpoints" / "env_checkpoints").glob("*/step-*.json"))
    assert {path.parent.name for path in saved} == {"alpha_0", "beta_0"}, saved
    assert json.loads(saved[-1].read_text())["asked"] > 0
    for name in ("alpha", "beta"):
        log = (tmp_path / f"{name}.log").read_text()
        assert "Traceback" not in log, log


def test_a_killed_environment_continues_from_its_checkpoint(tiny_tokenizer_dir: Path, tmp_path: Path):
    tokenizer = load_tokenizer(str(tiny_tokenizer_dir))
    endpoint = HarnessServer(tokenizer=tokenizer)
    with endpoint, ServerProcess(tmp_path, "--in-memory") as server:
        flags = (
            *("--env.rollout_server_url", server.url, "--env.tokenizer_name", str(tiny_tokenizer_dir)),
            *("--openai.tokenizer_name", str(tiny_tokenizer_dir), "--openai.base_url", endpoint.base_url),
            *("--env.group_size", "4", "--env.max_batches_offpolicy", "1", "--slurm", "false"),
        )
        trainer = TrainerClient(server.url)
        trainer.register(
            batch_size=16, max_token_len=256, num_steps=100, checkpoint_dir=str(tmp_path), save_checkpoint_interval=2
        )
        trainer.next_batch(timeout_s=0.0)
        folder = tmp_path / "env_checkpoints" / "alpha_0"
        with environment(tmp_path, "alpha", *flags) as first:
            _train(trainer, 6)
            _wait_for(folder / "step-6.json")
            first.kill()
            first.wait()
        asked = json.loads((folder / "step-6.json").read_text())["asked"]
        _train(trainer, 3, timeout_s=0.5)  # what was queued when it died
        with environment(tmp_path, "alpha", *flags):
            batches = _train(trainer, 4)
        trainer.close()
    # The server still counts the killed process among the living and numbers the new one; it continues all the same.
    assert f"continuing from {folder / 'step-6.json'}" in (tmp_path / "alpha.log").read_text()
    numbers = [int(text.split()[2]) for text in questions_of(batches[-1], tokenizer)]
    assert min(numbers) > asked >= 6 * 4


async def test_a_group_the_real_server_refuses_is_kept_and_the_rest_arrives(tiny_tokenizer_dir: Path, tmp_path: Path):
    with ServerProcess(tmp_path, "--in-memory") as server:
        trainer = TrainerClient(server.url)
        trainer.register(
            batch_size=4, max_token_len=64, num_steps=9, checkpoint_dir=str(tmp_path), save_checkpoint_interval=2
        )
        await asyncio.to_thread(trainer.next_batch, timeout_s=0.0)
        env = make_env(tiny_tokenizer_dir, rollout_server_url=server.url)
        await env.register_env()
        await env.get_server_info()
        good = {"tokens": [[1, 2], [3, 4]], "masks": [[-100, 2], [-100, 4]], "scores": [0.0, 1.0]}
        await env.handle_send_to_api([good, {**good, "masks": [[2], [4]]}, dict(good)])
        batch = await asyncio.to_thread(trainer.next_batch, timeout_s=20)
        await env.rollout_client.aclose()
        trainer.close()
    assert batch is not None
    assert [len(group["tokens"]) for group in batch.groups] == [2, 2]
    assert env.statistics.num_groups_sent == 2
    kept = (tmp_path / "env_checkpoints" / "numbers_0" / "rejected_groups.jsonl").read_text().splitlines()
    assert [json.loads(line)["group"]["masks"] for line in kept] == [[[2], [4]]]


def _train(trainer: TrainerClient, steps: int, timeout_s: float = 60.0) -> list[Any]:
    """Take up to ``steps`` batches."""
    batches = []
    for _ in range(steps):
        batch = trainer.next_batch(timeout_s=timeout_s)
        if batch is None:
            break
        batches.append(batch)
        trainer.ack(batch.seq)
    return batches


def _wait_for(path: Path, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def _logs(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.log")))
