"""Builders of requests and a plain HTTP caller, for the tests of the rollout server."""

from __future__ import annotations

from typing import Any

import requests


def registration(**changes: Any) -> dict[str, Any]:
    return {
        "wandb_group": "group",
        "wandb_project": "project",
        "batch_size": 4,
        "max_token_len": 2048,
        "checkpoint_dir": "ckpt",
        "save_checkpoint_interval": 10,
        "starting_step": 0,
        "num_steps": 100,
    } | changes


def env_registration(**changes: Any) -> dict[str, Any]:
    return {"max_token_length": 2048, "desired_name": "env", "weight": 1.0, "group_size": 4} | changes


def group(mark: int, size: int = 4, length: int = 3, **extra: Any) -> dict[str, Any]:
    """A group that can be told from others by its first token."""
    tokens = [[mark, *range(1, length)] for _ in range(size)]
    return {"tokens": tokens, "masks": tokens, "scores": [float(i) for i in range(size)]} | extra


def marks(batch: list[dict[str, Any]]) -> list[int]:
    """First token of each group."""
    return [int(item["tokens"][0][0]) for item in batch]


class Caller:
    """Plain HTTP calls with the checks every test wants."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session = requests.Session()

    def post(self, path: str, value: Any, status: int = 200) -> Any:
        reply = self.session.post(self.url + path, json=value, timeout=20)
        assert reply.status_code == status, reply.text
        return reply.json()

    def get(self, path: str, status: int = 200, **options: Any) -> Any:
        reply = self.session.get(self.url + path, timeout=20, **options)
        assert reply.status_code == status, reply.text
        return reply.json()

    def start(self, *, envs: int = 1, env: dict[str, Any] | None = None, **changes: Any) -> None:
        """A trainer registers and asks for its first batch; environments register."""
        self.post("/register", registration(**changes))
        self.get("/batch")
        for _ in range(envs):
            assert self.post("/register-env", env_registration(**(env or {})))["status"] == "success"

    def batch(self) -> list[int] | None:
        """The marks of the next batch of a plain client."""
        batch = self.get("/batch")["batch"]
        return None if batch is None else marks(batch)
