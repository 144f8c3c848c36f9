"""The compiled reader of posted JSON groups (`scan.c`): same result as the Python one, several times faster, without the GIL.
And two helpers for arrays: `all_finite`, and `crc32`, which is zlib's by the processor's own instructions where it has them.

`prepare` compiles it once (`atroposlib.native`); the rollout server calls it at start. Where that is not possible, `scan` is
never available and the Python reader does the work.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from atroposlib import native
from atroposlib.api.number_rows import NotPlainError
from atroposlib.api.schemas import EXTRA_FIELDS, GROUP_FIELDS
from atroposlib.api.slabs import new_mapping

SOURCE = Path(__file__).with_name("scan.c")
FIELDS = (*GROUP_FIELDS, *EXTRA_FIELDS)
_KINDS = {"tokens": 1, "masks": 1, "ref_logprobs": 2, "inference_logprobs": 2}
_MAX_ROWS = 65_536
_KEPT_BUFFER = 4 * 2**20

_MIN_BYTES = 512  # less than this is done before the call has begun

_library: ctypes.CDLL | None = None
_crc32: Callable[[Any, int, int], int] | None = None
_all_finite: Callable[[Any, int], int] | None = None
_names = b"".join(name.encode() + b"\0" for name in FIELDS)
_kinds = (ctypes.c_int32 * len(FIELDS))(*(_KINDS.get(name, 0) for name in FIELDS))
_local = threading.local()


class Scanned(NamedTuple):
    """The fields of a group: `text` (of numbers: compact) by name, and the row lengths of the number fields."""

    text: dict[str, memoryview]
    lengths: dict[str, list[int]]


def available() -> bool:
    """Whether `scan` may be called."""
    return _library is not None


def prepare() -> bool:
    """Load the compiled reader, compiling it if it is not in the cache. False, and a line in the log, when that is not possible."""
    global _library, _crc32, _all_finite
    if _library is not None:
        return True
    library = native.load(SOURCE)
    if library is None:
        return False
    function = library.atropos_scan
    function.restype = ctypes.c_int64
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_int32,
        *[ctypes.c_void_p] * 3,
        ctypes.c_int64,
    ]
    # The helpers keep the interpreter's lock: handing it over would take longer than what they do.
    helpers = ctypes.PyDLL(library._name, handle=library._handle)
    crc32, all_finite = helpers.atropos_crc32, helpers.atropos_all_finite
    crc32.restype, crc32.argtypes = ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32]
    all_finite.restype, all_finite.argtypes = ctypes.c_int32, [ctypes.c_void_p, ctypes.c_int64]
    _crc32 = crc32 if crc32(b"", 0, 0) == 0 else None
    _all_finite = all_finite if sys.byteorder == "little" else None
    _library = library
    return True


def scan(body: bytes) -> Scanned:
    """The fields of the group in this body; NotPlainError when it is not surely well-formed or has an unknown field.

    Fields that are no numbers are found, not checked. The views are good until the next call on this thread.
    """
    library = _library
    if library is None:
        raise NotPlainError
    size = len(body)
    source = np.frombuffer(body, np.uint8)
    out, spans, lengths = _buffers(size)
    written = library.atropos_scan(
        _address(source),
        size,
        _names,
        ctypes.addressof(_kinds),
        len(FIELDS),
        _address(out),
        _address(spans),
        _address(lengths),
        _MAX_ROWS,
    )
    if written < 0:
        raise NotPlainError
    text: dict[str, memoryview] = {}
    rows: dict[str, list[int]] = {}
    numbers, whole = out.data, memoryview(body)
    for name, (start, end, first, count) in zip(FIELDS, spans.tolist(), strict=True):
        if start < 0:
            continue
        if count < 0:
            text[name] = whole[start:end]
        else:
            text[name] = numbers[start:end]
            rows[name] = lengths[first : first + count].tolist()
    return Scanned(text, rows)


def crc32(data: bytes | bytearray | memoryview, start: int = 0) -> int:
    """`zlib.crc32`."""
    where = None if _crc32 is None or len(data) < _MIN_BYTES else native.address(data)
    return zlib.crc32(data, start) if _crc32 is None or where is None else _crc32(where, len(data), start)


def all_finite(data: memoryview) -> bool:
    """Whether these little-endian float32 are all finite; False when that is not sure."""
    where = None if _all_finite is None else native.address(data)
    return _all_finite is not None and where is not None and bool(_all_finite(where, len(data) // 4))


def _buffers(size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Where the results go: kept for the next call on this thread unless they are large."""
    if not hasattr(_local, "spans"):
        _local.spans = np.empty((len(FIELDS), 4), np.int64)
        _local.lengths = np.empty(_MAX_ROWS, np.int64)
        _local.out = np.empty(0, np.uint8)
    out = _local.out
    if out.size < size:
        if size > _KEPT_BUFFER:  # not from the heap, which would keep it for this thread
            return np.frombuffer(new_mapping(size), np.uint8), _local.spans, _local.lengths
        out = _local.out = np.empty(max(size, 2**16), np.uint8)
    return out, _local.spans, _local.lengths


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
