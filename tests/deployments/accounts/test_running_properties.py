"""Whatever overtakes what between gateways and the limiter: all that fits is admitted, and never more at once."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from deployments.accounts import meter as meter_module
from deployments.accounts.joint_admission import JointAdmission
from deployments.accounts.limiter import Limiter
from deployments.accounts.meter import Meter
from deployments.accounts.spool import Spool
from deployments.accounts.values import Admission, Charge, TenantLimits
from engine.request import RequestId
from engine.trace import RequestTrace

NUM_GATEWAYS = 3
ASK = st.tuples(st.just("ask"), st.integers(0, NUM_GATEWAYS - 1), st.integers(1, 3))
ARRIVE = st.tuples(st.sampled_from(["arrive", "answer"]), st.integers(0, 9))
SETTLE = st.tuples(st.just("settle"), st.integers(0, NUM_GATEWAYS - 1))
END = st.tuples(st.sampled_from(["release", "leave"]), st.integers(0, 9))


class Message(NamedTuple):
    """A message on its way to the limiter, and its answer once it is on its way back."""

    work: partial[Any]
    response: asyncio.Future[Any]


class Network:
    """Gateways and their limiter; each message arrives, and is answered, when the test says so."""

    def __init__(self, folder: str, limit: int) -> None:
        self._limits = TenantLimits(concurrent_requests=limit)
        self.limiter = Limiter()
        self.num_granted = self.num_refused_wrongly = 0
        self._sent: list[Message] = []
        self._handled: list[tuple[asyncio.Future[Any], Any]] = []
        self._begins: list[tuple[Meter, asyncio.Task[Admission]]] = []
        self._settling: dict[int, asyncio.Task[None]] = {}
        self._running: list[Meter] = []
        accounts = SimpleNamespace(admit=self._method(self._admit), settle=self._method(self._settle))
        self._meters = [self._meter(folder, f"g{number}", accounts) for number in range(NUM_GATEWAYS)]

    @property
    def num_running(self) -> int:
        """Answers that were admitted, as far as their gateways know, and have not ended."""
        return len(self._running)

    def ask(self, place: int, num_answers: int) -> None:
        meter, joint = self._meters[place], JointAdmission("t", self._limits)
        for _ in range(num_answers):
            joint.add(1)
        self._begins += [(meter, asyncio.ensure_future(meter.begin(joint))) for _ in range(num_answers)]

    def arrive(self, which: int) -> None:
        if self._sent:
            message = self._sent.pop(which % len(self._sent))
            self._handled.append((message.response, message.work()))

    def answer(self, which: int) -> None:
        if self._handled:
            response, found = self._handled.pop(which % len(self._handled))
            if not response.done():
                response.set_result(found)

    def settle(self, place: int) -> None:
        if place not in self._settling or self._settling[place].done():
            self._settling[place] = asyncio.ensure_future(self._meters[place]._tell_used())

    def release(self, which: int) -> None:
        if self._running:
            meter = self._running.pop(which % len(self._running))
            meter.release(Charge("t", self._limits, 0, 1))

    def leave(self, which: int) -> None:
        if self._begins:
            self._begins[which % len(self._begins)][1].cancel()

    async def step(self, name: str, *args: int, num_turns: int) -> None:
        """Take a step; the tasks do what they can in `num_turns` of the loop."""
        getattr(self, name)(*args)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        for meter, begin in [begin for begin in self._begins if begin[1].done()]:
            self._begins.remove((meter, begin))
            if not begin.cancelled() and begin.result().refused_by is None:
                self._running.append(meter)

    async def calm_down(self) -> None:
        """Let all messages arrive and be answered, then let each gateway tell what is running."""
        for place in [None, *range(NUM_GATEWAYS)]:
            if place is not None:
                await self.step("settle", place, num_turns=9)
            while self._sent or self._handled:
                await self.step("arrive", 0, num_turns=9)
                await self.step("answer", 0, num_turns=9)

    def _meter(self, folder: str, name: str, accounts: Any) -> Meter:
        async def traces(base: str, attempts: Sequence[RequestId]) -> Mapping[RequestId, RequestTrace]:
            return {}

        return Meter(accounts, Spool(folder, name), name, traces)

    def _method(self, work: Any) -> Any:
        def remote(*args: Any) -> asyncio.Future[Any]:
            response = asyncio.get_running_loop().create_future()
            self._sent.append(Message(partial(work, *args), response))
            return response

        return SimpleNamespace(remote=remote)

    def _admit(self, tenant: str, limits: TenantLimits, gateway: str, tokens: int, num: int, *here: Any) -> Admission:
        running, turn = here
        admission = self.limiter.admit(tenant, limits, gateway, tokens, running=running, turn=turn, num_answers=num)
        assert limits.concurrent_requests is not None
        if admission.refused_by is None:
            self.num_granted += num
        elif self.num_granted + num <= limits.concurrent_requests:
            self.num_refused_wrongly += 1
        return admission

    def _settle(self, gateway: str, running: Any, charges: Any, turn: int, number: int, version: str) -> None:
        self.limiter.hear(gateway, running, charges, turn=turn, number=number)


async def run(limit: int, steps: Sequence[tuple[tuple[Any, ...], int]]) -> Network:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        # On a slow machine nothing may begin unchecked.
        patch.setattr(meter_module, "ADMIT_TIMEOUT_S", 3600.0)
        network = Network(folder, limit)
        for (name, *args), num_turns in steps:
            await network.step(name, *args, num_turns=num_turns)
            assert network.num_running <= limit
        await network.calm_down()
        assert network.num_running <= limit
        assert network.limiter.num_running("t") == network.num_running
        return network


@given(st.integers(1, 6), st.lists(st.tuples(ASK | ARRIVE | SETTLE, st.integers(0, 9)), min_size=20, max_size=60))
@settings(max_examples=60, deadline=None)
def test_all_that_fits_is_admitted_however_many_are_asked_for_at_once(
    limit: int, steps: list[tuple[tuple[Any, ...], int]]
) -> None:
    """Requests that were asked for at once counted each other as running, and all were refused."""
    network = asyncio.run(run(limit, steps))
    assert network.num_refused_wrongly == 0
    assert network.num_running == network.num_granted


@given(st.integers(1, 6), st.lists(st.tuples(ASK | ARRIVE | SETTLE | END, st.integers(0, 9)), min_size=20, max_size=80))
@settings(max_examples=100, deadline=None)
def test_never_more_than_the_limit_run_at_once_and_what_has_ended_keeps_no_place(
    limit: int, steps: list[tuple[tuple[Any, ...], int]]
) -> None:
    async def end_all() -> None:
        network = await run(limit, steps)
        while network.num_running:
            network.release(0)
        await network.calm_down()
        assert network.limiter.num_running("t") == 0
        network.ask(0, limit)
        await network.calm_down()
        assert network.num_running == limit

    asyncio.run(end_all())
