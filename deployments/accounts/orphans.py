"""Usage records of answers whose gateway died before recording them, sent by the replica that computed them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from ray.serve.handle import DeploymentHandle

from deployments.accounts.values import GATEWAY_LOST, UsageRecord
from deployments.generation_calls import GenerationCall, TokenAddress
from deployments.handle_calls import UNAVAILABLE, until_answered
from deployments.waits import detached

_logger = logging.getLogger(__name__)

NUM_ATTEMPTS, PAUSE_S = 60, 2.0
MAX_REMEMBERED = 4096
"""Finished answers per gateway that are reported when it dies; a gateway never has nearly as many unrecorded."""

Send = Callable[[Sequence[UsageRecord]], Awaitable[None]]


async def send_to(accounts: DeploymentHandle, records: Sequence[UsageRecord]) -> None:
    """Store records by the actor `Accounts`; the errors of `until_answered`."""
    await until_answered(accounts.record.remote(records))


class OrphanRecorder:
    """Tracks answers that gateways may not have recorded; sends their records when a gateway dies, with retries.

    Finished answers are included: their gateway may have died before recording them. Answers that the gateway did
    record are then reported twice, and the ledger keeps the gateway's record.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._finished: dict[TokenAddress, dict[str, UsageRecord]] = {}

    def finished(self, call: GenerationCall, num_tokens: int) -> None:
        """Remember the output of a finished call."""
        record = orphan_record(call, num_tokens)
        if record is not None and call.reply_to is not None:
            records = self._finished.setdefault(call.reply_to, {})
            # Of several calls for one answer, as in beam search, the last has the most tokens.
            records.pop(record.record_id, None)
            records[record.record_id] = record
            if len(records) > MAX_REMEMBERED:
                del records[next(iter(records))]

    def gateway_lost(self, address: TokenAddress, under_way: Sequence[tuple[GenerationCall, int]]) -> None:
        """Send records of a dead gateway's finished and running answers. Call on the event loop."""
        records = self._finished.pop(address, {})
        for record in (orphan_record(call, num_tokens) for call, num_tokens in under_way):
            if record is not None:
                records[record.record_id] = record
        if records:
            # The request that opened the channel may be among those that the dead gateway leaves behind.
            detached(self._deliver(list(records.values())))

    async def _deliver(self, records: Sequence[UsageRecord]) -> None:
        for _ in range(NUM_ATTEMPTS):
            try:
                await self._send(records)
            except UNAVAILABLE as error:
                _logger.warning("%d records of a dead gateway cannot be stored yet: %s", len(records), error)
                await asyncio.sleep(PAUSE_S)
            else:
                return


def orphan_record(call: GenerationCall, num_tokens: int) -> UsageRecord | None:
    """Return the record of a call with `num_tokens` output tokens, or None if its usage is not recorded.

    Includes the output of earlier attempts on other replicas, which the call carries.
    """
    if call.usage is None:
        return None
    return UsageRecord(
        record_id=call.usage.record_id,
        tenant=call.usage.tenant,
        model=call.usage.model,
        adapter="" if call.adapter is None else call.adapter.digest,
        started_unix_s=call.usage.started_unix_s,
        input_tokens=len(call.prompt_ids) // 4,
        cached_tokens=0,
        output_tokens=num_tokens + len(call.prior_output_ids) // 4,
        outcome=GATEWAY_LOST,
    )
