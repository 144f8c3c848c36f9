"""A loopback inference endpoint per test, and servers that retry quickly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from atroposlib.envs.server_handling.api_server import APIServer
from atroposlib.testing.harness_server import HarnessServer


@pytest.fixture
def harness(tiny_tokenizer: Any) -> Iterator[HarnessServer]:
    with HarnessServer(tokenizer=tiny_tokenizer) as server:
        yield server


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(APIServer, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(APIServer, "MAX_BACKOFF_S", 0.002)
    monkeypatch.setattr(APIServer, "FIRST_RECOVERY_CHECK_S", 0.01)
    monkeypatch.setattr(APIServer, "MAX_RECOVERY_CHECK_S", 0.05)
