"""The data-generation commands and the viewer against a real rollout server in its own process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from atroposlib.api.client import EnvClient
from atroposlib.cli import dpo, sft
from atroposlib.testing.api import serve_api


def group(tokenizer: Any, number: int) -> dict[str, Any]:
    texts = [f"Q{number} A: good", f"Q{number} A: bad"]
    tokens = [tokenizer.encode(text) for text in texts]
    messages = [
        [{"role": "user", "content": f"Q{number}"}, {"role": "assistant", "content": text[-4:].strip()}]
        for text in texts
    ]
    return {"tokens": tokens, "masks": tokens, "scores": [1.0, 0.25], "messages": messages}


def feed(url: str, tokenizer: Any, stop: threading.Event) -> None:
    """An environment that sends groups until told to stop."""

    async def run() -> None:
        client = EnvClient(url, give_up_after_s=5.0)
        while (await client.register(name="feeder", max_token_length=64, weight=1.0, group_size=2))[
            "status"
        ] != "success":
            await asyncio.sleep(0.05)
            if stop.is_set():
                break
        number = 0
        while not stop.is_set():
            await client.submit(group(tokenizer, number))
            number += 1
            await asyncio.sleep(0.02)
        await client.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_rows_from_a_running_environment(tiny_tokenizer: Any, tmp_path: Path, command: str) -> None:
    target, stop = tmp_path / "rows.jsonl", threading.Event()
    with serve_api() as api:
        feeder = threading.Thread(target=feed, args=(api.url, tiny_tokenizer, stop))
        feeder.start()
        try:
            arguments = [
                str(target),
                "--api-url",
                api.url,
                "--tokenizer",
                tiny_tokenizer.name_or_path,
                "--num-seqs-to-save",
                "10",
            ]
            code = sft.main([*arguments, "--tasks-per-step", "2"]) if command == "sft" else dpo.main(arguments)
        finally:
            stop.set()
            feeder.join(20)
    assert code == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(rows) == 10
    if command == "sft":
        assert rows[0].keys() == {"prefix", "completion", "score"}
        assert {row["completion"] for row in rows} == {"good", "bad"}
        assert all(row["prefix"].endswith(" A: ") for row in rows)
    else:
        assert {(row["pos"], row["neg"], row["score"]) for row in rows} == {("good", "bad", 1.0)}


def test_view_run_starts_environments_and_shows_their_groups(tiny_tokenizer: Any, free_port: int) -> None:
    stop = threading.Event()
    with serve_api() as api:
        command = [sys.executable, "-m", "atroposlib.cli.view_run", "--port", str(free_port), "--api-url", api.url]
        viewer = subprocess.Popen(
            [*command, "--tokenizer", tiny_tokenizer.name_or_path], env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
        feeder = threading.Thread(target=feed, args=(api.url, tiny_tokenizer, stop))
        feeder.start()
        try:
            page = wait_for_page(f"http://127.0.0.1:{free_port}/latest", "Rollout 2")
        finally:
            stop.set()
            feeder.join(20)
            viewer.send_signal(signal.SIGINT)
            viewer.wait(20)
    assert "good" in page
    assert 'reward-positive">1.0' in page


def wait_for_page(url: str, text: str) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                page = reply.read().decode()
            if text in page:
                return str(page)
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"{url} never showed {text!r}")


def test_view_run_without_a_server_says_so(capsys: pytest.CaptureFixture[str], free_port: int) -> None:
    from atroposlib.cli import view_run

    assert view_run.main(["--api-url", f"http://127.0.0.1:{free_port}"]) == 1
    assert "no rollout server" in capsys.readouterr().err
