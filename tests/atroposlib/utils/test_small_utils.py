"""Metrics, tables and HTTP replies."""

from __future__ import annotations

import logging

import pytest
from aiohttp import ClientResponseError, ClientSession, web
from aiohttp.test_utils import TestServer

from atroposlib.utils.display import display_metrics_table
from atroposlib.utils.io import parse_http_response
from atroposlib.utils.metrics import get_std_min_max_avg


def test_mean_deviation_and_range():
    assert get_std_min_max_avg("x", [1.0, 3.0], {"y": 1}) == {
        "y": 1,
        "x_mean": 2.0,
        "x_std": 1.0,
        "x_max": 3.0,
        "x_min": 1.0,
    }
    assert get_std_min_max_avg("x", [], {}) == {}


def test_the_table_shows_task_time_and_values(capsys: pytest.CaptureFixture[str]):
    display_metrics_table("arithmetic_eval", {"accuracy": 0.75, "items": 4}, 10.0, 12.5)
    shown = capsys.readouterr().out
    assert "arithmetic_eval (2.5 s)" in shown
    assert "0.7500" in shown
    assert "items" in shown


async def test_replies_are_parsed_and_bad_ones_described(caplog: pytest.LogCaptureFixture):
    async def good(_: web.Request) -> web.Response:
        return web.json_response({"a": 1})

    async def bad(_: web.Request) -> web.Response:
        return web.Response(status=500, text="queue broken")

    app = web.Application()
    app.router.add_get("/good", good)
    app.router.add_get("/bad", bad)
    async with TestServer(app) as server, ClientSession() as session:
        async with session.get(server.make_url("/good")) as reply:
            assert await parse_http_response(reply) == {"a": 1}
        async with session.get(server.make_url("/bad")) as reply:
            with caplog.at_level(logging.ERROR), pytest.raises(ClientResponseError):
                await parse_http_response(reply)
    assert "500" in caplog.text
    assert "/bad" in caplog.text
