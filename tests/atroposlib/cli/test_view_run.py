"""The viewers: a local page, escaped text, pictures where asked for, and no trainer is disturbed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from atroposlib.cli import inference_node_wandb_watcher as watcher
from atroposlib.cli.view_run import StandInTrainer, build_parser, load_decoder, trainer_is_missing
from atroposlib.frontend.latest_group import create_viewer_app, fetch_latest, render_group
from atroposlib.testing.api import serve_api

PIXEL = "iVBORw0KGgo" * 8
GROUP = {"tokens": [[1, 2], [3]], "scores": [1.0, -1.0], "messages": None, "images": [PIXEL, None]}


@pytest.fixture
def rollout_server(free_port: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The two routes the viewer reads, over real HTTP."""
    app, state = FastAPI(), {"info": {"batch_size": -1}, "latest": {"tokens": []}}
    app.get("/info")(lambda: state["info"])
    app.get("/latest_example")(lambda: state["latest"])
    server = uvicorn.Server(uvicorn.Config(app, port=free_port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{free_port}", state
    server.should_exit = True
    thread.join()


def test_reads_the_rollout_server(rollout_server: tuple[str, dict[str, Any]]) -> None:
    url, state = rollout_server
    assert trainer_is_missing(url)
    assert fetch_latest(url) is None
    state |= {"info": {"batch_size": 8}, "latest": GROUP}
    assert not trainer_is_missing(url + "/")
    assert fetch_latest(url) == GROUP


def test_reads_a_rollout_server_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATROPOS_TOKEN", raising=False)
    with serve_api("--token", "secret", "--no-live-page") as api:
        with pytest.raises(OSError, match=f"{api.url}/info needs a token; set ATROPOS_TOKEN"):
            trainer_is_missing(api.url)
        monkeypatch.setenv("ATROPOS_TOKEN", "wrong")
        with pytest.raises(OSError, match="does not take this token; set ATROPOS_TOKEN"):
            fetch_latest(api.url)
        monkeypatch.setenv("ATROPOS_TOKEN", "secret")
        assert trainer_is_missing(api.url)
        assert fetch_latest(api.url) is None


def test_page_decodes_escapes_and_allows_no_foreign_content() -> None:
    app = create_viewer_app(lambda: GROUP, lambda tokens: f"<script>{tokens}</script>", title="a <b>")
    with TestClient(app) as client:
        page = client.get("/")
        assert "a &lt;b&gt;" in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "latest" in client.get("/view.js").text
        latest = client.get("/latest").text
    assert "&lt;script&gt;[1, 2]&lt;/script&gt;" in latest
    assert "<script" not in latest
    assert "<img" not in latest
    assert 'reward-negative">-1.0' in latest


def test_pictures_and_messages() -> None:
    page = render_group({**GROUP, "messages": ["first", "second"]}, None, show_images=True)
    assert page.count("<img") == 1
    assert f"data:image/png;base64,{PIXEL}" in page
    assert "first" in page
    assert "No group" in render_group(None, None)
    assert "2 tokens" in render_group(GROUP, None)


def test_a_server_that_is_down_is_said_not_raised() -> None:
    def refuse() -> None:
        raise ConnectionRefusedError("nobody there")

    with TestClient(create_viewer_app(refuse, None, title="t")) as client:
        assert "nobody there" in client.get("/latest").text


def test_defaults_are_local() -> None:
    arguments = build_parser("view-run", "tok").parse_args([])
    assert (arguments.host, arguments.port, arguments.api_url) == ("127.0.0.1", 9001, "http://localhost:8000")
    assert (arguments.group_size, arguments.max_token_len, arguments.tokenizer) == (2, 2048, "tok")


def test_stand_in_trainer_takes_and_acknowledges() -> None:
    taken = threading.Event()

    class Client:
        def __init__(self) -> None:
            self.registered: dict[str, Any] = {}
            self.acked: list[int] = []
            self.closed = False

        def register(self, **kwargs: Any) -> None:
            self.registered = kwargs

        def next_batch(self, *, timeout_s: float) -> Any:
            if self.acked:
                taken.set()
                time.sleep(0.01)
                return None
            return SimpleNamespace(seq=4, groups=[{"tokens": [[0]]}, GROUP])

        def ack(self, seq: int) -> None:
            self.acked.append(seq)

        def close(self) -> None:
            self.closed = True

    client = Client()
    trainer = StandInTrainer(client, group_size=2, max_token_len=64)
    trainer.start()
    assert taken.wait(5.0)
    trainer.stop()
    assert trainer.latest == GROUP
    assert client.acked == [4]
    assert client.closed
    assert client.registered["batch_size"] == 2


def test_decoder(tiny_tokenizer_dir: Any, tmp_path: Any) -> None:
    decode = load_decoder(str(tiny_tokenizer_dir))
    assert decode is not None
    assert isinstance(decode([70, 71]), str)
    assert load_decoder(str(tmp_path / "nothing")) is None


def test_watcher_waits_for_the_run_and_logs_on_new_steps() -> None:
    replies = {
        "/wandb_info": [{"project": None, "group": None}, {"project": "p", "group": "g"}],
        "/status": [{"current_step": 0}, {"current_step": 0}, {"current_step": 3}],
    }
    log: list[tuple[str, Any]] = []
    wandb = SimpleNamespace(
        init=lambda **kwargs: log.append(("init", kwargs)),
        log=lambda metrics, step: log.append(("log", (metrics, step))),
    )
    sleeps: list[float] = []
    watcher.watch(
        "http://api",
        4,
        7,
        wandb,
        sleep=sleeps.append,
        fetch=lambda url: replies[url.removeprefix("http://api")].pop(0),
        probe=lambda url: url == "http://localhost:9001/health_generate",
        num_rounds=3,
    )
    metrics = {"server/server_health_7_0": 0, "server/server_health_7_1": 1}
    assert log == [
        ("init", {"project": "p", "group": "g", "name": "inf_node_7"}),
        ("log", (metrics, 0)),
        ("log", (metrics, 3)),
    ]
    assert sleeps == [1.0, 60.0, 60.0, 60.0]
    assert watcher.server_ports(2) == [9000, 9001, 9002, 9003]
    assert not watcher.is_healthy("http://127.0.0.1:1/health_generate", timeout_s=1.0)


def test_watcher_refuses_a_number_of_gpus_that_no_node_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        watcher.main(["--api-addr", "http://api", "--tp", "0", "--node-num", "1"])
    assert ended.value.code == 2
    assert "--tp is 0; it must lie between 1 and 8" in capsys.readouterr().err
