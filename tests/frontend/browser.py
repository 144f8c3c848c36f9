"""A real headless Chromium, driven over the WebDriver protocol with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM = next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)
DRIVER = shutil.which("chromedriver")
INSTALLED = CHROMIUM is not None and DRIVER is not None
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One browser window."""

    def __init__(self, *, width: int = 1400, height: int = 1000) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.profile = tempfile.mkdtemp(prefix="atropos-browser-")
        self.driver = subprocess.Popen(
            [str(DRIVER), f"--port={self.port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.session = ""
        deadline = time.monotonic() + 60
        while True:
            try:
                self.call("GET", "/status")
                break
            except OSError:
                assert time.monotonic() < deadline, "chromedriver did not start"
                time.sleep(0.1)
        arguments = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--disable-background-networking", f"--window-size={width},{height}", f"--user-data-dir={self.profile}",
        ]  # fmt: skip
        options = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": CHROMIUM, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        reply = self.call("POST", "/session", {"capabilities": {"alwaysMatch": options}})
        self.session = f"/session/{reply['sessionId']}"

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=90) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()[:800]}") from error

    def open(self, url: str) -> None:
        self.call("POST", self.session + "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page; `return` gives a value back."""
        return self.call("POST", self.session + "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        return list(
            self.run("return [...document.querySelectorAll(arguments[0])].map((node) => node.innerText)", selector)
        )

    def click(self, selector: str) -> None:
        found = self.call("POST", self.session + "/element", {"using": "css selector", "value": selector})
        self.call("POST", f"{self.session}/element/{found[ELEMENT]}/click", {})

    def fill(self, selector: str, value: str) -> None:
        """Set an input or a select as a user does, with its change event."""
        self.run(
            "const node = document.querySelector(arguments[0]); node.value = arguments[1];"
            "node.dispatchEvent(new Event('input', {bubbles: true})); node.dispatchEvent(new Event('change', {bubbles: true}));",
            selector,
            value,
        )

    def wait(self, script: str, timeout_s: float = 40.0) -> Any:
        """Until the script returns something true."""
        deadline = time.monotonic() + timeout_s
        while True:
            value = self.run(script)
            if value:
                return value
            assert time.monotonic() < deadline, (
                f"never true: {script}\nconsole: {self.console()}\npage: {self.text('body')[:2000]}"
            )
            time.sleep(0.1)

    def console(self) -> list[str]:
        """Messages of the page's console since the last call."""
        return [entry["message"] for entry in self.call("POST", self.session + "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("GET", self.session + "/screenshot")))

    def close(self) -> None:
        try:
            if self.session:
                self.call("DELETE", self.session)
        finally:
            self.driver.terminate()
            self.driver.wait(10)
            shutil.rmtree(self.profile, ignore_errors=True)
