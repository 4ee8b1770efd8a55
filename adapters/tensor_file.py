"""Read an untrusted safetensors file. Standard library only; knows bytes and shapes, no tensors.

    | length: 8 bytes, little endian | header: JSON of that length | data |

No memory is allocated for the data until the header is known to describe exactly the bytes in the file.
Source: the format's description in the README of huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from adapters.errors import AdapterError
from adapters.folder import TENSOR_FILE, open_under, refuse_pickle

_Understood = TypeVar("_Understood")

MAX_HEADER_BYTES = 16 << 20
MAX_FILE_BYTES = 8 << 30
MAX_DIMENSION = 1 << 31
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Supported dtypes of LoRA matrices -> bytes per element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of the header: `start` and `end` (bytes, half-open) are relative to the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """A file's tensors by name, and its data."""

    entry_by_name: Mapping[str, TensorEntry]
    data: bytearray

    def bytes_of(self, entry: TensorEntry) -> memoryview:
        """View one tensor's bytes; lives as long as the file object."""
        return memoryview(self.data)[entry.start : entry.end]


def read_tensor_file(
    name: str, folder: str, check: Callable[[Mapping[str, TensorEntry]], object] | None = None
) -> TensorFile:
    """Read the folder's adapter_model.safetensors whole.

    Args:
        check: called with the header's entries before any tensor data is read.

    Raises:
        AdapterError: the file is missing, pickled, truncated, its header is wrong, or `check` raises it.
    """

    def understand(header: bytes, data_bytes: int) -> dict[str, TensorEntry]:
        entry_by_name = parse_header(name, header, data_bytes)
        if check is not None:
            check(entry_by_name)
        return entry_by_name

    entries, data = read_with(name, folder, understand)
    return TensorFile(entry_by_name=entries, data=data)


def read_with(name: str, folder: str, understand: Callable[[bytes, int], _Understood]) -> tuple[_Understood, bytearray]:
    """Read the folder's adapter_model.safetensors; return the result of `understand` for its header, and the data.

    Args:
        understand: called with the header and the number of bytes after it; must check the header as `parse_header`
            does, or have done so earlier for the same header. The data is allocated only after it returns.

    Raises:
        AdapterError: the file is missing, pickled or truncated, or `understand` raises it.
    """
    refuse_pickle(name, folder)
    with open_under(name, folder, TENSOR_FILE) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise AdapterError(name, f"{TENSOR_FILE} has {size} bytes, more than {MAX_FILE_BYTES}")
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            raise AdapterError(name, f"{TENSOR_FILE} is truncated or not a safetensors file")
        if length > MAX_HEADER_BYTES:
            raise AdapterError(name, f"the header of {TENSOR_FILE} is longer than {MAX_HEADER_BYTES} bytes")
        data_bytes = size - 8 - length
        understood = understand(opened.read(length), data_bytes)
        data = bytearray(data_bytes)
        if opened.readinto(data) != data_bytes:  # type: ignore[attr-defined]
            raise AdapterError(name, f"{TENSOR_FILE} became shorter while it was read")
    return understood, data


def parse_header(name: str, content: bytes, data_bytes: int) -> dict[str, TensorEntry]:
    """Return the entries of a header, in the order of their offsets.

    Raises:
        AdapterError: it is not a valid header, or does not describe exactly the `data_bytes` after it.
    """
    try:
        header = json.loads(content, object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError):
        raise AdapterError(name, f"the header of {TENSOR_FILE} is not a JSON object with distinct keys") from None
    if not isinstance(header, dict):
        raise AdapterError(name, f"the header of {TENSOR_FILE} is not a JSON object with distinct keys")
    header.pop("__metadata__", None)
    entries = sorted((_entry(name, key, value) for key, value in header.items()), key=lambda e: (e.start, e.end))
    at = 0
    for entry in entries:
        if entry.start != at:
            raise AdapterError(name, f"tensor {entry.name[:200]!r} overlaps another or leaves a gap")
        at = entry.end
    if at != data_bytes:
        raise AdapterError(
            name, f"{TENSOR_FILE} is truncated or padded: its tensors need {at} bytes, it has {data_bytes}"
        )
    return {entry.name: entry for entry in entries}


def _entry(name: str, key: str, value: object) -> TensorEntry:
    """Check one tensor's description."""
    shown = key[:200]
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise AdapterError(name, f"tensor {shown!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise AdapterError(name, f"tensor {shown!r} has a dtype other than {', '.join(ITEM_BYTES)}")
    if not _are_counts(shape, MAX_DIMENSION) or len(shape) > 8:
        raise AdapterError(name, f"tensor {shown!r} has a shape that is not a list of at most 8 sizes")
    if not _are_counts(offsets, MAX_FILE_BYTES) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise AdapterError(name, f"tensor {shown!r} has data_offsets that are not a range of bytes")
    if math.prod(shape) * ITEM_BYTES[dtype] != offsets[1] - offsets[0]:
        raise AdapterError(name, f"tensor {shown!r} claims a shape that its bytes do not hold")
    if offsets[0] % ITEM_BYTES[dtype]:
        raise AdapterError(name, f"tensor {shown!r} does not begin at a multiple of its element size")
    return TensorEntry(name=key, dtype=dtype, shape=tuple(shape), start=offsets[0], end=offsets[1])


def _are_counts(values: object, bound: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= bound for value in values)


def _refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("duplicate key")
    return members
