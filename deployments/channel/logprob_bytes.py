"""Encode log-probabilities as bytes for a frame. Pure: struct, no pickle.

All numbers are little-endian. Entries follow each other, with no count in front:

    entry     number of top tokens u16 | logprob f32 | rank u32 | (token id i32 | logprob f32) * number
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from engine.request import TokenLogprobs

_HEAD = struct.Struct("<HfI")
_PAIR = struct.Struct("<if")


def pack_logprobs(entries: Sequence[TokenLogprobs]) -> bytes:
    """Return the encoded entries.

    Raises:
        struct.error: a number is out of range.
    """
    parts = []
    for entry in entries:
        parts.append(_HEAD.pack(len(entry.top), entry.logprob, entry.rank))
        parts.extend(_PAIR.pack(*pair) for pair in entry.top)
    return b"".join(parts)


def unpack_logprobs(packed: bytes) -> tuple[TokenLogprobs, ...]:
    """Decode the output of `pack_logprobs`, in float32 precision.

    Raises:
        ValueError: the bytes end within an entry.
    """
    entries = []
    offset = 0
    while offset < len(packed):
        if offset + _HEAD.size > len(packed):
            raise ValueError("log-probabilities end within the head of an entry")
        num_top, logprob, rank = _HEAD.unpack_from(packed, offset)
        offset += _HEAD.size
        end = offset + num_top * _PAIR.size
        if end > len(packed):
            raise ValueError("log-probabilities end within an entry")
        entries.append(TokenLogprobs(logprob, tuple(_PAIR.iter_unpack(packed[offset:end])), rank))
        offset = end
    return tuple(entries)
