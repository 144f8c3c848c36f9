"""Validation of bodies: the fast path, the slow path and the binary form agree on what they take and say."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_calls import group

from atroposlib.api import binary, native_scan, wire
from atroposlib.api.compaction import without_blanks
from atroposlib.api.schemas import EXTRA_FIELDS, GROUP_FIELDS
from atroposlib.api.wire import WireError, WireGroup, parse_json_groups


def one(value: Any) -> WireGroup:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return parse_json_groups(body, many=False)[0]


@pytest.fixture(autouse=True, params=["compiled", "python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test here runs with both readers of JSON."""
    if request.param == "python":
        monkeypatch.setattr(native_scan, "_library", None)
    elif not native_scan.prepare():
        pytest.skip("no C compiler here")
    return str(request.param)


@pytest.fixture
def no_slow_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(body: bytes, *, many: bool) -> list[WireGroup]:
        raise AssertionError("the slow path was taken")

    monkeypatch.setattr(wire, "_slow", fail)


FAST = [
    group(1),
    group(1, inference_logprobs=[[1.0, -0.5, -1e-07]] * 4),
    group(1, inference_logprobs=[[0, -1, 2.5e-300]] * 4, ref_logprobs=[[-1.5, -2, -3]] * 4),
    group(1, advantages=[[1.0], []], overrides=[{"a": 1}], group_overrides={}, generation_params={"stop": ["x, [1]"]}),
    group(1, messages=[[{"role": "a", "content": {"x": [1]}, "extra": None}], []], images=[["data:..."]], env_id=3),
    group(1, group_id="id", policy_versions=[[1, 2]] * 4, reward_components={"a": [0.0, 1, 2, 3]}),
    group(1, distill_token_ids=[[[1]] * 3] * 4, distill_logprobs=[[[-0.5]] * 3] * 4),
    group(1)
    | dict.fromkeys(
        ("advantages", "ref_logprobs", "messages", "inference_logprobs", "env_id", "group_id", "images"), None
    ),
    group(-5, length=1, size=1),
    group(1) | {"unknown": {"x": [1]}},
]


@pytest.mark.usefixtures("no_slow_path")
@pytest.mark.parametrize("value", FAST)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_well_formed_groups_take_the_fast_path_and_keep_every_value(
    value: dict[str, Any], separators: tuple[str, str]
) -> None:
    parsed = one(json.dumps(value, separators=separators).encode())
    stored = json.loads(bytes(parsed.payload))
    assert tuple(stored)[:14] == GROUP_FIELDS
    assert set(stored) - set(GROUP_FIELDS) <= set(EXTRA_FIELDS)
    expected = {name: value.get(name) for name in GROUP_FIELDS} | {
        name: value[name] for name in EXTRA_FIELDS if value.get(name) is not None
    }
    assert stored == expected
    assert parsed.size == len(value["tokens"])
    assert parsed.num_tokens == sum(map(len, value["tokens"]))
    assert parsed.scores == value["scores"]
    assert (parsed.env_id, parsed.group_id) == (value.get("env_id"), value.get("group_id"))


@pytest.mark.usefixtures("no_slow_path")
def test_numbers_of_a_group_can_be_stored_compactly() -> None:
    value = group(
        1, length=500, inference_logprobs=[[-0.123456] * 500] * 4, messages=[[{"role": "user", "content": "1, 2"}]] * 4
    )
    stored = one(json.dumps(value).encode())
    compact = without_blanks(stored.payload, stored.blanks)
    assert json.loads(compact) == json.loads(bytes(stored.payload))
    assert len(compact) < len(json.dumps(value, separators=(",", ":"))) + 300


BAD_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1E+400", "9" * 400, "null", "true", '"x"', "[1]", "{}"]


@pytest.mark.parametrize("bad", BAD_NUMBERS)
@pytest.mark.parametrize("field", ["tokens", "masks", "scores", "inference_logprobs", "ref_logprobs"])
def test_no_bad_number_gets_in(field: str, bad: str) -> None:
    value = group(1, inference_logprobs=[[-0.5] * 3] * 4, ref_logprobs=[[-0.5] * 3] * 4)
    if field == "scores":
        value["scores"][2] = "MARK"
    else:
        value[field] = [list(row) for row in value[field]]
        value[field][2][1] = "MARK"
    body = json.dumps(value).replace('"MARK"', bad).encode()
    if bad == "true":  # lenient readers take it for 1
        stored = json.loads(bytes(one(body).payload))[field][2]
        assert (stored if field == "scores" else stored[1]) == 1
        return
    if bad == "9" * 400 and field in ("tokens", "masks"):  # an integer, if an absurd one: a token id nobody has
        return
    with pytest.raises(WireError) as caught:
        one(body)
    assert caught.value.status == 422
    assert field in caught.value.detail[0]["loc"] or field in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"x"',
        b"{}",
        b"\xff\xfe",
        b"[" * 5000,
        b'{"tokens":' * 3000,
        b'{"tokens":[[1]],"masks":[[1]],"scores":[1],}',
    ],
)
def test_what_is_no_group_is_refused(body: bytes) -> None:
    for many in (False, True):
        if many and body == b"[]":
            assert parse_json_groups(body, many=True) == []
            continue
        with pytest.raises(WireError):
            parse_json_groups(body, many=many)


numbers = st.floats(allow_nan=False, allow_infinity=False, width=64)
rows = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6)


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    tokens = draw(st.lists(rows, min_size=1, max_size=4))
    value: dict[str, Any] = {
        "tokens": tokens,
        "masks": [draw(st.lists(st.integers(-100, 10), min_size=len(row), max_size=len(row))) for row in tokens],
        "scores": draw(st.lists(numbers, min_size=len(tokens), max_size=len(tokens))),
    }
    if draw(st.booleans()):
        value["inference_logprobs"] = [
            draw(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=len(row), max_size=len(row)))
            for row in tokens
        ]
    if draw(st.booleans()):
        value["messages"] = draw(
            st.lists(st.lists(st.fixed_dictionaries({"role": st.text(), "content": st.text()}), max_size=2), max_size=3)
        )
    if draw(st.booleans()):
        value["advantages"] = draw(
            st.lists(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=3), max_size=3)
        )
    return value


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=groups(), compact=st.booleans())
def test_both_forms_keep_every_value(value: dict[str, Any], compact: bool) -> None:
    text = json.dumps(value, separators=(",", ":") if compact else None).encode()
    stored = json.loads(bytes(one(text).payload))
    assert {name: stored[name] for name in value} == value
    packed = binary.encode_group(value)
    (parsed,) = binary.parse_binary_groups(packed, many=False)
    assert (parsed.size, parsed.num_tokens, parsed.scores) == (
        len(value["tokens"]),
        sum(map(len, value["tokens"])),
        value["scores"],
    )
    for again in (json.loads(binary.to_json(packed)), _plain(binary.decode_group(packed))):
        assert {name: again[name] for name in value} == value


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    arrays = ("tokens", "masks", "inference_logprobs", "ref_logprobs", "advantages")
    return {
        name: [row.tolist() for row in item] if name in arrays and item is not None else item
        for name, item in value.items()
    }


# ---- the binary form --------------------------------------------------------------------------------------------------


def packed_with(**changes: Any) -> bytes:
    content = msgspec.msgpack.decode(binary.encode_group(group(1, inference_logprobs=[[-0.5] * 3] * 4)))
    return msgspec.msgpack.encode({**content, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": b"\0" * 44}, "'tokens' has 11 entries and 'lengths' add up to 12"),
        ({"masks": b"\0" * 13}, "'masks' has 13 bytes, which is no multiple of 4"),
        ({"inference_logprobs": np.full(12, np.nan, "<f4").tobytes()}, "'inference_logprobs' holds nan at position 0"),
        ({"ref_logprobs": np.full(12, np.inf, "<f4").tobytes()}, "'ref_logprobs' holds inf"),
        ({"scores": np.array([0, 1, 2, math.inf]).tobytes()}, "score 3 is inf"),
        ({"scores": np.array([0.0, 1.0]).tobytes()}, "'scores' has 2 entries and 'tokens' has 4 sequences"),
        ({"lengths": np.array([3, 3, 9, -3], "<i4").tobytes()}, "'lengths' holds -3"),
        (
            {"lengths": b"", "tokens": b"", "masks": b"", "scores": b"", "inference_logprobs": None},
            "the group is empty",
        ),
        ({"tokens": "text"}, "cannot be read"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"messages": [[{"role": "user"}]]}, "needs role and content"),
        (
            {"advantages": {"lengths": np.array([2], "<i4").tobytes(), "values": np.zeros(3, "<f4").tobytes()}},
            "lengths that do not add up",
        ),
        ({"policy_versions": [[1]]}, "'policy_versions' has 1 entries for 4 sequences"),
    ],
)
def test_bad_binary_groups_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        binary.parse_binary_groups(packed_with(**changes), many=False)


def test_large_finite_values_are_not_taken_for_infinite() -> None:
    big = np.full(12, np.finfo(np.float32).max, "<f4").tobytes()
    assert binary.parse_binary_groups(packed_with(inference_logprobs=big), many=False)[0].num_tokens == 12


def test_a_binary_batch_mixes_both_forms() -> None:
    text = one(group(1)).payload
    packed = binary.encode_group(group(2, group_id="b"))
    body = binary.batch_header(7, ["a", "b"], 2) + binary.bin_head(len(text)) + bytes(text) + packed
    seq, items, ids = binary.decode_batch(body)
    assert (seq, ids) == (7, ["a", "b"])
    assert items is not None
    assert [int(item["tokens"][0][0]) for item in items] == [1, 2]
    assert [set(item) - set(GROUP_FIELDS) for item in items] == [set(), {"group_id"}]
    assert binary.decode_batch(msgspec.msgpack.encode({"batch": None})) == (None, None, [])


@pytest.mark.parametrize("name", ["tokens", "masks"])
@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 10**10, -(10**10), 10**30])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_ids_that_no_trainer_could_take_are_refused(name: str, value: int, separators: tuple[str, str]) -> None:
    for position in range(3):
        sent = group(1)
        sent[name] = [list(row) for row in sent[name]]
        sent[name][2][position] = value
        with pytest.raises(WireError, match=f"'{name}' of sequence 2 holds {value} at position {position}") as refused:
            one(json.dumps(sent, separators=separators).encode())
        assert refused.value.detail[0]["loc"] == ["body", name, 2, position]
        assert refused.value.status == 422


@pytest.mark.parametrize("value", [2**31 - 1, -(2**31), 10**9, 999_999_999, -1, -100, -200])
def test_ids_of_32_bits_are_taken_also_negative_ones_that_mark_places(value: int) -> None:
    for position in range(3):
        sent = group(1)
        sent["tokens"] = [list(row) for row in sent["tokens"]]
        sent["tokens"][3][position] = value
        assert json.loads(bytes(one(sent).payload))["tokens"] == sent["tokens"]
