"""The compiled reader accepts, refuses and keeps exactly what the Python one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rollout_calls import group

from atroposlib.api import native_scan
from atroposlib.api.number_rows import NotPlainError
from atroposlib.api.wire import WireError, parse_json_groups


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    if not native_scan.prepare():
        pytest.skip("no C compiler here")


def outcome(body: bytes, *, native: bool) -> Any:
    """What becomes of a body: the stored group and what is known of it, or that it is refused."""
    library = native_scan._library
    if not native:
        native_scan._library = None
    try:
        (parsed,) = parse_json_groups(body, many=False)
    except WireError as error:
        return [problem["loc"] for problem in error.detail]
    finally:
        native_scan._library = library
    return (
        json.loads(bytes(parsed.payload)),
        parsed.size,
        parsed.num_tokens,
        parsed.scores,
        parsed.env_id,
        parsed.group_id,
        parsed.policy_versions,
    )


FULL = group(5, size=2, inference_logprobs=[[-0.5, 1e-07, 12.25e1]] * 2, ref_logprobs=[[0, -1, 2.5]] * 2, advantages=[[1.0], []], env_id=3,
             messages=[[{"role": "a", "content": "x \\ \" [1,2] {é"}], []], images={"a": [None, "]"]}, generation_params={"n": 1},
             overrides=[{}, {"b": [1]}], group_overrides=None, group_id="id, with \"", policy_versions=[[1], [2]], reward_components={"r": [1, 2]},
             distill_token_ids=[[[1]] * 3] * 2, distill_logprobs=None)  # fmt: skip
BODIES = [
    json.dumps(FULL).encode(),
    json.dumps(FULL, separators=(",", ":")).encode(),
    json.dumps(FULL, indent=1).encode(),
    json.dumps(group(1)).encode(),
]
PIECES = [
    *(
        b"",
        b" ",
        b",",
        b"[",
        b"]",
        b"{",
        b"}",
        b"-",
        b"0",
        b"1e999",
        b".",
        b"null",
        b"NaN",
        b"true",
        b'"',
        b"\\",
        b"\x00",
        b"\xff",
    ),
    *(b"9" * 400, b"[]", b"1.5", b"00"),
]


@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_damaged_bodies_fare_the_same_with_both_readers(data: st.DataObject) -> None:
    body = data.draw(st.sampled_from(BODIES))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(body)))
        stop = min(len(body), start + data.draw(st.integers(0, 8)))
        body = body[:start] + data.draw(st.sampled_from(PIECES)) + body[stop:]
    assert outcome(body, native=True) == outcome(body, native=False)


@pytest.mark.parametrize("body", BODIES)
def test_every_prefix_fares_the_same(body: bytes) -> None:
    for length in range(0, len(body), 7):
        assert outcome(body[:length], native=True) == outcome(body[:length], native=False)
        assert outcome(body[:length] + b"}", native=True) == outcome(body[:length] + b"}", native=False)


numbers = st.one_of(st.floats(-1e250, 1e250), st.integers(-(10**20), 10**20))


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.lists(numbers, min_size=1, max_size=12), min_size=1, max_size=4),
    indent=st.sampled_from([None, 0, 3]),
)
@example(rows=[[1e250, 1e-300, -0.0, 5e-324, 12345678901234567890]], indent=None)
def test_numbers_are_kept_digit_by_digit(rows: list[list[float]], indent: int | None) -> None:
    tokens = [[1] * len(row) for row in rows]
    value = {"tokens": tokens, "masks": tokens, "scores": [0.0] * len(rows), "inference_logprobs": rows}
    stored = outcome(json.dumps(value, indent=indent).encode(), native=True)[0]
    assert json.dumps(stored["inference_logprobs"]) == json.dumps(rows)


def test_fields_are_found_and_numbers_are_compact() -> None:
    scanned = native_scan.scan(b' { "tokens" : [ [ 1 , -2 ] , [ ] ] , "env_id" : 7 , "images" : { "a" : "]}" } } ')
    assert {name: bytes(text) for name, text in scanned.text.items()} == {
        "tokens": b"[[1,-2],[]]",
        "env_id": b"7",
        "images": b'{ "a" : "]}" }',
    }
    assert scanned.lengths == {"tokens": [2, 0]}


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"}",
            b"{",
            b"{}x",
            b"[" * 100,
            b'{"tokens":[[1]]',
            b'{"other":1}',
            b'{"tokens":[[1]],"tokens":[[2]]}',
            b'{"tok\\u0065ns":[[1]]}',
        ),
        *(
            b'{"tokens":[[1],]}',
            b'{"tokens":[[1 2]]}',
            b'{"tokens":[[01]]}',
            b'{"tokens":[[1.0]]}',
            b'{"masks":[[-]]}',
            b'{"masks":[[1}',
        ),
        *(
            b'{"ref_logprobs":[[1.]]}',
            b'{"ref_logprobs":[[1e]]}',
            b'{"ref_logprobs":[[1e300]]}',
            b'{"images":{}',
            b'{"images":}',
        ),
    ],
)
def test_what_is_not_plain_is_left_to_the_others(body: bytes) -> None:
    with pytest.raises(NotPlainError):
        native_scan.scan(body)


def test_threads_do_not_share_buffers() -> None:
    bodies = [json.dumps(group(mark, length=200 + mark)).encode() for mark in range(8)]
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(100):
            stored = json.loads(bytes(parse_json_groups(bodies[mark], many=False)[0].payload))
            if stored["tokens"][0][0] != mark:
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_it_can_be_switched_off_and_a_folder_of_others_is_not_trusted(tmp_path: Path) -> None:
    code = "from atroposlib.api import native_scan; print(native_scan.prepare())"

    def run(**changes: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code], env=os.environ | changes, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert run(ATROPOS_NATIVE="0") == "False"
    (tmp_path / "atropos-atlas").mkdir()
    (tmp_path / "atropos-atlas").chmod(0o777)
    assert run(XDG_CACHE_HOME=str(tmp_path)) == "False"
    assert run(XDG_CACHE_HOME=str(tmp_path / "own")) == "True"
    assert run(XDG_CACHE_HOME=str(tmp_path / "none"), CC="no-such-compiler") == "False"


def test_the_helpers_agree_with_zlib_and_numpy() -> None:
    rng = np.random.default_rng(0)
    for size in (0, 1, 511, 512, 513, 4097, 100_003):
        data = rng.bytes(size)
        for form in (data, bytearray(data), memoryview(data), memoryview(bytearray(data))):
            for start in (0, 1, 0xFFFFFFFF):
                assert native_scan.crc32(form, start) == zlib.crc32(data, start)
    for count in (0, 1, 3, 4, 1000):
        numbers = rng.normal(size=count).astype("<f4")
        at_odd_address = memoryview(bytearray(b"x" + numbers.tobytes()))[1:]
        assert native_scan.all_finite(at_odd_address)
        for bad in (np.nan, np.inf, -np.inf):
            for position in {0, count // 2, count - 1} if count else ():
                spoiled = numbers.copy()
                spoiled[position] = bad
                assert not native_scan.all_finite(memoryview(bytearray(spoiled.tobytes())))
        extreme = np.full(count, np.finfo("f4").max, "<f4")
        assert native_scan.all_finite(memoryview(bytearray(extreme.tobytes())))
