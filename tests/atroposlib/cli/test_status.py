"""`atropos status` against a real server, and the text it makes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from atroposlib.cli import status
from atroposlib.testing.api import free_port, serve_api

GROUP = {"tokens": [[1, 2]] * 4, "masks": [[1, 2]] * 4, "scores": [0.0] * 4, "env_id": 0}


def test_the_table_shows_queue_trainer_and_environments(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_api("--no-live-page") as api:
        assert status.main(["--url", api.url]) == 0
        assert "trainer   not registered" in capsys.readouterr().out
        settings = {"wandb_group": "g", "wandb_project": "p", "batch_size": 8, "max_token_len": 9, "checkpoint_dir": "c",
                    "save_checkpoint_interval": 1, "starting_step": 3, "num_steps": 100}  # fmt: skip
        requests.post(f"{api.url}/register", json=settings, timeout=10)
        requests.get(f"{api.url}/batch", timeout=10)
        env = {
            "max_token_length": 9,
            "desired_name": "maths",
            "weight": 1.0,
            "group_size": 4,
            "min_batch_allocation": 0.25,
        }
        requests.post(f"{api.url}/register-env", json=env, timeout=10)
        requests.post(f"{api.url}/scored_data", json=GROUP, timeout=10)
        assert status.main(["--url", api.url + "/"]) == 0
        text = capsys.readouterr().out
        assert "queue     1 groups, 4 sequences" in text
        assert "trainer   step 3 of 100, batch size 8" in text
        row = next(line for line in text.splitlines() if "maths_0" in line).split()
        assert row[:4] == ["0", "maths_0", "alive", "1"]
        assert row[-3:] == ["4", "1.00", "25%"]
        assert status.main(["--url", api.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["queue"]["groups"] == 1


def test_rates_do_not_count_what_an_earlier_server_took(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = {"wandb_group": "g", "wandb_project": "p", "batch_size": 400, "max_token_len": 9, "checkpoint_dir": "c",
                "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 100}  # fmt: skip
    with serve_api("--no-live-page", data_dir=tmp_path) as api:
        requests.post(f"{api.url}/register", json=settings, timeout=10)
        requests.get(f"{api.url}/batch", timeout=10)
        env = {"max_token_length": 9, "desired_name": "maths", "weight": 1.0, "group_size": 4}
        requests.post(f"{api.url}/register-env", json=env, timeout=10)
        for _ in range(3):
            requests.post(f"{api.url}/scored_data", json=GROUP, timeout=10)
    with serve_api("--no-live-page", data_dir=tmp_path) as api:
        assert status.main(["--url", api.url]) == 0
        row = next(line for line in capsys.readouterr().out.splitlines() if "maths_0" in line).split()
        assert row[3:6] == ["3", "0.00", "0"]
        requests.post(f"{api.url}/scored_data", json=GROUP, timeout=10)
        (maths,) = status.fetch(api.url, None)["environments"]
        assert (maths["groups"], maths["groups_since_start"], maths["tokens_since_start"]) == (4, 1, 8)


def test_no_server_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(["--url", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "start one with run-api" in capsys.readouterr().err


def test_rates_are_taken_between_two_looks() -> None:
    def look(groups: int, tokens: int) -> dict[str, object]:
        env = {"name": "a", "groups": groups, "tokens": tokens}
        return {
            "uptime_s": 10.0,
            "environments": [env | {"groups_since_start": groups - 5, "tokens_since_start": tokens - 500}],
        }

    assert status.rates(None, look(20, 1000), 0.0) == {"a": (1.5, 50.0)}
    assert status.rates(look(20, 1000), look(30, 1400), 4.0) == {"a": (2.5, 100.0)}
    assert status.rates(look(20, 1000), look(0, 0), 1.0) == {"a": (0.0, 0.0)}  # the server started afresh


def test_watching_goes_on_when_the_server_is_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look at a server, two while it is gone, one at the next server on the same port."""
    port = free_port()
    with ExitStack() as servers:
        servers.enter_context(serve_api("--no-live-page", port=port))

        def waits() -> Iterator[None]:
            servers.close()
            yield
            yield
            servers.enter_context(serve_api("--no-live-page", port=port))
            yield
            raise KeyboardInterrupt

        between_looks = waits()
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: next(between_looks))
        monkeypatch.setattr(status, "time", clock)
        assert status.main(["--url", f"http://127.0.0.1:{port}", "--watch"]) == 130
    told = capsys.readouterr()
    assert told.out.count("rollout server http") == 2
    assert told.err.count("looking again") == 2
