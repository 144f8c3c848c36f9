"""The compiled reader against the Python one on bodies that are right, almost right and broken: same verdict, same group."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.api import native_scan
from atroposlib.api.wire import WireError, parse_json_groups

GOOD: dict[str, Any] = {
    "tokens": [[1, 2, 3], [40, 50]],
    "masks": [[-100, 2, 3], [-100, 50]],
    "scores": [0.5, -1.25e-05],
    "inference_logprobs": [[1.0, -0.5, -2.5e-05], [1.0, -0.25]],
    "messages": [[{"role": "user", "content": 'quote " slash \\ brace } é'}], []],
    "group_overrides": {"a": [1, {"b": "]"}]},
    "env_id": 7,
}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Iterator[None]:
    if not native_scan.prepare():
        pytest.skip("no C compiler here")
    library = native_scan._library
    yield
    native_scan._library = library


def verdict(body: bytes, *, native: bool) -> Any:
    """The group as JSON says it, or None for a refusal."""
    library = native_scan._library
    native_scan._library = library if native else None
    try:
        [group] = parse_json_groups(body, many=False)
    except WireError:
        return None
    finally:
        native_scan._library = library
    return json.loads(bytes(group.payload)), group.size, group.num_tokens, group.scores, group.env_id, group.group_id


def check(body: bytes) -> None:
    assert verdict(body, native=True) == verdict(body, native=False), body


number = st.one_of(
    st.integers(-200, 200).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(
        ["01", "-", "-0", "1.", ".5", "1e", "1e5", "1E-7", "+1", "1e999", "9" * 320, "0x1", "NaN", "null", '"1"', ""]
    ),
)
blank = st.sampled_from(["", " ", "\n", "\t ", " " * 20])


@settings(max_examples=300)
@given(
    field=st.sampled_from(["tokens", "masks", "inference_logprobs", "ref_logprobs"]),
    cells=st.lists(number, min_size=1, max_size=4),
    space=blank,
)
def test_any_number_in_any_row(field: str, cells: list[str], space: str) -> None:
    row = f"[{space}{f',{space}'.join(cells)}{space}]"
    plain = [1] * len(cells)
    group = {"tokens": [plain], "masks": [plain], "scores": [1.0]}
    group.pop(field, None)
    body = json.dumps(group)[:-1] + f',{space}"{field}"{space}:{space}[{row}]{space}}}{space}'
    check(body.encode())


def mutate_bytes(rng: random.Random, body: bytearray) -> None:
    for _ in range(rng.randrange(1, 4)):
        body[rng.randrange(len(body))] = rng.choice(b'[]{},:"\\ -.eE019\x00\xff\n')


def cut(rng: random.Random, body: bytearray) -> None:
    del body[rng.randrange(len(body)) :]


def double(rng: random.Random, body: bytearray) -> None:
    start = rng.randrange(len(body))
    body[start:start] = body[start : start + rng.randrange(1, 40)]


def drop(rng: random.Random, body: bytearray) -> None:
    start = rng.randrange(len(body))
    del body[start : start + rng.randrange(1, 20)]


@pytest.mark.parametrize("change", [mutate_bytes, cut, double, drop])
@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
def test_broken_bodies(change: Callable[[random.Random, bytearray], None], separators: tuple[str, str]) -> None:
    rng = random.Random(5)
    text = json.dumps(GOOD, separators=separators, ensure_ascii=False).encode()
    for _ in range(600):
        body = bytearray(text)
        change(rng, body)
        check(bytes(body))


def test_good_bodies_in_every_order() -> None:
    rng = random.Random(6)
    for _ in range(50):
        names = list(GOOD)
        rng.shuffle(names)
        check(json.dumps({name: GOOD[name] for name in names}, indent=rng.choice([None, 0, 2])).encode())
