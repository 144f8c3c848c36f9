"""Everything that can happen to the rollout store, as records: what the journal holds and what replay applies.

A record is small; the bytes of a group travel beside its `GroupAdded`. Applying the same records in the same order gives the
same state, live and after a restart.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class GroupAdded(msgspec.Struct, tag="group", omit_defaults=True):
    """A group was accepted; its payload follows the record."""

    key: int
    size: int
    num_tokens: int
    group_id: str
    env_id: int | None = None
    binary: bool = False
    given_id: bool = False
    """The client chose the id, so the same id may come again."""


class Registered(msgspec.Struct, tag="register"):
    """A trainer registered (again)."""

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int
    resume_after: int | None = None


class Started(msgspec.Struct, tag="started"):
    """The trainer asked for its first batch: environments may register from now on."""


class EnvRegistered(msgspec.Struct, tag="env"):
    """An environment registered, or came back with the id it had."""

    env_id: int
    desired_name: str
    wandb_name: str
    max_token_length: int
    weight: float
    group_size: int
    min_batch_allocation: float | None = None


class EnvGone(msgspec.Struct, tag="env_gone"):
    """An environment said goodbye."""

    env_id: int


class BatchFormed(msgspec.Struct, tag="batch"):
    """These groups are batch `seq`, for good."""

    seq: int
    keys: list[int]


class BatchSent(msgspec.Struct, tag="sent"):
    """The whole reply with this batch went out to a client that acknowledges by asking for the next (`plain`) or explicitly."""

    seq: int
    plain: bool


class BatchAcked(msgspec.Struct, tag="ack"):
    """The trainer has these batches. `keep`: they stay stored until a commit covers them."""

    seqs: list[int]
    keep: bool


class Committed(msgspec.Struct, tag="commit"):
    """The trainer's checkpoint of `step` contains every batch up to `seq`."""

    seq: int
    step: int


class WasReset(msgspec.Struct, tag="reset"):
    """Everything was cleared. Keys and batch numbers go on where they were."""


Event: TypeAlias = (
    GroupAdded
    | Registered
    | Started
    | EnvRegistered
    | EnvGone
    | BatchFormed
    | BatchSent
    | BatchAcked
    | Committed
    | WasReset
)

encode_event = msgspec.msgpack.Encoder().encode
decode_event = msgspec.msgpack.Decoder(Event).decode
