"""A gateway's side of the accounts: asks for admission and reports usage without loss.

If the accounts cannot be reached, serving goes on: limits are not enforced, and records wait in the gateway's spool.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import count

from ray.serve.handle import DeploymentHandle

from deployments.accounts.joint_admission import JointAdmission
from deployments.accounts.spool import MAX_PENDING, Spool
from deployments.accounts.values import (
    OF_BATCHES,
    Admission,
    Charge,
    KeyChanges,
    KeyInfo,
    Running,
    UsageQuestion,
    UsageRecord,
    UsageTotal,
)
from deployments.handle_calls import UNAVAILABLE, ask_actor, until_answered
from deployments.timeline import Timeline, TraceSource, ask_traces
from deployments.waits import detached, for_ever, in_thread
from engine.request import RequestId

_logger = logging.getLogger(__name__)

SETTLE_S = 1.0
FIRST_WORD_S, FIRST_WORD_POLL_S = 10.0, 0.25
"""How long, and how often, a starting gateway asks for the keys: the accounts restart within seconds."""
ORPHANS_EVERY, ORPHANS_AGAIN = 30, 5
"""Iterations of the store loop between two scans for spools of dead gateways, after a good and a failed one."""
ADMIT_TIMEOUT_S = 2.0
RECORD_TIMEOUT_S = 30.0
FLUSH_S = 2.0
"""Maximum delay of a shutdown; the accounts may already have been stopped."""
MAX_BATCH = 1000
PAGE = 4000
"""Records per request, each of less than 1 KiB: a Serve message holds at least 4 MiB."""


class Meter:
    """The running requests and the usage of one gateway.

    Attributes:
        spool: records that the ledger may not have yet.
        refused: number of refusals by tenant and limit, those of its batches with its others.
        num_unchecked: requests admitted because the accounts could not be reached.
        tenant_by_key: tenant of each run-time key by its digest, as of the last exchange with the accounts; None before
            the first.
    """

    def __init__(self, accounts: DeploymentHandle, spool: Spool, gateway: str, traces: TraceSource) -> None:
        self._accounts = accounts
        absence = "The accounts cannot be reached."
        self._ask = partial(
            ask_actor, accounts, absence=absence, retry_after_s=ADMIT_TIMEOUT_S, timeout_s=RECORD_TIMEOUT_S
        )
        self.spool = spool
        self._gateway = gateway
        self._traces = traces
        self._running: Counter[str] = Counter()
        self._asked = defaultdict[str, set[int]](set)
        """By tenant: turns of the requests for admission that are under way, whose answers do not count as running."""
        self._turns = count(1)
        self._num_to_orphans = 0
        self._has_ended = asyncio.Event()
        self._telling, self._storing = asyncio.Lock(), asyncio.Lock()
        self._charges: dict[str, Charge] = {}
        """One per tenant, which bounds the memory while the accounts are unreachable."""
        self._sent: list[Charge] = []
        self._sent_number = 0
        """The charges of the last report, with a number, as it may have arrived though no answer came."""
        self._attempts_by_record: dict[str, tuple[str, Collection[RequestId]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.num_unchecked = 0
        self.refused: Counter[tuple[str, str]] = Counter()
        self.tenant_by_key: dict[str, str] | None = None
        self._keys_version = ""

    async def start(self) -> None:
        """Wait for the keys, for up to `FIRST_WORD_S`, and start the background tasks."""
        last_s = time.monotonic() + FIRST_WORD_S
        await self._tell_used()
        while self.tenant_by_key is None and time.monotonic() < last_s:
            await asyncio.sleep(FIRST_WORD_POLL_S)
            await self._tell_used()
        # Two tasks: a slow ledger must not delay counting of limits or the refresh of keys.
        self._tasks = [
            asyncio.create_task(for_ever(self._tell_used, self._pause, "usage could not be counted for limits")),
            asyncio.create_task(
                for_ever(self._store_once, partial(asyncio.sleep, SETTLE_S), "usage records could not be stored")
            ),
        ]

    async def begin(self, joint: JointAdmission) -> Admission:
        """Count an answer as running if its request is admitted. Each admitted answer needs one `release`."""
        if joint.asked is None:
            joint.asked = detached(self._ask_admission(joint))
        if joint.is_admitted:
            # While the others begin: nobody else has counted this one.
            self._running[joint.tenant] += 1
        joint.num_waiting += 1
        try:
            admission = await asyncio.shield(joint.asked)
        except BaseException:
            joint.num_waiting -= 1
            if joint.is_admitted:
                self._running[joint.tenant] -= 1
                self._has_ended.set()
            raise
        if admission.refused_by is not None:
            self.refused[joint.tenant.removesuffix(OF_BATCHES), admission.refused_by] += 1
        elif not admission.is_counted:
            self.num_unchecked += 1
        return admission

    async def _ask_admission(self, joint: JointAdmission) -> Admission:
        """Ask whether a request may begin. Whatever is sent meanwhile names it as one whose outcome is not known.

        As soon as it is known, the answers that wait for it are counted as running, not only when each of them goes on:
        what is sent in between would report too few.
        """
        turn = next(self._turns)
        asked = self._asked[joint.tenant]
        asked.add(turn)
        try:
            admission = await self._answer(joint, turn)
        except BaseException:
            # The accounts may have admitted it.
            self._has_ended.set()
            raise
        finally:
            asked.remove(turn)
        if admission.refused_by is None:
            joint.is_admitted = True
            self._running[joint.tenant] += joint.num_waiting
            if joint.num_waiting < joint.num_answers:
                self._has_ended.set()
        return admission

    async def _answer(self, joint: JointAdmission, turn: int) -> Admission:
        asked = joint.tenant, joint.limits, self._gateway, joint.input_tokens, joint.num_answers
        try:
            async with asyncio.timeout(ADMIT_TIMEOUT_S):
                response = self._accounts.admit.remote(*asked, self._running_of(joint.tenant), turn)
                admission: Admission = await until_answered(response)
        except UNAVAILABLE as error:
            _logger.warning("a request of %s starts without a limit check: %s", joint.tenant, error)
            return Admission(is_counted=False)
        return admission

    def _running_of(self, tenant: str) -> Running:
        return Running(self._running[tenant], frozenset(self._asked[tenant]))

    def release(self, charge: Charge) -> None:
        """Count an admitted request as ended, and charge the usage that admission did not count."""
        self._running[charge.tenant] -= 1
        self._charge(charge)
        if charge.limits.concurrent_requests is not None or charge.limits.output_tokens_per_minute is not None:
            # The tenant's next request may come at once: it may have waited for the slot, and must find the tokens
            # counted.
            self._has_ended.set()

    def record(self, timeline: Timeline) -> None:
        """Spool the record of an answer that has ended; one without a prompt, or that was refused, has none.

        A grammar may turn out to be invalid after some tokens, or no replica be left to resume; these tokens count.
        """
        if not timeline.num_prompt_tokens or timeline.was_refused:
            return
        record = UsageRecord(
            record_id=timeline.request_id,
            tenant=timeline.tenant,
            model=timeline.model,
            adapter=timeline.adapter,
            started_unix_s=timeline.arrived_unix_s,
            input_tokens=timeline.num_prompt_tokens,
            cached_tokens=timeline.num_cached_tokens,
            output_tokens=timeline.num_tokens,
            ttft_s=timeline.first_token_s,
            tpot_s=timeline.tpot_s,
            total_s=timeline.end_s,
            outcome=timeline.outcome,
        )
        self.spool.add(record)
        self._attempts_by_record[record.record_id] = timeline.base, timeline.called_s_by_attempt
        if len(self._attempts_by_record) > MAX_PENDING:
            # A dictionary's first entry is the oldest; the spool has set its record aside.
            del self._attempts_by_record[next(iter(self._attempts_by_record))]

    async def settle(self) -> None:
        """Report running requests and usage to the accounts, and refresh the keys. Failed reports are retried later."""
        await self._tell_used()
        await self._store()

    async def _tell_used(self) -> None:
        async with self._telling:
            try:
                if self._sent:
                    await self._tell()
                self._sent, self._charges = list(self._charges.values()), {}
                self._sent_number += 1
                await self._tell()
            except UNAVAILABLE as error:
                _logger.warning("usage cannot be counted for limits now: %s", error)
                # The store of limits alone may be away; keys are revoked all the same.
                await self._refresh_keys()
            else:
                self._sent = []

    async def _refresh_keys(self) -> None:
        with suppress(*UNAVAILABLE):
            async with asyncio.timeout(ADMIT_TIMEOUT_S):
                self._take_keys(await until_answered(self._accounts.changed_keys.remote(self._keys_version)))

    async def _store(self) -> None:
        async with self._storing:
            try:
                async with asyncio.timeout(RECORD_TIMEOUT_S):
                    await self._send_records()
            except UNAVAILABLE as error:
                _logger.warning("usage records cannot be stored now: %s", error)

    async def adopt_orphans(self) -> bool:
        """Send the records left by dead gateways of this machine, and those that this one has set aside.

        Returns False if that must be retried.
        """
        num_set_aside = self.spool.num_set_aside
        # In a thread: a spool may have 100,000 records.
        with closing(self.spool.orphans()) as orphans:
            while (found := await in_thread(partial(next, orphans, None))) is not None:
                records, path = found
                try:
                    # In batches, as the gateway would have sent them: Serve limits the message size.
                    for start in range(0, len(records), MAX_BATCH):
                        async with asyncio.timeout(RECORD_TIMEOUT_S):
                            await until_answered(self._accounts.record.remote(records[start : start + MAX_BATCH]))
                except UNAVAILABLE as error:
                    _logger.warning("records of a dead gateway cannot be stored yet: %s", error)
                    return False
                path.unlink(missing_ok=True)
        self.spool.num_set_aside -= num_set_aside
        return True

    async def totals(self, question: UsageQuestion) -> list[UsageTotal]:
        """Add up records by tenant, model and adapter.

        Raises:
            UnavailableError: the accounts cannot be reached (also raised by the methods below).
        """
        totals: list[UsageTotal] = await self._ask("totals", question)
        return totals

    async def records(self, question: UsageQuestion, *, limit: int) -> list[UsageRecord]:
        """Return at most `limit` records in order of start."""
        records: list[UsageRecord] = []
        while len(records) < limit:
            size = min(PAGE, limit - len(records))
            page: list[UsageRecord] = await self._ask("records", question, size, records[-1] if records else None)
            records += page
            if len(page) < size:
                break
        return records

    async def keys(self) -> list[KeyInfo]:
        """Return the keys that were created at run time."""
        keys: list[KeyInfo] = await self._ask("keys")
        return keys

    async def add_key(self, digest: str, tenant: str) -> None:
        """Assign a key to a tenant: here at once, at other gateways within about `SETTLE_S`."""
        await self._ask("add_key", digest, tenant)
        await self._refresh_keys()

    async def remove_key(self, digest: str) -> bool:
        """Delete a key; return whether it was known."""
        is_known: bool = await self._ask("remove_key", digest)
        await self._refresh_keys()
        return is_known

    async def flush(self) -> None:
        """Report what is pending before the gateway ends; records not sent in time stay in the spool for another."""
        if self._sent or self._charges or self.spool.num_pending:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self.settle()

    def _charge(self, charge: Charge) -> None:
        told = self._charges.get(charge.tenant)
        if told is not None:
            charge = charge._replace(
                input_tokens=charge.input_tokens + told.input_tokens,
                output_tokens=charge.output_tokens + told.output_tokens,
            )
        self._charges[charge.tenant] = charge

    async def _tell(self) -> None:
        """Report running requests and the charges that are being sent; learn of changed keys."""
        async with asyncio.timeout(ADMIT_TIMEOUT_S):
            tenants = self._running.keys() | self._asked.keys()
            # All but those of whom there is nothing to tell.
            running = {tenant: here for tenant in tenants if (here := self._running_of(tenant)) != Running()}
            told = self._sent, next(self._turns), self._sent_number, self._keys_version
            self._take_keys(await until_answered(self._accounts.settle.remote(self._gateway, running, *told)))

    async def _send_records(self) -> None:
        # Records added meanwhile wait for the next call, or this one might never end.
        num_left = self.spool.num_pending
        while records := self.spool.pending(min(MAX_BATCH, num_left)):
            await until_answered(self._accounts.record.remote(await self._completed(records)))
            self.spool.acknowledge(records)
            num_left -= len(records)
            for record in records:
                self._attempts_by_record.pop(record.record_id, None)

    async def _completed(self, records: Sequence[UsageRecord]) -> list[UsageRecord]:
        """Add what only the engines know: queue time and device time."""
        asked = [self._attempts_by_record.get(record.record_id, ("", [])) for record in records]
        traces = await ask_traces(asked, self._traces)
        completed = []
        for record, (_, attempts) in zip(records, asked, strict=True):
            known = [traces[attempt] for attempt in attempts if attempt in traces]
            if known:
                waited = [trace.queue_s for trace in known if trace.queue_s is not None]
                record = replace(record, queue_s=sum(waited), device_s=sum(trace.device_s for trace in known))
            completed.append(record)
        return completed

    def _take_keys(self, changes: KeyChanges | None) -> None:
        if changes is None:
            return
        if changes.is_whole or self.tenant_by_key is None:
            self.tenant_by_key = {}
        # An answer that comes late undoes a later one, and its version too: what it undid is told again.
        self._keys_version = changes.version
        for digest, tenant in changes.tenant_by_key.items():
            if tenant is None:
                self.tenant_by_key.pop(digest, None)
            else:
                self.tenant_by_key[digest] = tenant

    async def _pause(self) -> None:
        # None if an answer has ended that a limit may wait for.
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._has_ended.wait()
        self._has_ended.clear()

    async def _store_once(self) -> None:
        if not self._num_to_orphans:
            self._num_to_orphans = ORPHANS_EVERY if await self.adopt_orphans() else ORPHANS_AGAIN
        self._num_to_orphans -= 1
        await self._store()
