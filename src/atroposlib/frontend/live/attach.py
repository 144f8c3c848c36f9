"""The live page on a rollout server: its run log, its routes, and catching up after a restart."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI

from atroposlib.api.observer import GroupEvent
from atroposlib.api.run_log import FILE_NAME, RunLog
from atroposlib.api.service import RolloutService
from atroposlib.api.store import StoredGroup
from atroposlib.frontend.live.routes import TOKENIZER_VARIABLE, add_live_routes

logger = logging.getLogger(__name__)

NAME_VARIABLE = "ATROPOS_RUN_NAME"


def open_run_log(data_dir: Path | None) -> RunLog:
    """The run log beside the journal (in a temporary folder for a server in memory)."""
    run_log = RunLog(None if data_dir is None else data_dir / FILE_NAME)
    tokenizer = os.environ.get(TOKENIZER_VARIABLE)
    # Absolute: `atropos view` reads it later, from any folder.
    facts = {"name": os.environ.get(NAME_VARIABLE), "tokenizer": tokenizer and os.path.abspath(tokenizer)}
    run_log.set_meta(**{name: value for name, value in facts.items() if value})
    return run_log


def attach_live_page(app: FastAPI, run_log: RunLog) -> None:
    """Add the page's routes, tell the log at start what it missed, close it at the end."""
    add_live_routes(app, run_log)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(application: FastAPI) -> AsyncIterator[Any]:
        try:
            async with inner(application) as state:
                catch_up(run_log, application.state.service)
                yield state
        finally:
            run_log.close()

    app.router.lifespan_context = lifespan


def catch_up(run_log: RunLog, service: RolloutService) -> None:
    """What the journal holds and the log does not: a server that was killed had not written its last moments."""
    store = service.store
    known = run_log.known_keys(min(store.groups, default=0))
    for key, group in store.groups.items():
        if key not in known:
            event = _event(service, group)
            if event is not None:
                run_log.group_accepted(event)
    for batch in store.ledger.batches.values():
        run_log.batch_formed(batch.seq, [store.groups[key].group_id for key in batch.keys if key in store.groups])


def _event(service: RolloutService, group: StoredGroup) -> GroupEvent | None:
    payload = group.payload
    if payload is None and service.journal is not None and group.location is not None:
        payload = service.journal.read(group.location)
    if payload is None:
        return None
    env = service.store.envs.get(group.env_id)
    event = GroupEvent(
        key=group.key,
        group_id=group.group_id,
        env_id=group.env_id,
        env_name=env.wandb_name if env else None,
        size=group.size,
        num_tokens=group.num_tokens,
        scores=[],
        policy_versions=None,
        reward_components=None,
        payload=payload,
        binary=group.binary,
    )
    try:
        content = event.decode()
    except (ValueError, msgspec.MsgspecError) as error:
        logger.warning("group %s is in the journal and cannot be read for the page: %s", group.group_id, error)
        return None
    event.scores = [float(score) for score in content["scores"]]
    event.policy_versions = content.get("policy_versions")
    event.reward_components = content.get("reward_components")
    return event
