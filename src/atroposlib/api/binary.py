"""The binary form of a group: a msgpack map with little-endian arrays, for clients of ours.

    lengths            int32[S]     tokens of each sequence
    tokens, masks      int32[sum]   all sequences one after the other
    scores             float64[S]
    inference_logprobs, ref_logprobs   float32[sum] or nil
    advantages         nil, or {"lengths": int32[], "values": float32[]} (its lengths are never checked)
    everything else    as in JSON

Content type `application/vnd.atropos+msgpack`; a list of groups is a msgpack array of such maps. A batch is
`{"batch_seq", "group_ids", "batch": [...]}` in which a group that was posted as JSON is a msgpack `bin` holding its JSON text:
the server never turns one form into the other for clients that read both.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Raw

from atroposlib.api import native_scan
from atroposlib.api.schemas import EXTRA_FIELDS, GROUP_FIELDS
from atroposlib.api.wire import WireError, WireGroup, check_extras, check_lengths, located

INT, FLOAT, SCORE = np.dtype("<i4"), np.dtype("<f4"), np.dtype("<f8")
_MESSAGE_FIELDS = (
    "messages",
    "generation_params",
    "overrides",
    "group_overrides",
    "images",
    "distill_token_ids",
    "distill_logprobs",
)
_NOTHING_SAID = (None,) * len(_MESSAGE_FIELDS)


class _Ragged(msgspec.Struct):
    lengths: memoryview
    values: memoryview


class _BinaryGroup(msgspec.Struct, forbid_unknown_fields=True):
    lengths: memoryview
    tokens: memoryview
    masks: memoryview
    scores: memoryview
    inference_logprobs: memoryview | None = None
    ref_logprobs: memoryview | None = None
    advantages: _Ragged | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None
    group_id: str | None = None
    policy_versions: list[list[int]] | None = None
    reward_components: dict[str, list[float]] | None = None


_decode_group = msgspec.msgpack.Decoder(_BinaryGroup).decode
_decode_parts = msgspec.msgpack.Decoder(list[Raw]).decode


# ---- on the server ------------------------------------------------------------------------------------------------------


def parse_binary_groups(body: bytes, *, many: bool) -> list[WireGroup]:
    """Validate a binary body; the bytes are kept as they came."""
    try:
        if not many:
            return [_check(body)]
        return [located(index, _check, bytes(raw)) for index, raw in enumerate(_decode_parts(body))]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(
            f"the binary body cannot be read: {error}; see the docstring of atroposlib.api.binary for the form"
        ) from None


def _check(payload: bytes) -> WireGroup:
    group = _decode_group(payload)
    sizes: list[int] = _items(group.lengths, "i", INT, "lengths")
    scores: list[float] = _items(group.scores, "d", SCORE, "scores")
    if len(scores) != len(sizes) or min(sizes, default=0) <= 0 or not math.isfinite(sum(scores)):
        if sizes and min(sizes) < 0:
            raise WireError(f"'lengths' holds {min(sizes)}; lengths are not negative", "lengths")
        check_lengths(sizes, sizes, scores, {})  # says what is wrong, if anything is
    total = sum(sizes)
    if len(group.tokens) != 4 * total or len(group.masks) != 4 * total:
        for name, data in (("tokens", group.tokens), ("masks", group.masks)):
            _expect(_array(data, INT, name), total, name)
    _check_logprobs(group.inference_logprobs, total, "inference_logprobs")
    _check_logprobs(group.ref_logprobs, total, "ref_logprobs")
    if group.advantages is not None:
        flat, rows = (
            _array(group.advantages.values, FLOAT, "advantages"),
            _array(group.advantages.lengths, INT, "advantages"),
        )
        _expect_finite(flat, "advantages")
        if (rows < 0).any() or rows.sum(dtype=np.int64) != flat.size:
            raise WireError(f"'advantages' has {flat.size} values and lengths that do not add up to that", "advantages")
    if group.policy_versions is not None or group.reward_components is not None:
        check_extras(len(sizes), group.policy_versions, group.reward_components)
    _check_said(group)
    return WireGroup(
        payload=payload,
        binary=True,
        size=len(sizes),
        num_tokens=total,
        scores=scores,
        env_id=group.env_id,
        group_id=group.group_id,
        policy_versions=group.policy_versions,
        reward_components=group.reward_components,
    )


def _check_logprobs(values: memoryview | None, total: int, name: str) -> None:
    if values is None or (len(values) == 4 * total and native_scan.all_finite(values)):
        return
    numbers = _array(values, FLOAT, name)  # says what is wrong, if anything is
    _expect(numbers, total, name)
    _expect_finite(numbers, name)


def _check_said(group: _BinaryGroup) -> None:
    """Messages and the like, where there are any."""
    said = (
        group.messages,
        group.generation_params,
        group.overrides,
        group.group_overrides,
        group.images,
        group.distill_token_ids,
        group.distill_logprobs,
    )
    if said == _NOTHING_SAID:
        return
    for sequence, messages in enumerate(group.messages or []):
        for turn, message in enumerate(messages):
            if "role" not in message or "content" not in message:
                raise WireError(
                    f"message {turn} of sequence {sequence} needs role and content",
                    "messages",
                    sequence,
                    turn,
                    kind="missing",
                )
    for name, value in zip(_MESSAGE_FIELDS, said, strict=True):
        _check_sayable(value, name)


def _check_sayable(value: Any, name: str) -> None:
    """What a client sends in the binary form, another may ask for as JSON."""
    if value is None:
        return
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(
            f"'{name}' holds something that JSON has no word for ({error}); send numbers, text, lists, maps", name
        ) from None


def _items(data: memoryview, kind: Literal["i", "d"], dtype: np.dtype[Any], name: str) -> list[Any]:
    """A short array as a list; numpy would take longer to begin than this to end."""
    if len(data) % dtype.itemsize or sys.byteorder != "little":
        return list(_array(data, dtype, name).tolist())  # or says what is wrong
    return data.cast(kind).tolist()


def _array(data: memoryview, dtype: np.dtype[Any], name: str) -> np.ndarray[Any, Any]:
    if len(data) % dtype.itemsize:
        raise WireError(
            f"'{name}' has {len(data)} bytes, which is no multiple of {dtype.itemsize}; send {dtype.name} values", name
        )
    return np.frombuffer(data, dtype)


def _expect(numbers: np.ndarray[Any, Any], total: int, name: str) -> None:
    if numbers.size != total:
        raise WireError(
            f"'{name}' has {numbers.size} entries and 'lengths' add up to {total}; they go position by position", name
        )


def _expect_finite(numbers: np.ndarray[Any, Any], name: str) -> None:
    # NaN is its own minimum and maximum, so two passes that make no array tell all.
    if numbers.size and not (math.isfinite(np.minimum.reduce(numbers)) and math.isfinite(np.maximum.reduce(numbers))):
        first = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise WireError(
            f"'{name}' holds {numbers[first]} at position {first}; every number must be finite", name, first
        )


def batch_header(seq: int, group_ids: list[str], count: int) -> bytes:
    """The opening of a binary batch; `count` groups follow it."""
    encode = msgspec.msgpack.encode
    return (
        b"\x83"
        + encode("batch_seq")
        + encode(seq)
        + encode("group_ids")
        + encode(group_ids)
        + encode("batch")
        + _array_head(count)
    )


def _array_head(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big")


def bin_head(length: int) -> bytes:
    """The head of a msgpack `bin` of this many bytes."""
    return b"\xc6" + length.to_bytes(4, "big")


# ---- on the client ------------------------------------------------------------------------------------------------------


def encode_group(group: dict[str, Any]) -> bytes:
    """A group dict (lists or arrays) in the binary form; TypeError, ValueError or OverflowError when it does not fit into it."""
    tokens = [np.asarray(row, INT) for row in _exact_ints(group["tokens"])]
    sizes = [len(row) for row in tokens]
    content: dict[str, Any] = {
        "lengths": np.asarray(sizes, INT).tobytes(),
        "tokens": _joined(tokens, INT),
        "masks": _positions(group["masks"], sizes, INT),
        "scores": np.asarray([float(score) for score in group["scores"]], SCORE).tobytes(),
    }
    for name in ("inference_logprobs", "ref_logprobs"):
        if group.get(name) is not None and len(group[name]):  # environments send [] for "none"
            content[name] = _positions(group[name], sizes, FLOAT)
    if group.get("advantages") is not None:
        rows = [np.asarray(row, FLOAT) for row in group["advantages"]]
        content["advantages"] = {
            "lengths": np.asarray([len(row) for row in rows], INT).tobytes(),
            "values": _joined(rows, FLOAT),
        }
    for name in (*_MESSAGE_FIELDS, "env_id", *EXTRA_FIELDS):
        if group.get(name) is not None:
            content[name] = group[name]
    return msgspec.msgpack.encode(content)


def join_groups(payloads: list[bytes]) -> bytes:
    """Encoded groups as the body of `/scored_data_list`."""
    return b"".join((_array_head(len(payloads)), *payloads))


def _exact_ints(rows: Any) -> Any:
    for row in rows:
        if len(row) and not isinstance(row[0], int | np.integer):
            raise TypeError(f"token {row[0]!r} is not an integer")
    return rows


def _positions(rows: Any, sizes: list[int], dtype: np.dtype[Any]) -> bytes:
    arrays = [np.asarray(row, dtype) for row in rows]
    if [len(row) for row in arrays] != sizes:
        raise ValueError("lengths disagree; the JSON form carries it to the server, which explains")
    return _joined(arrays, dtype)


def _joined(rows: list[np.ndarray[Any, Any]], dtype: np.dtype[Any]) -> bytes:
    return np.concatenate(rows).astype(dtype, copy=False).tobytes() if rows else b""


def decode_group(payload: bytes | memoryview) -> dict[str, Any]:
    """A group in the binary form as a dict with the 14 keys; per-token fields are lists of numpy arrays."""
    group = _decode_group(payload)
    lengths = np.frombuffer(group.lengths, INT)
    result: dict[str, Any] = dict.fromkeys(GROUP_FIELDS)
    for name, dtype in (("tokens", INT), ("masks", INT), ("inference_logprobs", FLOAT), ("ref_logprobs", FLOAT)):
        data = getattr(group, name)
        if data is not None:
            result[name] = _rows(data, dtype, lengths)
    result["scores"] = np.frombuffer(group.scores, SCORE).tolist()
    if group.advantages is not None:
        result["advantages"] = _rows(group.advantages.values, FLOAT, np.frombuffer(group.advantages.lengths, INT))
    for name in (*_MESSAGE_FIELDS, "env_id"):
        result[name] = getattr(group, name)
    for name in EXTRA_FIELDS:
        if getattr(group, name) is not None:
            result[name] = getattr(group, name)
    return result


def _rows(data: memoryview, dtype: np.dtype[Any], lengths: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """The sequences that were laid one after the other."""
    return np.split(np.frombuffer(data, dtype), np.cumsum(lengths)[:-1]) if lengths.size else []


def to_json(payload: bytes) -> bytes:
    """The JSON text of a binary group, for readers that know only JSON."""
    group = decode_group(payload)
    for name in ("tokens", "masks", "inference_logprobs", "ref_logprobs", "advantages"):
        if group[name] is not None:
            group[name] = [row.tolist() for row in group[name]]
    return msgspec.json.encode(group)


class _BinaryBatch(msgspec.Struct):
    batch: list[Raw] | None
    batch_seq: int | None = None
    group_ids: list[str] = []


def decode_batch(body: bytes) -> tuple[int | None, list[dict[str, Any]] | None, list[str]]:
    """Sequence number, groups (None: no batch yet) and group ids of a binary `/batch` reply."""
    reply = msgspec.msgpack.decode(body, type=_BinaryBatch)
    if reply.batch is None:
        return reply.batch_seq, None, []
    groups = []
    for raw in reply.batch:
        item = bytes(raw)
        if item[0] in (0xC4, 0xC5, 0xC6):  # a bin: the JSON text of the group
            groups.append(msgspec.json.decode(msgspec.msgpack.decode(item)))
        else:
            groups.append(decode_group(item))
    return reply.batch_seq, groups, reply.group_ids
