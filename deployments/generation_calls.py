"""What passes between a gateway and a model replica over a Serve handle: one call for each attempt, one result.

Pure. Failures travel as values, errors that are raised on the other side: so they arrive as they are, whatever the
transport does to what an actor raises.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adapters.identity import AdapterRef
from engine.request import Pooling, Request, RequestId, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAddress:
    """Where a gateway listens for tokens; `gateway_id` tells gateways apart that have restarted on one port."""

    gateway_id: str
    host: str
    port: int


class UsageTag(NamedTuple):
    """Whose a generation is, for whoever has to record it in its gateway's stead."""

    record_id: str
    tenant: str
    model: str
    started_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """One attempt at a generation, on one replica.

    Attributes:
        request_id: unique among attempts too: a lost one may still run where it was.
        prompt_ids, prior_output_ids, prediction_ids: token ids, packed by `pack_ids`.
        adapter: what it is and where it lies: a replica need not have heard of it before.
        timeout_s: seconds from its arrival; the clocks of two machines have nothing in common.
        reply_to: where the tokens go; None where they come back by the handle.
        usage: None where nobody records it.
        pooling: asks for a vector instead of tokens, which comes with the result.
    """

    request_id: RequestId
    prompt_ids: bytes
    params: SamplingParams
    prior_output_ids: bytes = b""
    adapter: AdapterRef | None = None
    tenant: str = ""
    salt: str = ""
    retention_s: float = 0.0
    priority: int = 0
    timeout_s: float | None = None
    reply_to: TokenAddress | None = None
    usage: UsageTag | None = None
    pooling: Pooling | None = None
    prediction_ids: bytes = b""

    def to_request(self, now_s: float) -> Request:
        """Return the engine's request; `now_s` is monotonic."""
        return Request(
            request_id=self.request_id,
            prompt_ids=unpack_ids(self.prompt_ids),
            params=self.params,
            prior_output_ids=unpack_ids(self.prior_output_ids),
            adapter=None if self.adapter is None else self.adapter.digest,
            tenant=self.tenant,
            salt=self.salt,
            retention_s=self.retention_s,
            priority=self.priority,
            deadline_s=None if self.timeout_s is None else now_s + self.timeout_s,
            pooling=self.pooling,
            prediction_ids=unpack_ids(self.prediction_ids),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """How an attempt ended.

    Attributes:
        pooled: the vector that was asked for: float32, little-endian.
        fault: to be raised by whoever has asked.
    """

    num_cached_tokens: int = 0
    pooled: bytes | None = None
    fault: Exception | None = None


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian 32-bit integers."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Return what `pack_ids` packed."""
    return struct.unpack(f"<{len(packed) // 4}I", packed)
