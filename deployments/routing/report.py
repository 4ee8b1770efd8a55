"""The load report that a model replica pushes to every gateway that watches it. Pure.

    report   length u32, little-endian (bytes that follow) | magic b"AR" | JSON: an object of the fields of `LoadReport`

It travels on the token channel between frames. Anything but exactly these fields, each within its bounds, raises
`FrameError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from adapters.identity import AdapterDigest
from deployments.channel.token_frames import LENGTH, FrameError

MAGIC = b"AR"
MAX_ID_CHARS = 1024
MAX_SEEN = 0xFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """A replica's load, and what has changed since its previous report.

    Attributes:
        model: the base model's name.
        replica_id: Serve's id.
        queued_tokens: prompt tokens of accepted requests that are still to be computed.
        num_gateways: number of gateways that watch this replica.
        prefill_tokens_per_s, step_s: as measured; 0 if not measured yet.
        turnover_s: time between two requests' ends while others waited for a row.
        stalled_s: time since the last finished step if there is work.
        adapter_load_s: time to read an adapter; 0 if none has been read.
        landmark_blocks: stride of landmarks in blocks; 0 without a prefix cache.
        is_whole: landmarks and adapters are complete and replace all earlier reports.
        adapters_on_device: marks of those that are now on the device.
        adapters_coming: marks of those that are now in host memory or being read.
        adapters_dropped: marks of those that are in none of these places any more.
        seen: the receiving gateway's requests accepted since the previous report; the numbers include them.
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
    adapters_on_device: Sequence[int] = ()
    adapters_coming: Sequence[int] = ()
    adapters_dropped: Sequence[int] = ()
    seen: Sequence[str] = ()


FORMAT = " ".join(f"{field.name}:{field.type}" for field in fields(LoadReport))
"""Names what this release reports. A gateway closes a connection, and loses its streams, on a report that it cannot
read; so one that asks for reports says which it reads, and a replica of another release sends it none.
"""


def adapter_mark(digest: AdapterDigest) -> int:
    """Return the 64 bits of an adapter's digest that identify it in reports."""
    return int(digest[:16], 16)


def is_report(body: bytes) -> bool:
    """Tell whether the body of a frame is a report."""
    return body.startswith(MAGIC)


def encode_report(report: LoadReport) -> bytes:
    """Return a report as bytes, including its length prefix.

    Raises:
        FrameError: a number or a name is out of bounds.
    """
    told = {field.name: getattr(report, field.name) for field in fields(report)}
    _check(told)
    body = MAGIC + json.dumps(told).encode()
    return LENGTH.pack(len(body)) + body


def decode_report(body: bytes) -> LoadReport:
    """Return the report in a frame without its length prefix.

    Raises:
        FrameError: the bytes are not exactly a report.
    """
    try:
        told = json.loads(body.removeprefix(MAGIC).decode())
    except (ValueError, RecursionError) as error:
        raise FrameError("a report is not JSON") from error
    if not isinstance(told, dict) or told.keys() != {field.name for field in fields(LoadReport)}:
        raise FrameError("the fields of a report are not those of this version")
    told = {name: _as_tuple(value) for name, value in told.items()}
    _check(told)
    return LoadReport(**told)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _check(told: dict[str, Any]) -> None:
    for field in fields(LoadReport):
        if not _IS_VALID[str(field.type)](told[field.name]):
            raise FrameError(f"{field.name} in a report is out of bounds")
    if not told["max_running"] or not told["block_tokens"]:
        raise FrameError("a divisor in a report is out of bounds")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _are_marks(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(mark) is int and 0 <= mark < 1 << 64 for mark in value)


def _are_names(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= MAX_SEEN and all(map(_is_name, value))


_IS_VALID = {
    "str": _is_name,
    "int": _is_count,
    "float": _is_rate,
    "bool": lambda value: isinstance(value, bool),
    "Sequence[int]": _are_marks,
    "Sequence[str]": _are_names,
}
"""Validators by the annotation of a field."""
