"""The store's state without payloads, to disk and back."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from atroposlib.api.batching import GroupMeta
from atroposlib.api.events import EnvRegistered, Registered
from atroposlib.api.leases import Batch, LeaseState
from atroposlib.api.store import IdTable, RolloutStore, StoredGroup
from atroposlib.errors import JournalError

_VERSION = 1


class _Group(msgspec.Struct, array_like=True):
    key: int
    size: int
    num_tokens: int
    group_id: str
    env_id: int | None
    binary: bool
    location: tuple[int, int, int]


class _Env(msgspec.Struct):
    registered: EnvRegistered
    connected: bool
    largest_group: int
    num_groups: int
    num_tokens: int
    pieces: list[int]


class _Batch(msgspec.Struct, array_like=True):
    seq: int
    keys: list[int]
    state: int
    sent: bool
    sent_plain: bool
    retained: bool


class _Seen(msgspec.Struct):
    received: bytes  # 16 bytes per id
    buffered: dict[bytes, int]


class Snapshot(msgspec.Struct):
    """Everything but payloads."""

    lsn: int
    next_key: int
    next_seq: int
    committed: int
    forgotten: int
    delivered: int
    registration: Registered | None
    started: bool
    max_token_len: int
    envs: list[_Env]
    groups: list[_Group]
    queued: list[int]
    batches: list[_Batch]
    seen: list[_Seen]  # older, recent
    version: int = _VERSION


def take_snapshot(store: RolloutStore, lsn: int) -> Snapshot:
    """The state as of record `lsn`, apart from the store: it may change while this is encoded on a thread."""
    ledger = store.ledger
    return Snapshot(
        lsn=lsn,
        next_key=store.next_key,
        next_seq=ledger.next_seq,
        committed=ledger.committed,
        forgotten=ledger.forgotten,
        delivered=ledger.delivered,
        registration=store.registration,
        started=store.started,
        max_token_len=store.max_token_len,
        envs=[
            _Env(
                registered=EnvRegistered(
                    env.env_id,
                    env.desired_name,
                    env.wandb_name,
                    env.max_token_length,
                    env.weight,
                    env.group_size,
                    env.min_batch_allocation,
                ),
                connected=env.connected,
                largest_group=env.largest_group,
                num_groups=env.num_groups,
                num_tokens=env.num_tokens,
                pieces=env.pieces.keys,
            )
            for env in store.envs.all
        ],
        groups=[
            _Group(g.key, g.size, g.num_tokens, g.group_id, g.env_id, g.binary, g.location)
            for g in store.groups.values()
            if g.location is not None
        ],
        queued=[key for key in store.groups if key in store.queue],
        batches=[_Batch(b.seq, b.keys, b.state, b.sent, b.sent_plain, b.retained) for b in ledger.batches.values()],
        seen=[_pack_seen(store.seen.older), _pack_seen(store.seen.recent)],
    )


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """With a checksum in front."""
    data = msgspec.msgpack.encode(snapshot)
    return zlib.crc32(data).to_bytes(4, "little") + data


def _pack_seen(seen: IdTable) -> _Seen:
    return _Seen(bytes(seen.digests), seen.buffered.copy())


def _unpack_seen(saved: _Seen) -> IdTable:
    seen, blob = IdTable(), saved.received
    seen.answers = dict.fromkeys((blob[i : i + 16] for i in range(0, len(blob), 16)), -1) | saved.buffered
    seen.digests, seen.buffered = bytearray(blob), saved.buffered
    return seen


def restore_snapshot(path: Path, store: RolloutStore, read: Callable[[tuple[int, int, int]], bytes]) -> int:
    """Put an empty store where the snapshot was; returns the number of the last record it covers (0: no snapshot)."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    if zlib.crc32(data[4:]).to_bytes(4, "little") != data[:4]:
        raise JournalError(f"the snapshot {path} is damaged; restore the data folder, or move it away to start afresh")
    try:
        snapshot = msgspec.msgpack.decode(data[4:], type=Snapshot)
    except msgspec.MsgspecError as error:
        raise JournalError(
            f"the snapshot {path} cannot be read ({error}); it was written by another version"
        ) from error
    if snapshot.version != _VERSION:
        raise JournalError(
            f"the snapshot {path} has version {snapshot.version} and this server reads {_VERSION}; "
            "use the version that wrote it, or move the data folder away to start afresh"
        )
    _restore_small(snapshot, store)
    _restore_groups(snapshot, store, read)
    return snapshot.lsn


def _restore_small(snapshot: Snapshot, store: RolloutStore) -> None:
    ledger = store.ledger
    store.next_key = snapshot.next_key
    ledger.next_seq, ledger.committed, ledger.forgotten = snapshot.next_seq, snapshot.committed, snapshot.forgotten
    ledger.delivered = snapshot.delivered
    store.registration, store.started, store.max_token_len = (
        snapshot.registration,
        snapshot.started,
        snapshot.max_token_len,
    )
    store.seen.older, store.seen.recent = map(_unpack_seen, snapshot.seen)
    for saved in snapshot.envs:
        env = store.envs.apply(saved.registered)
        env.connected, env.largest_group = saved.connected, saved.largest_group
        env.num_groups, env.num_tokens = saved.num_groups, saved.num_tokens
    for item in snapshot.batches:
        batch = Batch(item.seq, item.keys, LeaseState(item.state), item.sent_plain, item.sent, item.retained)
        ledger.batches[item.seq] = batch


def _restore_groups(snapshot: Snapshot, store: RolloutStore, read: Callable[[tuple[int, int, int]], bytes]) -> None:
    on_disk = {key for batch in store.ledger.batches.values() if batch.retained for key in batch.keys}
    for g in snapshot.groups:
        payload = None if g.key in on_disk else read(g.location)
        store.groups[g.key] = StoredGroup(
            g.key, g.size, g.num_tokens, g.group_id, g.env_id, g.binary, payload, g.location[2], g.location
        )
        if g.key in on_disk:
            store.retained_bytes += g.location[2]
    for key in snapshot.queued:
        group = store.groups[key]
        store.queue.add(GroupMeta(key, group.size, group.env_id))
        store.queued_bytes += group.num_bytes
        store.latest = group
    for saved in snapshot.envs:
        env = store.envs.all[saved.registered.env_id]
        for key in saved.pieces:
            env.pieces.add(key, store.groups[key].size)
