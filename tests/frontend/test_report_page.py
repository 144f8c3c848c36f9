"""The report of a run in a real browser: dark where the reader's system is, and readable on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import INSTALLED, Browser

from atlaslib.launch.report import write_report
from atroposlib.api.run_log import RunLog

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not INSTALLED, reason="needs chromium and chromedriver")]

LOOK = """
const box = (selector) => document.querySelector(selector).getBoundingClientRect(), style = getComputedStyle(document.body);
document.querySelectorAll("details").forEach((details) => { details.open = true; });
return { background: style.backgroundColor, text: style.color, page: document.documentElement.scrollWidth, figure: box("figure").width,
         label: box("svg text").height, curve: getComputedStyle(document.querySelector("polyline")).stroke };
"""


def emulate(browser: Browser, command: str, **parameters: Any) -> None:
    browser.call("POST", browser.session + "/goog/cdp/execute", {"cmd": f"Emulation.{command}", "params": parameters})


def test_dark_and_narrow(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "server" / "run_log.sqlite", flush_s=0.01)
    for step in range(1, 5):
        metrics = {
            "reward": step / 4,
            "policy/entropy": 1e-13 * step,
            "a_rather_long/name_of_a_metric_without_a_space": 1.0,
        }
        log.reported("trainer", step, 100.0 + step, metrics)
    log.close()
    report = write_report(tmp_path)
    assert report is not None
    seen = {}
    browser = Browser()
    try:
        for scheme in ("light", "dark"):
            emulate(browser, "setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
            emulate(browser, "setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            browser.open(report.as_uri())
            seen[scheme] = browser.run(LOOK)
    finally:
        browser.close()
    for look in seen.values():
        assert look["page"] == 390  # nothing to scroll sideways to
        assert look["figure"] > 340  # one curve beside none
        assert look["label"] >= 11
    assert (seen["light"]["background"], seen["light"]["text"]) == ("rgb(255, 255, 255)", "rgb(29, 35, 48)")
    assert (seen["dark"]["background"], seen["dark"]["text"]) == ("rgb(18, 21, 28)", "rgb(230, 233, 240)")
    assert seen["light"]["curve"] != seen["dark"]["curve"]
