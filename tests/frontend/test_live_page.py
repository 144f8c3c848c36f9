"""The live page and the rollout reader in a real browser: loads, updates while a run goes, filters, hostile text stays text."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from browser import INSTALLED, Browser

from atroposlib.api.observer import GroupEvent
from atroposlib.api.run_log import RunLog
from atroposlib.api.server import ServerSettings, build_app
from atroposlib.frontend.live.attach import attach_live_page
from atroposlib.frontend.live.routes import create_view_app

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not INSTALLED, reason="needs chromium and chromedriver")]

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> & \"quotes\" </b>"


class Served:
    """An application on a loopback port, in a thread."""

    def __init__(self, app: Any) -> None:
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    window = Browser()
    yield window
    window.close()


def add_group(log: RunLog, key: int, *, env: str = "sums", score: float = 0.5, answer: str = "7") -> None:
    tokens = [[36, 22, 32, 38, 2], [36, 22, 32, 40, 2]]
    scores = [score, max(0.0, score - 0.25)]
    content = {
        "tokens": tokens,
        "masks": [[-100, -100, -100, 38, 2], [-100, -100, -100, 40, 2]],
        "scores": scores,
        "inference_logprobs": [[1.0, 1.0, 1.0, -0.5, -2.5]] * 2,
        "messages": [[{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": answer}]] * 2,
    }
    log.group_accepted(
        GroupEvent(
            key=key, group_id=f"group-{key}", env_id=0, env_name=env, size=2, num_tokens=10, scores=scores, policy_versions=[[key], [key]],
            reward_components={"right": scores}, payload=json.dumps(content).encode(), binary=False,
        )
    )  # fmt: skip


def add_step(log: RunLog, step: int) -> None:
    for offset in range(2):
        add_group(log, 2 * step + offset, env=("sums", "letters")[offset], score=0.1 * step)
    log.batch_formed(step, [f"group-{2 * step}", f"group-{2 * step + 1}"])
    log.batch_acked(step)
    metrics = {
        "batch_seq": step,
        "reward": 0.1 * step,
        "policy/entropy": 2.0 - 0.1 * step,
        "time/waiting_s": 0.2,
        "rollout/staleness_mean": 1.0,
    }
    log.reported("trainer", step, time.time(), metrics)
    log.reported(
        "supervisor",
        0,
        time.time(),
        {"process/trainer/up": 1.0, "process/trainer/restarts": 2.0, "process/trainer/rss_mb": 300.0},
    )
    log.flush()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    log = RunLog(tmp_path / "run_log.sqlite", flush_s=0.02)
    log.set_meta(name="page test")
    yield log
    log.close()


@pytest.fixture
def live(log: RunLog) -> Iterator[str]:
    app = build_app(ServerSettings(), observers=[log])
    attach_live_page(app, log)
    served = Served(app)
    yield served.url
    served.stop()


def test_the_page_loads_and_follows_a_run(browser: Browser, log: RunLog, live: str) -> None:
    for step in range(1, 4):
        add_step(log, step)
    log.group_rejected(0, "scores are not finite")
    log.flush()
    browser.console()
    browser.open(live + "/live")
    browser.wait("return document.querySelectorAll('.tile').length > 5")
    assert browser.text("#run-name") == "page test"
    assert browser.text("#state") == "live"
    assert "3\nstep" in browser.texts(".tile")
    shown = browser.run(
        "return [...document.querySelectorAll('#charts .chart')].filter((box) => !box.hidden).map((box) => box.dataset.title)"
    )
    assert {
        "Reward by environment",
        "Reward components",
        "Entropy",
        "Staleness (policy versions)",
        "Where the time goes (s per step)",
    } <= set(shown)
    drawn = browser.run(
        "const c = document.querySelector('#charts canvas'); const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n"
    )
    assert drawn > 500
    assert "trainer" in browser.text("#processes")
    assert "scores are not finite" in browser.text("#rejected")
    add_step(log, 4)
    browser.wait("return [...document.querySelectorAll('.tile')].some((tile) => tile.innerText.startsWith('4\\nstep'))")
    assert "letters 0.4" in browser.text("#charts .legend") or "letters" in browser.text("#charts .legend")
    assert [message for message in browser.console() if "rror" in message] == []


def test_a_page_without_groups_says_what_it_waits_for(browser: Browser, log: RunLog, live: str) -> None:
    with httpx.Client(base_url=live) as http:
        browser.open(live + "/live")
        browser.wait(
            "return document.querySelector('#waiting').innerText.includes('Waiting for a trainer to register')"
        )
        assert "Shown when atropos run" in browser.text("#processes")
        trainer = {
            "batch_size": 4,
            "max_token_len": 64,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 5,
            "starting_step": 0,
            "num_steps": 9,
        }
        assert http.post("/register", json=trainer | {"wandb_group": "", "wandb_project": ""}).status_code == 200
        browser.wait("return document.querySelector('#waiting').innerText.includes('for an environment to register')")
        http.get("/batch")
        environment = {"max_token_length": 64, "desired_name": "sums", "weight": 1.0, "group_size": 2}
        assert http.post("/register-env", json=environment).json()["status"] == "success"
        browser.wait("return document.querySelector('#waiting').innerText === 'Waiting for the first group (sums_0).'")
        log.reported("server", 0, time.time(), {"queue/groups": 0.0})
        log.reported(
            "env:sums_0",
            0,
            time.time(),
            {"rollout/num_groups_rejected_equal_scores": 1004.0, "rollout/num_failures_evaluate": 3.0},
        )
        log.flush()
        browser.wait("return document.querySelector('#waiting').innerText.includes('1004 were rejected')")
    assert "1004\nrejected groups" in browser.texts(".tile")
    assert "equal scores" in browser.text("#rejected")
    bounds = browser.run("return page.charts.find(([chart]) => chart.title.startsWith('Queue'))[1].bounds()")
    assert (bounds["y0"], round(bounds["y1"])) == (0, 1)  # a count of zero is no millionth
    add_step(log, 1)
    browser.wait("return document.querySelector('#waiting').hidden")


def test_the_panels_take_the_metrics_they_are_about(browser: Browser, log: RunLog, live: str) -> None:
    add_step(log, 1)
    log.reported("env:sums", 1, time.time(), {"eval/return": 3.0, "eval/num_rollouts": 16.0, "eval/mean_length": 300.0})
    log.reported("groups:sums", 1, time.time(), {"reward/length": 0.5})
    log.reported(
        "trainer",
        1,
        time.time(),
        {"completion_length": 7.0, "rewards/length": 0.5, "eval_reward": 0.25, "eval_runtime": 9.0},
    )
    log.flush()
    browser.open(live + "/live")
    legends = (
        "return Object.fromEntries([...document.querySelectorAll('#charts .chart')].filter((box) => !box.hidden)"
        ".map((box) => [box.dataset.title, box.querySelector('.legend').innerText]))"
    )
    browser.wait(
        "return [...document.querySelectorAll('#charts .chart')].some((box) => !box.hidden && box.dataset.title === 'Completion length')"
    )
    shown = browser.run(legends)
    assert "env:sums eval/return 3" in shown["Held-out evaluation"]  # whatever the environment calls it
    assert "trainer eval_reward 0.250" in shown["Held-out evaluation"]
    assert not any(name in shown["Held-out evaluation"] for name in ("num_rollouts", "mean_length", "runtime"))
    assert shown["Completion length"].split("\n") == ["trainer completion_length 7"]
    assert "reward/length" in shown["Reward components"]


def test_the_reader_filters_and_shows_where_a_group_went(browser: Browser, log: RunLog, live: str) -> None:
    for step in range(1, 6):
        add_step(log, step)
    browser.open(live + "/live#rollouts")
    browser.wait("return document.querySelectorAll('.entry').length === 10")
    browser.wait("return document.querySelectorAll('#filter-env option').length === 3")
    browser.fill("#filter-env", "letters")
    browser.wait("return document.querySelectorAll('.entry').length === 5")
    browser.fill("#filter-min", "0.35")
    browser.wait("return document.querySelectorAll('.entry').length === 2")
    browser.fill("#filter-min", "")
    browser.fill("#filter-step", "2")
    browser.wait("return document.querySelectorAll('.entry').length === 1")
    browser.click(".entry")
    browser.wait("return document.querySelectorAll('.sample').length === 2")
    assert "trained at step 2 (batch 2)" in browser.text("#group .facts")
    assert "policy v5" in browser.text("#group .facts")
    assert "ATROPOS_PAGE_TOKENIZER" in browser.text("#group .hint")
    assert "group-5/0" in browser.text("#group .sample")
    colours = browser.run(
        "return [...document.querySelectorAll('.sample:nth-of-type(1) .tokens span')].map((span) => span.style.background)"
    )
    assert colours[0] == ""
    assert colours[3] != ""
    browser.fill("#colour", "logprob")
    by_logprob = browser.run("return [...document.querySelectorAll('.sample .tokens')][0].children[4].style.background")
    assert by_logprob.startswith("rgba(200, 120, 0")
    browser.click("#raw")
    assert json.loads(browser.text("pre.raw"))["content"]["tokens"][0] == [36, 22, 32, 38, 2]
    browser.fill("#filter-step", "99")
    browser.wait("return document.querySelector('#group-list').innerText.includes('no group matches')")


def test_hostile_text_stays_text(browser: Browser, log: RunLog, live: str) -> None:
    add_group(log, 1, env=HOSTILE, answer=HOSTILE)
    log.group_rejected(None, HOSTILE)
    log.set_meta(name=HOSTILE)
    log.reported("trainer", 1, time.time(), {f"reward/{HOSTILE}": 1.0})
    log.flush()
    browser.open(live + "/live#all")
    browser.wait("return document.querySelectorAll('#all-charts .chart').length > 1")
    browser.open(live + "/live#rollouts")
    browser.wait("return document.querySelectorAll('.sample').length === 2")
    assert HOSTILE in browser.text(".sample")
    assert HOSTILE in browser.text("#group-list")
    browser.click("#raw")
    browser.run("document.querySelector('nav a[data-view=overview]').click()")
    browser.wait("return document.querySelector('#rejected').innerText.includes('window.hacked')")
    assert browser.text("#run-name") == HOSTILE
    assert browser.run("return window.hacked ?? null") is None
    assert browser.run("return document.querySelectorAll('main img, main script, header img').length") == 0


def test_a_finished_run(browser: Browser, log: RunLog, tmp_path: Path) -> None:
    add_step(log, 1)
    add_group(log, 9)
    log.close()
    served = Served(create_view_app(tmp_path))
    try:
        browser.open(served.url + "/")
        browser.wait("return document.querySelector('#state').innerText === 'finished run'")
        browser.wait("return document.querySelector('#processes').innerText.includes('ended')")
        assert "running" not in browser.text("#processes")
        assert "1\ngroups not used" in browser.texts(".tile")
        browser.open(served.url + "/live#rollouts")
        browser.wait("return document.querySelectorAll('.sample').length === 2")
        assert "the run ended without it" in browser.text("#group .facts")
        assert [("not used" in entry, "trained step 1" in entry) for entry in browser.texts(".entry")] == [
            (True, False),
            (False, True),
            (False, True),
        ]
        assert "waiting" not in browser.text("#rollouts")
    finally:
        served.stop()


def test_the_page_follows_the_token_rule(browser: Browser, log: RunLog) -> None:
    add_step(log, 1)
    app = build_app(ServerSettings(token="s3cret"), observers=[log])
    attach_live_page(app, log)
    served = Served(app)
    try:
        browser.open(served.url + "/live")
        browser.wait("return document.querySelector('#problem').innerText.includes('token')")
        assert browser.texts(".tile") == []
        browser.open("about:blank")
        browser.open(served.url + "/live#token=s3cret")
        browser.wait("return document.querySelectorAll('.tile').length > 5")
        assert "s3cret" not in browser.run("return location.href")
    finally:
        served.stop()
