"""From a scored result to the rollout server: check, complete, log, write, hand over.

A group that fails a check is counted under its reason. A group the rollout server refuses is counted and kept in
``rejected_groups.jsonl``. A rollout server that is away is waited for; nothing is dropped.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atroposlib.envs import groups
from atroposlib.envs.env_checkpoint import checkpoint_folder
from atroposlib.envs.group_writer import JsonlWriter, to_plain
from atroposlib.errors import RolloutRejectedError

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv

logger = logging.getLogger(__name__)
REJECTED_FILE = "rejected_groups.jsonl"
RETRY_S = 1.0


async def accept_and_send(
    env: BaseEnv, scored_data: Any, item: Any, *, do_send_to_api: bool, abort_on_any_max_length_exceeded: bool
) -> None:
    """Take every group of a result through the checks and send what passes."""
    is_list = isinstance(scored_data, list)
    accepted: list[dict[str, Any]] = []
    for group in scored_data if is_list else [scored_data]:
        if group is None:
            continue
        rejection = await accept(env, group, item, check_length=abort_on_any_max_length_exceeded)
        if rejection is None:
            accepted.append(group)
        else:
            env.statistics.note_rejected(*rejection)
    if not accepted or not do_send_to_api:
        return
    env.items_sent_this_step += len(accepted)
    await env._send_scored_data_to_api(accepted if is_list else accepted[0])


async def accept(env: BaseEnv, group: dict[str, Any], item: Any, *, check_length: bool) -> groups.Rejection | None:
    """Check one group; what passes is completed, added to the rollout table and written to disk."""
    config = env.config
    rejection = groups.check_group(
        group, group_size=config.group_size, ensure_scores_are_not_same=config.ensure_scores_are_not_same
    )
    if rejection is not None:
        return rejection
    groups.complete_group(group)
    env.completion_lengths.extend(groups.trained_lengths(group))
    if env.max_token_len > 0 and check_length:
        rejection = groups.check_lengths(group, max_token_len=env.max_token_len)
        if rejection is not None:
            return rejection
    if config.include_messages and not group.get("messages"):
        group["messages"] = groups.messages_from_tokens(group["tokens"], env.tokenizer.decode)
    await env.add_rollouts_for_wandb(group, item)  # type: ignore[arg-type]
    if env.jsonl_writer is not None:
        env.jsonl_writer.write(group)
    env.statistics.num_groups_accepted += 1
    return None


async def hand_over(env: BaseEnv, scored_data: Any) -> None:
    """Submit a group or a list of groups; waits as long as the rollout server is away."""
    batch = scored_data if isinstance(scored_data, list) else [scored_data]
    for group in batch:
        group.setdefault("group_id", uuid.uuid4().hex)  # the same at every try, so that it is stored once
    try:
        await _submit(env, scored_data, batch)
    except RolloutRejectedError as error:
        if len(batch) > 1:
            for group in batch:  # one bad group must not take the others with it
                await hand_over(env, group)
            return
        keep_rejected(env, batch[0], error)
        return
    for group in batch:
        env.statistics.note_sent(group)


async def _submit(env: BaseEnv, scored_data: Any, batch: list[dict[str, Any]]) -> None:
    client = env.rollout_client
    while True:
        env.env_id = getattr(client, "env_id", env.env_id)  # the client may have joined a restarted server
        for group in batch:
            group["env_id"] = env.env_id
        try:
            await client.submit(scored_data)
            return
        except unreachable_errors() as error:
            logger.debug("not handed over yet: %s", error)
            await asyncio.sleep(RETRY_S)


def unreachable_errors() -> tuple[type[Exception], ...]:
    """What a rollout server that is away raises; aiohttp is imported only when something was raised."""
    from aiohttp import ClientError

    return (ClientError, OSError, TimeoutError)


def keep_rejected(env: BaseEnv, group: Mapping[str, Any], error: RolloutRejectedError) -> None:
    """Count a refused group under the status of the refusal and keep it on disk."""
    path = rejected_path(env)
    env.statistics.note_rejected(
        f"http_{error.status}", f"the rollout server refused it: {error.detail}; kept in {path}"
    )
    with JsonlWriter(path) as writer:
        writer.write({"status": error.status, "detail": error.detail, "group": group})


def rejected_path(env: BaseEnv) -> Path:
    """Beside the environment's checkpoints, else beside its data file, else in the working directory."""
    if env.checkpoint_dir:
        return checkpoint_folder(env.checkpoint_dir, env.wandb_prepend) / REJECTED_FILE
    if env.config.data_path_to_save_groups:
        return Path(env.config.data_path_to_save_groups).parent / REJECTED_FILE
    return Path(REJECTED_FILE)


def packed_json(payload: Any, minimum_size: int) -> tuple[bytes, dict[str, str]]:
    """A JSON body and its headers; gzipped from ``minimum_size`` bytes on when that makes it smaller."""
    body = json.dumps(payload, default=to_plain).encode()
    headers = {"Content-Type": "application/json"}
    if len(body) >= minimum_size:
        packed = gzip.compress(body, compresslevel=1)
        if len(packed) < len(body):
            return packed, {**headers, "Content-Encoding": "gzip"}
    return body, headers
