"""Whatever is lost, late or killed between gateways and the accounts: each answer is counted and stored once."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import hypothesis.strategies as st
from hypothesis import given, settings
from ray.exceptions import ActorDiedError

from deployments.accounts.actor import Accounts
from deployments.accounts.joint_admission import JointAdmission
from deployments.accounts.limiter import SILENCE_S, Limiter
from deployments.accounts.meter import Meter
from deployments.accounts.spool import Spool
from deployments.accounts.values import Admission, Charge, TenantLimits, UsageQuestion
from deployments.config import AccountsConfig
from deployments.timeline import Timeline
from engine.request import RequestId
from engine.trace import RequestTrace

PLENTY = 10**9
LIMITS = {
    "wide": TenantLimits(input_tokens_per_minute=PLENTY, output_tokens_per_minute=PLENTY, concurrent_requests=3),
    "narrow": TenantLimits(input_tokens_per_minute=PLENTY, output_tokens_per_minute=PLENTY, concurrent_requests=1),
}
NUM_GATEWAYS = 3
GATEWAYS, TENANTS = st.integers(0, NUM_GATEWAYS - 1), st.sampled_from(sorted(LIMITS))
WORK = st.one_of(
    st.tuples(st.just("begin"), GATEWAYS, TENANTS, st.integers(1, 20)),
    st.tuples(st.just("leave"), GATEWAYS, TENANTS, st.integers(0, 6)),
    st.tuples(st.just("end"), st.integers(0, 9), st.integers(1, 20), st.integers(0, 30)),
    st.tuples(st.just("settle"), GATEWAYS),
)
TROUBLE = st.one_of(
    st.tuples(st.sampled_from(["store", "adopt", "kill_gateway"]), GATEWAYS), st.tuples(st.just("restart_accounts"))
)
FATES = st.lists(
    st.sampled_from(["arrives", "arrives", "is lost", "is late", "has no answer"]), min_size=10, max_size=30
)


class NotingLimiter(Limiter):
    """A limiter that adds up the prompts that it admits; its clock stands."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.admitted: Counter[str] = Counter()
        super().__init__(clock=lambda: self.now_s)

    def admit(self, tenant: str, limits: TenantLimits, gateway: str, input_tokens: int, **rest: Any) -> Admission:
        admission = super().admit(tenant, limits, gateway, input_tokens, **rest)
        if admission.refused_by is None:
            self.admitted[tenant] += input_tokens
        return admission

    def used(self, tenant: str) -> list[int]:
        quotas = self._quotas(tenant, LIMITS[tenant]).values()
        return [quota.limit - quota.remaining for quota in quotas]

    def _follow_clock(self) -> None:
        pass


class Handle(NamedTuple):
    """A Serve handle on the accounts."""

    world: World

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(self.world.call(name, args)))


class World:
    """Gateways and their accounts; `fates` says what happens to each message about limits."""

    def __init__(self, folder: Path, fates: Sequence[str]) -> None:
        self._config = AccountsConfig(database_url=f"sqlite:///{folder}/a.sqlite", spool_folder=str(folder / "usage"))
        self._fates = iter(fates)
        self._late: list[tuple[str, tuple[Any, ...]]] = []
        self._names = itertools.count()
        self._open: list[tuple[Meter, str, Admission, int]] = []
        self.charged = {tenant: [0, 0] for tenant in LIMITS}
        self.recorded: dict[str, tuple[int, int]] = {}
        self.restart_accounts()
        self.gateways = [self._gateway() for _ in range(NUM_GATEWAYS)]

    async def call(self, name: str, args: tuple[Any, ...]) -> Any:
        fate = next(self._fates, "arrives") if name in ("admit", "settle") else "arrives"
        if fate == "is lost":
            raise ActorDiedError
        if fate == "is late":
            self._late.append((name, args))
            raise TimeoutError
        found = await getattr(self._accounts, name)(*args)
        if fate == "has no answer":
            raise TimeoutError
        return found

    def _gateway(self) -> Meter:
        async def traces(base: str, attempts: Sequence[RequestId]) -> Mapping[RequestId, RequestTrace]:
            return {}

        name = f"g{next(self._names)}"
        return Meter(Handle(self), Spool(self._config.spool_folder, name), name, traces)  # type: ignore[arg-type]

    def restart_accounts(self) -> None:
        self._accounts = Accounts(self._config)
        self._accounts._limiter = self.limiter = NotingLimiter()

    def kill_gateway(self, place: int) -> None:
        dead = self.gateways[place]
        self._open = [answer for answer in self._open if answer[0] is not dead]
        assert dead.spool._file is not None
        os.close(dead.spool._file)
        self.gateways[place] = self._gateway()

    async def begin(self, place: int, tenant: str, guess: int, num_turns: int | None = None) -> None:
        """Begin an answer, whose client leaves after `num_turns` of the loop if it has not been admitted by then."""
        meter = self.gateways[place]
        asking = asyncio.ensure_future(meter.begin(JointAdmission(tenant, LIMITS[tenant], guess, 1)))
        if num_turns is not None:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            asking.cancel()
        await asyncio.wait({asking})
        if not asking.cancelled() and asking.result().refused_by is None:
            self._open.append((meter, tenant, asking.result(), guess))

    async def leave(self, place: int, tenant: str, num_turns: int) -> None:
        await self.begin(place, tenant, 7, num_turns)

    def end(self, which: int, num_input: int, num_output: int) -> None:
        if not self._open:
            return
        meter, tenant, admission, guess = self._open.pop(which % len(self._open))
        charge = Charge(tenant, LIMITS[tenant], num_input - (guess if admission.is_counted else 0), num_output)
        meter.release(charge)
        self.charged[tenant][0] += charge.input_tokens
        self.charged[tenant][1] += charge.output_tokens
        name = f"r{len(self.recorded)}"
        timeline = Timeline(request_id=name, model="m", base="b", tenant=tenant, arrived_unix_s=5.0, outcome="stop")
        timeline.num_prompt_tokens, timeline.num_tokens = self.recorded[name] = num_input, num_output
        meter.record(timeline)

    async def settle(self, place: int) -> None:
        await self.gateways[place].settle()

    async def store(self, place: int) -> None:
        await self.gateways[place]._store()

    async def adopt(self, place: int) -> None:
        await self.gateways[place].adopt_orphans()

    async def arrive(self) -> None:
        if self._late:
            name, args = self._late.pop()
            await getattr(self._accounts, name)(*args)

    def be_silent(self) -> None:
        self.limiter.now_s += SILENCE_S + 1

    async def run(self, steps: Sequence[tuple[Any, ...]]) -> None:
        """Take the steps, then end everything in peace."""
        for name, *args in steps:
            done = getattr(self, name)(*args)
            if done is not None:
                await done
        self._fates = iter(())
        while self._open:
            self.end(0, 1, 1)
        for place, meter in enumerate(self.gateways):
            # Of a client that has left, it may not be known yet whether it was admitted.
            while any(meter._asked.values()):
                await asyncio.sleep(0)
            await self.settle(place)
            await meter.adopt_orphans()
            assert not +meter._running
            assert meter.spool.num_pending == 0

    async def totals(self) -> tuple[int, int, int]:
        totals = await self._accounts.totals(UsageQuestion())
        assert len(totals) <= len(LIMITS)
        fields = ("num_requests", "input_tokens", "output_tokens")
        return tuple(sum(getattr(total, field) for total in totals) for field in fields)  # type: ignore[return-value]


@given(st.lists(WORK | st.tuples(st.sampled_from(["arrive", "be_silent"])), min_size=30, max_size=60), FATES)
@settings(max_examples=15, deadline=None)
def test_windows_hold_what_was_admitted_and_used_and_no_answer_keeps_its_place(
    steps: list[tuple[Any, ...]], fates: list[str]
) -> None:
    """Charges that a gateway sent again after 15 seconds of silence, as it did not know whether they had arrived, were
    counted twice."""

    async def run(folder: Path) -> None:
        world = World(folder, fates)
        await world.run(steps)
        for tenant, (num_input, num_output) in world.charged.items():
            assert world.limiter.used(tenant) == [world.limiter.admitted[tenant] + num_input, num_output]
            assert world.limiter.num_running(tenant) == 0

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


@given(st.lists(WORK | TROUBLE, min_size=30, max_size=60), FATES)
@settings(max_examples=15, deadline=None)
def test_the_ledger_has_each_answer_once_whoever_is_killed(steps: list[tuple[Any, ...]], fates: list[str]) -> None:
    async def run(folder: Path) -> None:
        world = World(folder, fates)
        await world.run(steps)
        used = world.recorded.values()
        assert await world.totals() == (len(used), sum(i for i, _ in used), sum(o for _, o in used))
        assert len(list((folder / "usage").iterdir())) == NUM_GATEWAYS
        world.be_silent()
        for place in range(NUM_GATEWAYS):
            await world.settle(place)
        assert [world.limiter.num_running(tenant) for tenant in LIMITS] == [0] * len(LIMITS)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))
