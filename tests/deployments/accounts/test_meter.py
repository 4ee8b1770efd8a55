"""What a gateway counts reaches the accounts once they can be reached, complete, and never holds anybody up."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import fakeredis
import pytest
from limits.storage import storage_from_string
from ray.exceptions import ActorDiedError
from sqlalchemy.exc import OperationalError

from deployments.accounts import limiter as limiter_module
from deployments.accounts import meter as meter_module
from deployments.accounts import spool as spool_module
from deployments.accounts.actor import Accounts
from deployments.accounts.joint_admission import JointAdmission
from deployments.accounts.ledger import Ledger
from deployments.accounts.meter import Meter
from deployments.accounts.spool import Spool
from deployments.accounts.values import OF_BATCHES, Admission, Charge, TenantLimits, UsageQuestion
from deployments.config import AccountsConfig
from deployments.errors import UnavailableError
from deployments.timeline import Timeline
from engine.errors import ConfigError, OverloadError, RequestError
from engine.request import RequestId
from engine.trace import RequestTrace
from tests.deployments.test_timeline import TRACE

LIMITS = TenantLimits(requests_per_minute=2, concurrent_requests=1)
REFUSALS = (RequestError, OverloadError, UnavailableError)


class LocalHandle:
    """A Serve handle on an actor in this process, which can be away."""

    def __init__(self, actor: Accounts) -> None:
        self._actor = actor
        self.is_away = False
        self.is_stuck = False
        self.is_mute = False
        self.heard: Callable[..., object] = lambda name, *args: None

    def __getattr__(self, name: str) -> Any:
        async def call(*args: object) -> Any:
            if self.is_away:
                raise ActorDiedError
            if self.is_stuck:
                await asyncio.Event().wait()
            self.heard(name, *args)
            found = await getattr(self._actor, name)(*args)
            if self.is_mute:
                raise TimeoutError
            return found

        # A task, which can be canceled like the response of a Serve handle.
        return type("Method", (), {"remote": lambda *args: asyncio.ensure_future(call(*args))})


@pytest.fixture
def handle(tmp_path: Path) -> LocalHandle:
    config = AccountsConfig(database_url=f"sqlite:///{tmp_path}/a.sqlite", spool_folder=str(tmp_path / "usage"))
    return LocalHandle(Accounts(config))


def a_meter(handle: LocalHandle, tmp_path: Path, name: str = "g1") -> Meter:
    async def traces(base: str, attempts: Sequence[RequestId]) -> Mapping[RequestId, RequestTrace]:
        return {RequestId("a1"): TRACE} if base == "base" else {}

    return Meter(handle, Spool(str(tmp_path / "usage"), name), name, traces)  # type: ignore[arg-type]


def a_timeline(name: str, **fields: Any) -> Timeline:
    timeline = Timeline(
        request_id=name, model="m", base="base", tenant="blue", arrived_unix_s=5.0,
        called_s_by_attempt={RequestId("a1"): 0.0},
        num_prompt_tokens=9, num_tokens=3, first_token_s=0.1, end_s=0.3, outcome="stop",
    )  # fmt: skip
    for field, value in fields.items():
        setattr(timeline, field, value)
    return timeline


def leave_a_record(handle: LocalHandle, tmp_path: Path) -> None:
    """Leave the record "r1" of a gateway that has died."""
    dead = a_meter(handle, tmp_path, "dead")
    dead.record(a_timeline("r1"))
    assert dead.spool._file is not None
    os.close(dead.spool._file)


async def test_records_arrive_with_what_engines_know(handle: LocalHandle, tmp_path: Path) -> None:
    meter = a_meter(handle, tmp_path)
    meter.record(a_timeline("r1"))
    await meter.settle()
    [record] = await meter.records(UsageQuestion(), limit=9)
    assert (record.queue_s, record.device_s) == (TRACE.queue_s, TRACE.device_s)
    assert (record.input_tokens, record.output_tokens, record.ttft_s) == (9, 3, 0.1)
    assert record.tpot_s == pytest.approx(0.1)
    assert meter.spool.num_pending == len(meter._attempts_by_record) == 0


async def test_answers_that_end_while_records_are_sent_hold_up_no_settling(handle: LocalHandle, tmp_path: Path) -> None:
    """From some fifty answers a second on there was always one more record to send: for half a minute at a time no
    gateway learned of keys, and nothing was counted for limits."""
    meter, names = a_meter(handle, tmp_path), iter(range(1, 100))
    meter.record(a_timeline("r0"))

    def go_on(name: str, *args: object) -> None:
        if name == "record":
            meter.record(a_timeline(f"r{next(names)}"))

    handle.heard = go_on
    for count in (1, 2):
        await meter.settle()
        assert ((await meter.totals(UsageQuestion()))[0].num_requests, meter.spool.num_pending) == (count, 1)


async def test_what_never_was_an_answer_is_not_paid_for(handle: LocalHandle, tmp_path: Path) -> None:
    """The prompts of requests that a full engine refused were, each time that they were sent again."""
    meter = a_meter(handle, tmp_path)
    for error in REFUSALS:
        meter.record(a_timeline(error.__name__, outcome=error.__name__, num_tokens=0))
    meter.record(a_timeline("r2", num_prompt_tokens=0))
    await meter.settle()
    assert await meter.totals(UsageQuestion()) == []


@pytest.mark.parametrize(("outcome", "num_tokens"), [*((error.__name__, 3) for error in REFUSALS), ("stop", 0)])
async def test_what_an_engine_has_begun_is_paid_for(
    handle: LocalHandle, tmp_path: Path, outcome: str, num_tokens: int
) -> None:
    """A grammar turned out to be invalid, or no replica was left to resume on; or the prompt alone was read."""
    meter = a_meter(handle, tmp_path)
    meter.record(a_timeline("r1", outcome=outcome, num_tokens=num_tokens))
    await meter.settle()
    assert [total.num_requests for total in await meter.totals(UsageQuestion())] == [1]


async def test_while_the_accounts_are_away_requests_begin_and_records_wait(handle: LocalHandle, tmp_path: Path) -> None:
    meter = a_meter(handle, tmp_path)
    handle.is_away = True
    for _ in range(5):
        assert await meter.begin(JointAdmission("blue", LIMITS, 1, 1)) == Admission(is_counted=False)
        meter.release(Charge("blue", LIMITS, 0, 1))
    meter.record(a_timeline("r1"))
    await meter.settle()
    assert (meter.num_unchecked, meter.spool.num_pending) == (5, 1)
    with pytest.raises(UnavailableError):
        await meter.totals(UsageQuestion())
    handle.is_away = False
    await meter.settle()
    assert (await meter.totals(UsageQuestion()))[0].num_requests == 1


async def test_a_call_that_is_canceled_on_the_accounts_ends_no_request_and_no_task(
    handle: LocalHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve then raises what it raises where the caller cancels: the gateway never again told what it had counted,
    stored a record or learned of a key."""
    monkeypatch.setattr(meter_module, "SETTLE_S", 0.01)
    meter, canceled = a_meter(handle, tmp_path), set[str]()
    await meter.start()

    def cancel(name: str, *args: object) -> None:
        if name not in canceled:
            canceled.add(name)
            raise asyncio.CancelledError

    handle.heard = cancel
    assert await meter.begin(JointAdmission("blue", LIMITS, 1, 1)) == Admission(is_counted=False)
    meter.record(a_timeline("r1"))
    async with asyncio.timeout(30):
        while not {"settle", "record"} <= canceled or meter.spool.num_pending:
            await asyncio.sleep(0.01)
    await handle._actor.add_key("d1", "blue")
    async with asyncio.timeout(30):
        while not meter.tenant_by_key:
            await asyncio.sleep(0.01)
    assert (await handle._actor.totals(UsageQuestion()))[0].num_requests == 1


async def test_while_the_store_of_limits_is_away_requests_begin_and_keys_are_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request of a tenant with limits was a 500, and gateways took keys that had been revoked."""
    server = fakeredis.FakeServer()
    pool = fakeredis.FakeRedis(server=server).connection_pool
    monkeypatch.setattr(limiter_module, "storage_from_string", partial(storage_from_string, connection_pool=pool))
    url, limits = f"sqlite:///{tmp_path}/a.sqlite", TenantLimits(output_tokens_per_minute=100)
    config = AccountsConfig(limits_url="redis://localhost:6379", database_url=url, spool_folder=str(tmp_path / "usage"))
    handle = LocalHandle(Accounts(config))
    meter = a_meter(handle, tmp_path)
    await meter.add_key("d1", "blue")
    server.connected = False
    assert await meter.begin(JointAdmission("blue", limits, 1, 1)) == Admission(is_counted=False)
    assert meter.num_unchecked == 1
    meter.release(Charge("blue", limits, 0, 30))
    await handle._actor.remove_key("d1")
    await meter.settle()
    assert meter.tenant_by_key == {}
    server.connected = True
    await meter.settle()
    assert (await meter.begin(JointAdmission("blue", limits, 1, 1))).quotas["output_tokens_per_minute"].remaining == 70


async def test_what_waits_for_the_accounts_is_one_charge_of_each_tenant(handle: LocalHandle, tmp_path: Path) -> None:
    """A list of all answers grew for as long as the accounts were away, and was then told in one message."""
    meter = a_meter(handle, tmp_path)
    handle.is_away = True
    for count in range(1, 4):
        meter.release(Charge("blue", LIMITS, count, 10 * count))
        await meter.settle()
    meter.release(Charge("red", LIMITS, 5, 0))
    told: list[Charge] = []
    handle.is_away = False
    handle.heard = lambda name, *args: told.extend(args[2]) if name == "settle" else None
    await meter.settle()
    await meter.settle()
    # The first report may have arrived, so it is sent again as it was.
    assert told == [Charge("blue", LIMITS, 1, 10), Charge("blue", LIMITS, 5, 50), Charge("red", LIMITS, 5, 0)]


async def test_what_is_left_at_the_end_is_told_or_kept_and_holds_nobody_up(
    handle: LocalHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = a_meter(handle, tmp_path)
    meter.record(a_timeline("r1"))
    meter.record(a_timeline("r2"))
    # Beside the settling that is under way.
    await asyncio.gather(meter.settle(), meter.flush())
    meter.record(a_timeline("r3"))
    await meter.flush()
    assert (await meter.totals(UsageQuestion()))[0].num_requests == 3
    monkeypatch.setattr(meter_module, "FLUSH_S", 0.01)
    handle.is_stuck = True
    await meter.flush()
    meter.record(a_timeline("r4"))
    await meter.flush()
    assert meter.spool.num_pending == 1


async def test_a_full_disk_of_the_accounts_ends_no_drain_and_its_records_wait(
    handle: LocalHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve hands the accounts' own error over as it was raised: the server that stopped ended with its traceback,
    and waited for the streams of no other gateway."""

    def fail(*args: object) -> None:
        raise OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full"))

    dead, meter = a_meter(handle, tmp_path, "dead"), a_meter(handle, tmp_path)
    for each in (dead, meter):
        each.record(a_timeline(each.spool._name))
    assert dead.spool._file is not None
    os.close(dead.spool._file)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "record", fail)
        await meter.flush()
        assert not await meter.adopt_orphans()
    assert meter.spool.num_pending == 1
    assert await meter.adopt_orphans()
    await meter.flush()
    assert (await meter.totals(UsageQuestion()))[0].num_requests == 2


async def test_answers_at_once_are_those_of_all_gateways(handle: LocalHandle, tmp_path: Path) -> None:
    first, second = a_meter(handle, tmp_path, "g1"), a_meter(handle, tmp_path, "g2")
    assert (await first.begin(JointAdmission("blue", LIMITS, 1, 1))).refused_by is None
    assert (await second.begin(JointAdmission("blue", LIMITS, 1, 1))).refused_by == "concurrent_requests"
    await asyncio.gather(first.settle(), second.settle())
    assert (await second.begin(JointAdmission("blue", LIMITS, 1, 1))).refused_by == "concurrent_requests"
    first.release(Charge("blue", LIMITS, 0, 1))
    await first.settle()
    assert (await second.begin(JointAdmission("blue", LIMITS, 1, 1))).refused_by is None


async def test_what_limits_refuse_is_counted_for_tenants_that_there_are(handle: LocalHandle, tmp_path: Path) -> None:
    """Refused lines of batches had a tenant of their own in the metrics."""
    meter, limits = a_meter(handle, tmp_path), TenantLimits(requests_per_minute=1)
    for tenant in ("blue", f"blue{OF_BATCHES}"):
        for _ in range(3):
            await meter.begin(JointAdmission(tenant, limits, 1, 1))
    assert meter.refused == {("blue", "requests_per_minute"): 4}


async def test_as_many_as_a_limit_has_room_for_are_admitted_of_those_that_come_at_once(
    handle: LocalHandle, tmp_path: Path
) -> None:
    """All were refused: each counted the others, though none of them was running."""
    meters = [a_meter(handle, tmp_path, f"g{number}") for number in range(2)]
    limits = TenantLimits(concurrent_requests=4)
    found = await asyncio.gather(*(meter.begin(JointAdmission("blue", limits, 1, 1)) for meter in meters * 6))
    assert [admission.refused_by for admission in found].count(None) == 4
    running = sum(meter._running["blue"] for meter in meters)
    assert running == handle._actor._limiter.num_running("blue") == 4


async def test_one_after_the_other_they_are_not_at_once(
    handle: LocalHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter_module, "SETTLE_S", 3600.0)
    first, second = a_meter(handle, tmp_path, "g1"), a_meter(handle, tmp_path, "g2")
    limits = TenantLimits(concurrent_requests=1)
    for _ in range(3):
        assert (await first.begin(JointAdmission("blue", limits, 1, 1))).refused_by is None
        first.release(Charge("blue", limits, 0, 1))
    # And another gateway is told without waiting for the next settling.
    await first.start()
    assert (await first.begin(JointAdmission("blue", limits, 1, 1))).refused_by is None
    first.release(Charge("blue", limits, 0, 1))
    async with asyncio.timeout(30):
        while (await second.begin(JointAdmission("blue", limits, 1, 1))).refused_by is not None:
            await asyncio.sleep(0.01)


async def test_a_gateway_waits_for_the_keys_before_it_starts(
    handle: LocalHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that started while the accounts were away told clients that their keys were wrong."""
    monkeypatch.setattr(meter_module, "FIRST_WORD_POLL_S", 0.01)
    await a_meter(handle, tmp_path, "g0").add_key("digest", "blue")
    meter = a_meter(handle, tmp_path)
    handle.is_away = True
    starting = asyncio.create_task(meter.start())
    await asyncio.sleep(0.05)
    assert (meter.tenant_by_key, starting.done()) == (None, False)
    handle.is_away = False
    await starting
    assert meter.tenant_by_key == {"digest": "blue"}


async def test_a_gateway_does_not_wait_for_the_keys_for_ever(
    handle: LocalHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter_module, "FIRST_WORD_S", 0.0)
    handle.is_away = True
    meter = a_meter(handle, tmp_path)
    await meter.start()
    assert meter.tenant_by_key is None


async def test_what_was_told_is_counted_once_though_no_answer_came(handle: LocalHandle, tmp_path: Path) -> None:
    meter, limits = a_meter(handle, tmp_path), TenantLimits(output_tokens_per_minute=100)
    handle.is_mute = True
    for _ in range(3):
        meter.release(Charge("blue", limits, 0, 10))
        await meter.settle()
    handle.is_mute = False
    await meter.settle()
    admission = await meter.begin(JointAdmission("blue", limits, 1, 1))
    assert admission.quotas["output_tokens_per_minute"].remaining == 70


async def test_what_an_answer_used_is_counted_at_once(
    handle: LocalHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked again within a second got some answers more than the limit."""
    monkeypatch.setattr(meter_module, "SETTLE_S", 3600.0)
    meter, limits = a_meter(handle, tmp_path), TenantLimits(output_tokens_per_minute=10)
    await meter.start()
    assert (await meter.begin(JointAdmission("blue", limits, 1, 1))).refused_by is None
    meter.release(Charge("blue", limits, 0, 10))
    async with asyncio.timeout(30):
        while (await meter.begin(JointAdmission("blue", limits, 1, 1))).refused_by != "output_tokens_per_minute":
            await asyncio.sleep(0.01)


async def test_what_a_dead_gateway_left_is_stored_once(handle: LocalHandle, tmp_path: Path) -> None:
    leave_a_record(handle, tmp_path)
    heir = a_meter(handle, tmp_path, "heir")
    handle.is_away = True
    assert not await heir.adopt_orphans()
    handle.is_away = False
    assert await heir.adopt_orphans()
    assert await heir.adopt_orphans()
    assert [record.record_id for record in await heir.records(UsageQuestion(), limit=9)] == ["r1"]
    assert not list((tmp_path / "usage").glob("dead*"))


async def test_a_gateway_that_ends_while_it_reads_what_a_dead_one_left_leaves_that_to_another(
    handle: LocalHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error took the place of the cancellation: what its thread was reading could not be closed."""
    leave_a_record(handle, tmp_path)
    meter, read = a_meter(handle, tmp_path, "g2"), spool_module._read
    reads, goes_on = threading.Event(), threading.Event()

    def reading(content: bytes) -> object:
        reads.set()
        assert goes_on.wait(30)
        return read(content)

    monkeypatch.setattr(spool_module, "_read", reading)
    adopting = asyncio.create_task(meter.adopt_orphans())
    assert await asyncio.to_thread(reads.wait, 30)
    adopting.cancel()
    asyncio.get_running_loop().call_later(0.01, goes_on.set)
    await asyncio.wait({adopting})
    assert adopting.cancelled()
    heir = a_meter(handle, tmp_path, "heir")
    assert await heir.adopt_orphans()
    assert [record.record_id for record in await heir.records(UsageQuestion(), limit=9)] == ["r1"]


async def test_what_a_dead_gateway_left_is_not_read_on_the_event_loop(
    handle: LocalHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred thousand records held up its successor's streams for 0.75 s."""
    leave_a_record(handle, tmp_path)
    meter, read, threads = a_meter(handle, tmp_path, "g2"), spool_module._read, []

    def reading(content: bytes) -> object:
        threads.append(threading.current_thread())
        return read(content)

    monkeypatch.setattr(spool_module, "_read", reading)
    assert await meter.adopt_orphans()
    assert threads
    assert threading.current_thread() not in threads


async def test_what_a_long_absence_of_the_accounts_has_set_aside_is_stored(
    handle: LocalHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "MAX_PENDING", 2)
    meter, handle.is_away = a_meter(handle, tmp_path), True
    for number in range(5):
        meter.record(a_timeline(f"r{number}"))
    await meter.settle()
    assert not await meter.adopt_orphans()
    handle.is_away = False
    await meter.settle()
    assert (meter.spool.num_pending, meter.spool.num_set_aside) == (0, 4)
    assert await meter.adopt_orphans()
    assert meter.spool.num_set_aside == meter.spool.num_lost == 0
    assert len(await meter.records(UsageQuestion(), limit=9)) == 5


async def test_records_that_are_set_aside_while_others_are_sent_hold_up_no_settling(
    handle: LocalHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "MAX_PENDING", 2)
    monkeypatch.setattr(meter_module, "MAX_BATCH", 1)
    meter = a_meter(handle, tmp_path)

    def heard(name: str, *args: object) -> None:
        if name == "record":
            handle.heard = lambda name, *args: None
            for number in range(2, 4):
                meter.record(a_timeline(f"r{number}"))

    handle.heard = heard
    for number in range(2):
        meter.record(a_timeline(f"r{number}"))
    await asyncio.wait_for(meter.settle(), 20.0)
    assert await meter.adopt_orphans()
    await meter.settle()
    assert len(await meter.records(UsageQuestion(), limit=9)) == 4


async def test_records_are_asked_for_in_pages(
    handle: LocalHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than some 30,000 in one message were more than Serve carries: the accounts seemed to be away."""
    monkeypatch.setattr(meter_module, "PAGE", 2)
    meter = a_meter(handle, tmp_path)
    names = [f"r{i}" for i in range(5)]
    for name in names:
        # All of one moment: the order is by their ids then.
        meter.record(a_timeline(name))
    await meter.settle()
    sizes: list[int] = []
    handle.heard = lambda name, *args: sizes.append(args[1])
    assert [record.record_id for record in await meter.records(UsageQuestion(), limit=9)] == names
    assert [record.record_id for record in await meter.records(UsageQuestion(), limit=3)] == names[:3]
    assert await meter.records(UsageQuestion(tenant="nobody"), limit=3) == []
    assert sizes == [2, 2, 2, 2, 1, 2]


async def test_records_are_told_in_parts(handle: LocalHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a dead gateway's in one message were more than Serve carries, once the accounts had been away for long."""
    monkeypatch.setattr(meter_module, "MAX_BATCH", 2)
    dead, meter = a_meter(handle, tmp_path, "dead"), a_meter(handle, tmp_path)
    for each in (dead, meter):
        for number in range(5):
            each.record(a_timeline(f"{each.spool._name}{number}"))
    assert dead.spool._file is not None
    os.close(dead.spool._file)
    told: list[int] = []
    handle.heard = lambda name, *args: told.append(len(args[0])) if name == "record" else None
    assert await meter.adopt_orphans()
    await meter.settle()
    assert told == [2, 2, 1] * 2
    assert (await meter.totals(UsageQuestion()))[0].num_requests == 10


async def test_what_dead_gateways_left_is_looked_for_now_and_then_and_sooner_after_a_failure(
    handle: LocalHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SETTLE_S", 0), ("ORPHANS_EVERY", 3), ("ORPHANS_AGAIN", 2)):
        monkeypatch.setattr(meter_module, name, value)
    meter, num_looks, seen = a_meter(handle, tmp_path), 0, []

    async def look() -> bool:
        nonlocal num_looks
        num_looks += 1
        return num_looks > 1

    monkeypatch.setattr(meter, "adopt_orphans", look)
    for _ in range(9):
        await meter._store_once()
        seen.append(num_looks)
    assert seen == [1, 1, 2, 2, 2, 3, 3, 3, 4]


async def test_keys_are_good_at_once_here_and_soon_elsewhere(handle: LocalHandle, tmp_path: Path) -> None:
    here, elsewhere = a_meter(handle, tmp_path, "g1"), a_meter(handle, tmp_path, "g2")
    await here.add_key("d1", "blue")
    assert here.tenant_by_key == {"d1": "blue"}
    await elsewhere.start()
    assert elsewhere.tenant_by_key == {"d1": "blue"}
    assert [key.digest for key in await elsewhere.keys()] == ["d1"]
    assert await here.remove_key("d1")
    assert not await here.remove_key("d1")
    assert here.tenant_by_key == {}


async def test_keys_are_told_once_and_again_when_they_change_or_the_accounts_restart(
    handle: LocalHandle, tmp_path: Path
) -> None:
    """All of them were told each second, and after each answer of a tenant with limits: a hundred thousand held up the
    streams of every gateway for a third of a second each time."""
    meter, other = a_meter(handle, tmp_path, "g1"), a_meter(handle, tmp_path, "g2")

    async def is_told() -> bool:
        meter.tenant_by_key = None
        await meter.settle()
        return meter.tenant_by_key is not None

    assert [await is_told() for _ in range(3)] == [True, False, False]
    await other.add_key("d1", "blue")
    assert [await is_told() for _ in range(2)] == [True, False]
    await other.remove_key("d1")
    assert [await is_told() for _ in range(2)] == [True, False]
    config = AccountsConfig(database_url=f"sqlite:///{tmp_path}/a.sqlite", spool_folder=str(tmp_path / "usage"))
    handle._actor = Accounts(config)
    assert [await is_told() for _ in range(2)] == [True, False]


async def test_a_key_that_was_revoked_while_the_accounts_restarted_is_forgotten(
    handle: LocalHandle, tmp_path: Path
) -> None:
    meter = a_meter(handle, tmp_path)
    for digest in ("d1", "d2"):
        await meter.add_key(digest, "blue")
    config = AccountsConfig(database_url=f"sqlite:///{tmp_path}/a.sqlite", spool_folder=str(tmp_path / "usage"))
    handle._actor = Accounts(config)
    await handle._actor.remove_key("d1")
    await meter.settle()
    assert meter.tenant_by_key == {"d2": "blue"}


async def test_one_more_key_is_read_and_told_by_itself(handle: LocalHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a hundred thousand keys, each new one cost 1.5 s of the ledger, and held up the streams of every gateway
    for almost a second."""
    accounts = handle._actor
    for digest in ("d1", "d2"):
        await accounts.add_key(digest, "blue")
    first = await accounts.changed_keys("")
    assert first is not None
    assert (first.is_whole, first.tenant_by_key) == (True, {"d1": "blue", "d2": "blue"})
    monkeypatch.setattr(Ledger, "keys", None)
    await accounts.add_key("d3", "green")
    await accounts.remove_key("d1")
    changes = await accounts.changed_keys(first.version)
    assert changes is not None
    assert (changes.is_whole, changes.tenant_by_key) == (False, {"d3": "green", "d1": None})
    assert await accounts.changed_keys(changes.version) is None


async def test_a_ledger_that_hangs_keeps_no_gateway_from_learning_of_keys(
    handle: LocalHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway told what it had under way, and learned which keys were revoked, behind the records that it sent."""
    monkeypatch.setattr(meter_module, "SETTLE_S", 0.01)
    here, elsewhere = a_meter(handle, tmp_path, "g1"), a_meter(handle, tmp_path, "g2")
    await here.add_key("d1", "blue")
    hangs = asyncio.Event()

    async def hang(records: object) -> None:
        hangs.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(handle._actor, "record", hang)
    elsewhere.record(a_timeline("r1"))
    await elsewhere.start()
    await hangs.wait()
    assert elsewhere.tenant_by_key == {"d1": "blue"}
    await here.remove_key("d1")
    async with asyncio.timeout(20):
        while elsewhere.tenant_by_key:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("name", "left"), [("add_key", ["d1", "d2"]), ("remove_key", [])])
async def test_keys_are_those_of_the_database_whoever_leaves_while_one_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, left: list[str]
) -> None:
    """A client that left while its key was being revoked had it forgotten by the database alone: gateways took it for
    as long as the actor lived, and who asked again was told that there is no such key."""
    accounts = Accounts(AccountsConfig(database_url=f"sqlite:///{tmp_path}/a.sqlite", spool_folder=str(tmp_path)))
    await accounts.add_key("d1", "blue")
    change, has_begun = getattr(Ledger, name), threading.Event()

    def begin(*args: object) -> object:
        has_begun.set()
        return change(*args)

    monkeypatch.setattr(Ledger, name, begin)
    asked: Coroutine[Any, Any, object] = (
        accounts.add_key("d2", "blue") if name == "add_key" else accounts.remove_key("d1")
    )
    task = asyncio.create_task(asked)
    await asyncio.to_thread(has_begun.wait, 30)
    task.cancel()
    await asyncio.wait({task})
    await accounts.record([])  # behind it, in the same thread
    assert [key.digest for key in await accounts.keys()] == left


async def test_a_key_that_the_disk_has_no_room_for_can_be_asked_for_later(tmp_path: Path) -> None:
    accounts = Accounts(AccountsConfig(database_url=f"sqlite:///{tmp_path}/a.sqlite", spool_folder=str(tmp_path)))
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as database:
        database.execute("ALTER TABLE api_key RENAME TO elsewhere")
        with pytest.raises(UnavailableError):
            await accounts.add_key("d1", "blue")
        database.execute("ALTER TABLE elsewhere RENAME TO api_key")
    await accounts.add_key("d1", "blue")
    assert [key.digest for key in await accounts.keys()] == ["d1"]


@pytest.mark.parametrize(
    ("field", "url", "words"),
    [
        ("limits_url", "foo://", "unknown storage scheme"),
        ("database_url", "nonsense", "Could not parse SQLAlchemy URL"),
        ("database_url", "sqlite:////dev/null/a", "File exists: ./dev/null"),
    ],
)
def test_what_cannot_be_opened_is_named_in_one_line(tmp_path: Path, field: str, url: str, words: str) -> None:
    urls = {"database_url": f"sqlite:///{tmp_path}/a.sqlite", field: url}
    with pytest.raises(ConfigError, match=rf"^args\.accounts\.{field}: .*{words}.*$"):
        Accounts(AccountsConfig(spool_folder=str(tmp_path), **urls))
