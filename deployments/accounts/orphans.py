"""Records of answers whose gateway died before it could write them: told by the replica that computed them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from deployments.accounts.values import GATEWAY_LOST, UsageRecord
from deployments.generation_calls import GenerationCall, TokenAddress

_logger = logging.getLogger(__name__)

NUM_ATTEMPTS, PAUSE_S = 60, 2.0
MAX_REMEMBERED = 4096
"""Finished answers of one gateway that are told again when it dies; it is behind by far fewer."""

Send = Callable[[Sequence[UsageRecord]], Awaitable[None]]


class OrphanRecorder:
    """Knows what gateways may not have recorded; sends it when they die, again and again until it has arrived.

    A finished answer counts too: its gateway may have died with the last tokens in hand. What the gateway did record is
    told twice then, and the ledger keeps the gateway's word.

    Args:
        send: None for the deployment `Accounts` of this application.
    """

    def __init__(self, send: Send | None = None) -> None:
        self._send = send or _to_accounts
        self._finished: dict[TokenAddress, dict[str, UsageRecord]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def finished(self, call: GenerationCall, num_tokens: int) -> None:
        """Remember what a call has brought."""
        record = orphan_record(call, num_tokens)
        if record is not None and call.reply_to is not None:
            records = self._finished.setdefault(call.reply_to, {})
            # Of several calls for one answer, as a beam search makes them, the last has most of its tokens.
            records.pop(record.record_id, None)
            records[record.record_id] = record
            if len(records) > MAX_REMEMBERED:
                del records[next(iter(records))]

    def gateway_lost(self, address: TokenAddress, under_way: Sequence[tuple[GenerationCall, int]]) -> None:
        """Record what a gateway had finished and under way; on the event loop."""
        records = self._finished.pop(address, {})
        for record in (orphan_record(call, num_tokens) for call, num_tokens in under_way):
            if record is not None:
                records[record.record_id] = record
        if records:
            # In nobody's context: Serve cancels what a request has asked for with the request itself, and the one that
            # opened the channel may be among those that the gateway leaves behind.
            task = asyncio.create_task(self._deliver(list(records.values())), context=Context())
            # The event loop keeps no reference to it.
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _deliver(self, records: Sequence[UsageRecord]) -> None:
        for _ in range(NUM_ATTEMPTS):
            try:
                await self._send(records)
            except (RayError, RayServeException) as error:
                _logger.warning("%d records of a dead gateway cannot be stored yet: %s", len(records), error)
                await asyncio.sleep(PAUSE_S)
            else:
                return


def orphan_record(call: GenerationCall, num_tokens: int) -> UsageRecord | None:
    """Return the record of a call that has brought so many tokens, None where nobody records it.

    Tokens that an earlier attempt elsewhere had brought are its too: they came with the call.
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


async def _to_accounts(records: Sequence[UsageRecord]) -> None:
    accounts = serve.get_deployment_handle("Accounts", serve.get_replica_context().app_name)
    await accounts.record.remote(records)
