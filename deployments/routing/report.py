"""The load report that a model replica pushes to every gateway that watches it. Pure.

    report   length u32, little-endian (bytes that follow) | magic b"AR" | JSON: an object of the fields of `LoadReport`

It travels on the token channel between frames. What a replica says is trusted: it has proved to know the channel's
secret, and it was asked for reports of this release.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields

from adapters.identity import AdapterDigest
from deployments.channel.token_frames import LENGTH, FrameError

MAGIC = b"AR"
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
    """Return a report as bytes, including its length prefix."""
    body = MAGIC + json.dumps({field.name: getattr(report, field.name) for field in fields(report)}).encode()
    return LENGTH.pack(len(body)) + body


def decode_report(body: bytes) -> LoadReport:
    """Return the report in a frame without its length prefix.

    Raises:
        FrameError: the bytes are not JSON, or not the fields of a report.
    """
    try:
        return LoadReport(**json.loads(body.removeprefix(MAGIC)))
    except (ValueError, TypeError, RecursionError) as error:
        raise FrameError(f"a report cannot be read: {error}") from error
