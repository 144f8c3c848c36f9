"""From a request body to a validated group in compact bytes, without building Python lists of tokens.

`parse_json_groups` takes what any client posts. The fast path is a compiled reader that walks the text once (`native_scan`) or,
where there is no C compiler, msgspec, which checks that the text is JSON and slices it into one `Raw` per field, and a look at
the bytes of each (`number_rows`) to see that it holds only numbers, how many, and that none overflows. Anything the fast path
does not like goes to the slow path: `json.loads` and the pydantic model, which accepts what lenient clients send (numbers as
strings, extra fields) and otherwise says what is wrong, with the value and its place.

The result keeps the text of the numbers as it came, spliced under the 14 known keys, ready to be spliced into `/batch`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec
import pydantic
from msgspec import Raw

from atroposlib.api import native_scan
from atroposlib.api.number_rows import NotPlainError, row_lengths
from atroposlib.api.schemas import EXTRA_FIELDS, GROUP_FIELDS, ScoredData
from atroposlib.api.slabs import slabs
from atroposlib.errors import AtroposError

T = TypeVar("T")

_NULL = Raw(b"null")


class WireError(AtroposError, ValueError):
    """A body is refused: `status` is the HTTP status, `detail` lists what is wrong, where, and what to do."""

    def __init__(self, msg: str, *loc: str | int, status: int = 422, kind: str = "value_error") -> None:
        super().__init__(msg)
        self.status = status
        self.detail: list[dict[str, Any]] = [{"loc": ["body", *loc], "msg": msg, "type": kind}]


@dataclass(kw_only=True, slots=True)
class WireGroup:
    """A validated group: its bytes and the little that the store has to know."""

    payload: bytes
    """JSON text or msgpack (`binary`), with all the 14 keys; mostly a view of the memory of `atroposlib.api.slabs`."""
    binary: bool
    size: int
    """Sequences in the group."""
    num_tokens: int
    scores: list[float]
    env_id: int | None = None
    group_id: str | None = None
    policy_versions: list[list[int]] | None = None
    reward_components: dict[str, list[float]] | None = field(default=None)
    blanks: Sequence[tuple[int, int]] = ()
    """Parts of a JSON payload that hold nothing but numbers and could do without their white space."""


class _Message(msgspec.Struct):
    role: str
    content: Raw


class _FastGroup(msgspec.Struct):
    tokens: Raw
    masks: Raw
    scores: list[float]
    advantages: Raw = _NULL
    ref_logprobs: Raw = _NULL
    messages: Raw = _NULL
    generation_params: Raw = _NULL
    inference_logprobs: Raw = _NULL
    overrides: Raw = _NULL
    group_overrides: Raw = _NULL
    images: Raw = _NULL
    env_id: int | None = None
    distill_token_ids: Raw = _NULL
    distill_logprobs: Raw = _NULL
    group_id: str | None = None
    policy_versions: list[list[int]] | None = None
    reward_components: dict[str, list[float]] | None = None


_decode_one = msgspec.json.Decoder(_FastGroup).decode
_decode_many = msgspec.json.Decoder(list[_FastGroup]).decode
_CHECKED_PARTS: dict[str, Any] = {
    "advantages": msgspec.json.Decoder(list[list[float]] | None),
    "messages": msgspec.json.Decoder(list[list[_Message]] | None),
    "generation_params": msgspec.json.Decoder(dict[str, Raw] | None),
    "overrides": msgspec.json.Decoder(list[dict[str, Raw]] | None),
    "group_overrides": msgspec.json.Decoder(dict[str, Raw] | None),
    "distill_token_ids": msgspec.json.Decoder(list[list[list[int]]] | None),
    "distill_logprobs": msgspec.json.Decoder(list[list[list[float]]] | None),
    "images": msgspec.json.Decoder(Raw),
    # Rows of numbers are looked at as text; what is not a list of rows must be null.
    "ref_logprobs": msgspec.json.Decoder(None),
    "inference_logprobs": msgspec.json.Decoder(None),
}


_SMALL_PARTS: dict[str, Any] = {
    "scores": msgspec.json.Decoder(list[float]),
    "env_id": msgspec.json.Decoder(int | None),
    "group_id": msgspec.json.Decoder(str | None),
    "policy_versions": msgspec.json.Decoder(list[list[int]] | None),
    "reward_components": msgspec.json.Decoder(dict[str, list[float]] | None),
}


def parse_json_groups(body: bytes, *, many: bool) -> list[WireGroup]:
    """Validate the body of `/scored_data` (one group) or `/scored_data_list` (`many`); WireError says what is wrong."""
    try:
        if not many:
            return [_compiled(body) if native_scan.available() else _fast(_decode_one(body))]
        return [located(index, _fast, group) for index, group in enumerate(_decode_many(body))]
    except (msgspec.MsgspecError, NotPlainError, UnicodeDecodeError, RecursionError):
        return _slow(body, many=many)


def _compiled(body: bytes) -> WireGroup:
    """The fast path where the compiled reader is there; what it does not vouch for goes the way of `_fast`."""
    try:
        text, lengths = native_scan.scan(body)
    except NotPlainError:
        return _fast(_decode_one(body))
    if not {"tokens", "masks"} <= lengths.keys() or "scores" not in text:
        raise NotPlainError
    logprobs: dict[str, list[int]] = {name: rows for name, rows in lengths.items() if name not in ("tokens", "masks")}
    for name, raw in text.items():
        if name not in lengths and name in _CHECKED_PARTS:
            _check_text(raw)
            _CHECKED_PARTS[name].decode(raw)
    small: dict[str, Any] = {
        name: decoder.decode(text[name]) if name in text else None for name, decoder in _SMALL_PARTS.items()
    }
    check_lengths(lengths["tokens"], lengths["masks"], small["scores"], logprobs)
    check_extras(len(lengths["tokens"]), small["policy_versions"], small["reward_components"])
    parts: list[bytes | memoryview] = []
    for name in GROUP_FIELDS:
        parts += (_KEY[name], text.get(name, b"null") if name != "env_id" else msgspec.json.encode(small["env_id"]))
    for name in EXTRA_FIELDS:
        if small[name] is not None:
            parts += (_KEY[name], text[name])
    parts.append(b"}")
    return WireGroup(
        payload=cast(bytes, slabs.join(parts)),
        binary=False,
        size=len(lengths["tokens"]),
        num_tokens=sum(lengths["tokens"]),
        **small,
    )


def located(index: int, check: Callable[[T], WireGroup], group: T) -> WireGroup:
    """Check a group of a list; a refusal says which one."""
    try:
        return check(group)
    except WireError as error:
        error.detail[0]["loc"].insert(1, index)
        raise


# ---- the fast path ----------------------------------------------------------------------------------------------------


def _fast(group: _FastGroup) -> WireGroup:
    for name, decoder in _CHECKED_PARTS.items():
        raw = getattr(group, name)
        if raw is not _NULL and name not in _NUMBER_FIELDS:
            _check_text(raw)
            decoder.decode(raw)
    tokens, lengths = _numbers(group.tokens, floats=False)
    masks, mask_lengths = _numbers(group.masks, floats=False)
    fields: dict[str, bytes | Raw] = {"tokens": tokens, "masks": masks, "scores": msgspec.json.encode(group.scores)}
    logprob_lengths: dict[str, list[int]] = {}
    for name in ("ref_logprobs", "inference_logprobs"):
        raw = getattr(group, name)
        if raw is not _NULL and raw != _NULL:
            fields[name], logprob_lengths[name] = _numbers(raw, floats=True)
    check_lengths(lengths, mask_lengths, group.scores, logprob_lengths)
    check_extras(len(lengths), group.policy_versions, group.reward_components)
    if group.env_id is not None:
        fields["env_id"] = b"%d" % group.env_id
    parts: list[bytes | Raw] = []
    blanks: list[tuple[int, int]] = []
    position = 0
    for name in GROUP_FIELDS:
        text = fields.get(name) or getattr(group, name) or _NULL
        parts += (_KEY[name], text)
        position += len(_KEY[name])
        if isinstance(text, bytes) and name in _NUMBER_FIELDS and b" " in text[:64]:
            blanks.append((position, position + len(text)))
        position += len(text)
    for name in EXTRA_FIELDS:
        value = getattr(group, name)
        if value is not None:
            parts += (_KEY[name], msgspec.json.encode(value))
    parts.append(b"}")
    return WireGroup(
        payload=b"".join(parts),
        binary=False,
        size=len(lengths),
        num_tokens=sum(lengths),
        scores=group.scores,
        env_id=group.env_id,
        group_id=group.group_id,
        policy_versions=group.policy_versions,
        reward_components=group.reward_components,
        blanks=blanks,
    )


_NUMBER_FIELDS = frozenset({"tokens", "masks", "ref_logprobs", "inference_logprobs"})
_KEY = {
    name: f'{"{" if index == 0 else ","}"{name}":'.encode() for index, name in enumerate((*GROUP_FIELDS, *EXTRA_FIELDS))
}


def _check_text(raw: Raw | memoryview) -> None:
    """Text that is passed on as it came has to be UTF-8: a batch is read as a whole."""
    text = bytes(raw)
    if not text.isascii():
        text.decode()


def _numbers(raw: Raw, *, floats: bool) -> tuple[bytes, list[int]]:
    """The text of a list of number lists, and the length of each; NotPlainError when it may hold anything else."""
    text = bytes(raw)
    return text, row_lengths(text, floats=floats)


# ---- checks both paths and the binary form share ------------------------------------------------------------------------


def check_lengths(
    tokens: Sequence[int], masks: Sequence[int], scores: Sequence[float], logprobs: dict[str, list[int]]
) -> None:
    """The number of sequences and the length of each agree; there is something in each; scores are finite."""
    size = len(tokens)
    if size == 0:
        raise WireError("the group is empty: 'tokens' has 0 sequences; send at least one", "tokens")
    logprobs = {name: lengths for name, lengths in logprobs.items() if lengths}  # environments send [] for "none"
    for name, count in (
        ("masks", len(masks)),
        ("scores", len(scores)),
        *((n, len(lens)) for n, lens in logprobs.items()),
    ):
        if count != size:
            raise WireError(
                f"'{name}' has {count} entries and 'tokens' has {size} sequences; send one per sequence", name
            )
    for index, score in enumerate(scores):
        if not math.isfinite(score):
            raise WireError(f"score {index} is {score}; scores must be finite numbers", "scores", index)
    for index, length in enumerate(tokens):
        if length == 0:
            raise WireError(f"sequence {index} has no tokens; leave it out of the group", "tokens", index)
    for name, lengths in (("masks", masks), *logprobs.items()):
        if lengths == tokens:
            continue
        for index, (length, expected) in enumerate(zip(lengths, tokens, strict=True)):
            if length != expected:
                raise WireError(
                    f"'{name}' of sequence {index} has {length} entries and its tokens {expected}; they go position by position",
                    name,
                    index,
                )


def check_extras(size: int, policy_versions: list[list[int]] | None, components: dict[str, list[float]] | None) -> None:
    """The optional per-sequence additions have one entry per sequence."""
    if policy_versions is not None and len(policy_versions) != size:
        raise WireError(
            f"'policy_versions' has {len(policy_versions)} entries for {size} sequences; send one list per sequence",
            "policy_versions",
        )
    for name, values in (components or {}).items():
        if len(values) != size:
            raise WireError(
                f"reward component {name!r} has {len(values)} values for {size} sequences; send one per sequence",
                "reward_components",
                name,
            )
        if not all(map(math.isfinite, values)):
            raise WireError(
                f"reward component {name!r} holds a value that is not finite; send finite numbers",
                "reward_components",
                name,
            )


# ---- the slow path ------------------------------------------------------------------------------------------------------


def _slow(body: bytes, *, many: bool) -> list[WireGroup]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body is not JSON: {error}", kind="json_invalid") from None
    if many and not isinstance(value, list):
        raise WireError(f"expected a list of groups, got {type(value).__name__}; use /scored_data for a single group")
    items = value if many else [value]
    return [_slow_group(item, (index,) if many else ()) for index, item in enumerate(items)]


def _slow_group(value: Any, loc: tuple[int, ...]) -> WireGroup:
    try:
        group = ScoredData.model_validate(value).model_dump()
    except pydantic.ValidationError as error:
        raise _from_pydantic(error, loc) from None
    for sequence, messages in enumerate(group["messages"] or []):
        for turn, message in enumerate(messages):
            if missing := [name for name in ("role", "content") if name not in message]:
                raise WireError(
                    f"message {turn} of sequence {sequence} has no {missing[0]!r}; a message needs role and content",
                    *loc, "messages", sequence, turn, missing[0], kind="missing",
                )  # fmt: skip
    try:
        _check_ids(group)
        check_lengths(
            [len(row) for row in group["tokens"]],
            [len(row) for row in group["masks"]],
            group["scores"],
            {
                name: [len(row) for row in group[name]]
                for name in ("ref_logprobs", "inference_logprobs")
                if group[name] is not None
            },
        )
        check_extras(len(group["tokens"]), group["policy_versions"], group["reward_components"])
    except WireError as error:
        error.detail[0]["loc"][1:1] = loc
        raise
    return group_from_dict(group, loc)


def _check_ids(group: dict[str, Any]) -> None:
    """Token ids fit into 32 bits, as in the binary form: a trainer could not take them. (Negative ones mark places.)"""
    for name in ("tokens", "masks"):
        for sequence, row in enumerate(group[name]):
            if row and (max(row) >= 2**31 or min(row) < -(2**31)):
                position, value = next((i, v) for i, v in enumerate(row) if not -(2**31) <= v < 2**31)
                raise WireError(
                    f"'{name}' of sequence {sequence} holds {value} at position {position}; ids must fit into 32 bits",
                    name,
                    sequence,
                    position,
                )


def group_from_dict(group: dict[str, Any], loc: tuple[int, ...] = ()) -> WireGroup:
    """A checked dict as compact JSON."""
    _refuse_infinite(group, loc)
    content = {name: group.get(name) for name in GROUP_FIELDS}
    content |= {name: group[name] for name in EXTRA_FIELDS if group.get(name) is not None}
    return WireGroup(
        payload=_encoded(content),
        binary=False,
        size=len(group["tokens"]),
        num_tokens=sum(map(len, group["tokens"])),
        scores=group["scores"],
        env_id=group["env_id"],
        group_id=group["group_id"],
        policy_versions=group["policy_versions"],
        reward_components=group["reward_components"],
    )


def _encoded(content: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(content)
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can only say escaped
        return json.dumps(content, separators=(",", ":")).encode()


def _refuse_infinite(value: Any, loc: tuple[str | int, ...]) -> None:
    """JSON has no NaN and no infinity; Python's reader takes them, so look for them everywhere."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise WireError(f"{'.'.join(map(str, loc))} is {value}; every number must be finite", *loc)
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_infinite(item, (*loc, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_infinite(item, (*loc, index))


def _from_pydantic(error: pydantic.ValidationError, loc: tuple[int, ...]) -> WireError:
    problems = error.errors(include_url=False, include_context=False, include_input=True)
    detail = [
        {"loc": ["body", *loc, *p["loc"]], "msg": p["msg"], "type": p["type"], "input": _short(p.get("input"))}
        for p in problems[:8]
    ]
    first = detail[0]
    result = WireError(f"{'.'.join(map(str, first['loc']))}: {first['msg']} (got {first['input']})")
    result.detail = detail
    return result


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
