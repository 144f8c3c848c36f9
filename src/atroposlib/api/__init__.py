"""The rollout server: environments post scored groups, the trainer takes batches.

    trainer       POST /register      settings; then GET /batch until there is one
    environment   POST /register-env  (waits until the trainer has started), then POST /scored_data, GET /status-env
    trainer       GET /batch          exactly batch_size sequences, oldest first; POST /ack and /commit (clients of ours)

A request goes `hot_routes` or `server` (HTTP) -> `wire` / `binary` (validate once) -> `service` (journal, then apply) -> `store` (state) ->
`batching` (which groups make a batch). `client` is the other end.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "app":
        from atroposlib.api.server import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
