"""What a model replica pushes to every gateway that watches it: one report, as bytes. Pure: struct, no pickle.

All integers are little-endian; `marks` are arrays of u64 with a count u32 in front.

    report   length u32 (bytes that follow) | magic b"AR" | version u8 | flags u8 | numbers
             | model length u16 | replica id length u16 | seen count u16 | model, replica id (UTF-8)
             | marks: landmarks added, dropped, adapters on the device, on their way
             | seen * (length u16 | request id (UTF-8))

Flag 1: whole, what was told before is void. Flag 2: adapters are told; without it nothing about them has changed. It
travels on the token channel between frames. Whatever does not decode to the last byte raises `FrameError`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from adapters.identity import AdapterDigest
from deployments.channel.token_frames import LENGTH, FrameError

MAGIC = b"AR"
VERSION = 1
MAX_ID_BYTES = 1024
MAX_SEEN = 0xFFFF

_HEAD = struct.Struct("<2sBB6I5dHHH")
_COUNT = struct.Struct("<I")
_SHORT = struct.Struct("<H")
_WHOLE, _ADAPTERS = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """How a replica is, and what has changed since the report before.

    Attributes:
        model: the base model's name.
        replica_id: Serve's.
        queued_tokens: prompt tokens of accepted requests that are still to be computed.
        num_gateways: gateways that watch this replica.
        prefill_tokens_per_s, step_s: as measured; 0 where nothing has been.
        turnover_s: time between two requests' ends while others waited for a row.
        stalled_s: since the last finished step, where there is work.
        adapter_load_s: to read an adapter; 0 where none has been read.
        landmark_blocks: a landmark for so many blocks; 0 where no prefix is kept.
        is_whole: landmarks and adapters are all that there are.
        adapters: marks of those on the device, and of those in host memory or being read; None where unchanged.
        seen: requests of the gateway this goes to, accepted since the report before: they are in the numbers.
    """

    model: str
    replica_id: str
    queued_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    max_running: int = 1
    num_gateways: int = 1
    block_tokens: int = 16
    landmark_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    turnover_s: float = 0.0
    stalled_s: float = 0.0
    adapter_load_s: float = 0.0
    is_whole: bool = False
    landmarks_added: Sequence[int] = ()
    landmarks_dropped: Sequence[int] = ()
    adapters: tuple[Sequence[int], Sequence[int]] | None = None
    seen: Sequence[str] = ()


def adapter_mark(digest: AdapterDigest) -> int:
    """Return the 64 bits of an adapter's digest by which reports speak of it."""
    return int(digest[:16], 16)


def is_report(body: bytes) -> bool:
    """Whether the body of a frame is a report."""
    return body.startswith(MAGIC)


def encode_report(report: LoadReport) -> bytes:
    """Return a report as bytes, its length prefix included.

    Raises:
        FrameError: a number or a name is out of bounds.
    """
    model, replica_id = report.model.encode(), report.replica_id.encode()
    flags = (_WHOLE if report.is_whole else 0) | (_ADAPTERS if report.adapters is not None else 0)
    device, coming = report.adapters or ((), ())
    try:
        parts = [
            _HEAD.pack(
                MAGIC,
                VERSION,
                flags,
                report.queued_tokens,
                report.num_running,
                report.num_waiting,
                report.max_running,
                report.num_gateways,
                report.block_tokens << 16 | report.landmark_blocks,
                report.prefill_tokens_per_s,
                report.step_s,
                report.turnover_s,
                report.stalled_s,
                report.adapter_load_s,
                len(model),
                len(replica_id),
                len(report.seen),
            ),
            model,
            replica_id,
        ]
        for marks in (report.landmarks_added, report.landmarks_dropped, device, coming):
            parts.append(struct.pack(f"<I{len(marks)}Q", len(marks), *marks))
        for request_id in map(str.encode, report.seen):
            parts += [_SHORT.pack(len(request_id)), request_id]
    except struct.error as error:
        raise FrameError("a number in a report is out of bounds") from error
    return LENGTH.pack(sum(map(len, parts))) + b"".join(parts)


def decode_report(body: bytes) -> LoadReport:
    """Return the report in a frame without its length prefix.

    Raises:
        FrameError: the bytes are not exactly a report of this version.
    """
    if len(body) < _HEAD.size:
        raise FrameError("a report ends within its head")
    magic, version, flags, *numbers = _HEAD.unpack_from(body)
    if magic != MAGIC or version != VERSION or flags & ~(_WHOLE | _ADAPTERS):
        raise FrameError(f"not a report of version {VERSION}")
    queued, running, waiting, rows, gateways, blocks, *rates, model_length, id_length, num_seen = numbers
    if not all(math.isfinite(rate) and rate >= 0 for rate in rates) or not rows or not blocks >> 16:
        raise FrameError("a number in a report is out of bounds")
    read = _Reader(body, _HEAD.size)
    model, replica_id = read.text(model_length), read.text(id_length)
    added, dropped, device, coming = (read.marks() for _ in range(4))
    seen = tuple(read.text(read.short()) for _ in range(num_seen))
    read.end()
    return LoadReport(
        model=model,
        replica_id=replica_id,
        queued_tokens=queued,
        num_running=running,
        num_waiting=waiting,
        max_running=rows,
        num_gateways=gateways,
        block_tokens=blocks >> 16,
        landmark_blocks=blocks & 0xFFFF,
        prefill_tokens_per_s=rates[0],
        step_s=rates[1],
        turnover_s=rates[2],
        stalled_s=rates[3],
        adapter_load_s=rates[4],
        is_whole=bool(flags & _WHOLE),
        landmarks_added=added,
        landmarks_dropped=dropped,
        adapters=(device, coming) if flags & _ADAPTERS else None,
        seen=seen,
    )


class _Reader:
    """Takes a body apart, every length checked against what is there."""

    def __init__(self, body: bytes, offset: int) -> None:
        self._body = body
        self._offset = offset

    def take(self, num_bytes: int) -> bytes:
        start, self._offset = self._offset, self._offset + num_bytes
        if self._offset > len(self._body):
            raise FrameError("a report ends before its last field")
        return self._body[start : self._offset]

    def short(self) -> int:
        return int(_SHORT.unpack(self.take(_SHORT.size))[0])

    def text(self, num_bytes: int) -> str:
        if not 0 < num_bytes <= MAX_ID_BYTES:
            raise FrameError(f"a name of {num_bytes} bytes is not within 1 and {MAX_ID_BYTES}")
        try:
            return self.take(num_bytes).decode()
        except UnicodeDecodeError as error:
            raise FrameError("a name in a report is not UTF-8") from error

    def marks(self) -> tuple[int, ...]:
        (count,) = _COUNT.unpack(self.take(_COUNT.size))
        return struct.unpack(f"<{count}Q", self.take(8 * count))

    def end(self) -> None:
        if self._offset != len(self._body):
            raise FrameError(f"{len(self._body) - self._offset} bytes too many at the end of a report")
