"""Values passed between a gateway and a model replica over a Serve handle: one call per attempt, and one result.

Pure. Failures travel as error values in the result, which the gateway raises: so they arrive unchanged, whatever the
transport does to exceptions of an actor.
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
    """Where a gateway listens for tokens; `gateway_id` distinguishes gateways that reuse a port after a restart."""

    gateway_id: str
    host: str
    port: int


class UsageTag(NamedTuple):
    """The owner of a generation, for recording its usage if its gateway dies."""

    record_id: str
    tenant: str
    model: str
    started_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """One attempt at a generation, on one replica.

    Attributes:
        request_id: unique across attempts too: a lost one may still run on its replica.
        prompt_ids, prior_output_ids, prediction_ids: token ids, packed by `pack_ids`.
        tokenizer_digest: of the tokenizer that they are from, see `ModelConfig`.
        adapter: its identity and path: a replica need not know it before.
        adapter_start: see `engine.request.Request`.
        timeout_s: seconds from arrival at the replica; the clocks of two machines are unrelated.
        reply_to: the gateway, where the tokens go; None if they return over the handle.
        usage: None if usage is not recorded.
        pooling: requests a vector instead of tokens.
    """

    request_id: RequestId
    prompt_ids: bytes
    params: SamplingParams
    prior_output_ids: bytes = b""
    tokenizer_digest: str = ""
    adapter: AdapterRef | None = None
    adapter_start: int = 0
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
        """Return the engine's request; `now_s` is the current monotonic time."""
        return Request(
            request_id=self.request_id,
            prompt_ids=unpack_ids(self.prompt_ids),
            params=self.params,
            prior_output_ids=unpack_ids(self.prior_output_ids),
            adapter=None if self.adapter is None else self.adapter.digest,
            adapter_start=self.adapter_start,
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
        fault: the error for the caller to raise.
    """

    fault: Exception | None = None


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian 32-bit integers."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Decode the output of `pack_ids`."""
    return struct.unpack(f"<{len(packed) // 4}I", packed)
