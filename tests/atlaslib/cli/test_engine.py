"""``atropos engine``: what it says when it cannot start, and how it stops while replies run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from atlaslib.cli.engine import main
from atlaslib.errors import ConfigError
from atlaslib.models.loading import choose_device
from atlaslib.models.tiny import tiny_model_folder


def test_devices_that_are_not_here_are_named() -> None:
    assert choose_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match=r"'cuda:99', but torch .* sees"):
        choose_device("cuda:99")
    with pytest.raises(ConfigError, match="device is 'gpu'; use auto, cpu"):
        choose_device("gpu")


def test_a_log_level_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["model", "--log-level", "loud"])
    assert "--log-level is 'loud'; use debug" in capsys.readouterr().err


def test_a_stop_tells_running_requests_why(tmp_path: Path, free_port: int) -> None:
    model = tiny_model_folder(tmp_path / "model", max_len=100_000)
    command = [sys.executable, "-m", "atroposlib.cli.main", "engine", str(model), "--port", str(free_port)]
    server = subprocess.Popen(
        [*command, "--max-model-len", "30000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    assert "loading" in server.stdout.readline()
    assert "serving" in server.stdout.readline()
    url, replies = f"http://127.0.0.1:{free_port}/v1/completions", {}
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 29_000, "ignore_eos": True, "n": 4}
    started = threading.Event()

    def whole() -> None:
        replies["whole"] = httpx.post(url, json=body, timeout=60)

    def streamed() -> None:
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as reply:
            for line in reply.iter_lines():
                started.set()
                replies["last"] = line or replies.get("last")

    threads = [threading.Thread(target=target) for target in (whole, streamed)]
    for thread in threads:
        thread.start()
    assert started.wait(30)
    server.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(30)
    _, errors = server.communicate(timeout=30)
    assert server.returncode == 0
    assert "Traceback" not in errors
    assert replies["whole"].status_code == 503
    assert "stopped" in replies["whole"].json()["error"]["message"]
    assert "stopped" in json.loads(replies["last"].removeprefix("data: "))["error"]["message"]
