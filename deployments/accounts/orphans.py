"""Records of answers whose gateway died while they were under way: written by the replica that computed them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from deployments.accounts.values import UsageRecord
from deployments.generation_calls import GenerationCall

_logger = logging.getLogger(__name__)

OUTCOME = "gateway_lost"
NUM_ATTEMPTS, PAUSE_S = 60, 2.0

Send = Callable[[Sequence[UsageRecord]], Awaitable[None]]


class OrphanRecorder:
    """Sends records to the accounts, and tries again while these cannot be reached.

    Args:
        send: None for the deployment `Accounts` of this application.
    """

    def __init__(self, send: Send | None = None) -> None:
        self._send = send or _to_accounts
        self._tasks: set[asyncio.Task[None]] = set()

    def record(self, call: GenerationCall, num_tokens: int) -> None:
        """Record what a call has brought by now; on the event loop."""
        record = orphan_record(call, num_tokens)
        if record is not None:
            task = asyncio.create_task(self._deliver(record))
            # The event loop keeps no reference to it.
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _deliver(self, record: UsageRecord) -> None:
        for _ in range(NUM_ATTEMPTS):
            try:
                await self._send([record])
            except (RayError, RayServeException) as error:
                _logger.warning("the record of %s cannot be stored yet: %s", record.record_id, error)
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
        outcome=OUTCOME,
    )


async def _to_accounts(records: Sequence[UsageRecord]) -> None:
    accounts = serve.get_deployment_handle("Accounts", serve.get_replica_context().app_name)
    await accounts.record.remote(records)
