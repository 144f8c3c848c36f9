"""A real rollout server in memory, shared by a test file and reset before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests
from rollout_calls import Caller

from atroposlib.testing.api import ApiProcess, serve_api


@pytest.fixture(scope="module")
def shared_api() -> Iterator[ApiProcess]:
    with serve_api("--no-live-page", "--env-timeout", "1.0") as api:
        yield api


@pytest.fixture
def api(shared_api: ApiProcess) -> ApiProcess:
    """A server as it is right after its start."""
    assert requests.post(f"{shared_api.url}/reset_data", timeout=10).text == "Reset successful"
    return shared_api


@pytest.fixture
def call(api: ApiProcess) -> Iterator[Caller]:
    caller = Caller(api.url)
    yield caller
    caller.session.close()
