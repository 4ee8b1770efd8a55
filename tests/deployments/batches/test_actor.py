"""What the actor asks of gateways; tests/app/routes asks whole ones in their own process, tests/e2e kills them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.batches import actor
from deployments.batches.actor import RETRY_AFTER_S, Batches, ask_gateway
from deployments.batches.retries import MAX_FAILURES
from deployments.batches.store import BatchStore
from deployments.batches.values import InsideAnswer, InsideCall
from deployments.config import BatchesConfig
from deployments.errors import UnavailableError
from engine.errors import ConfigError
from tests.deployments.batches.batch_world import a_batch, a_line, config, open_world, upload, written


class Signs:
    """The stream of a call: signs of life, and mostly an answer; or an error."""

    def __init__(self, signs: AsyncGenerator[InsideAnswer | None, None]) -> None:
        self._signs = signs
        self.is_cancelled = False

    def __aiter__(self) -> AsyncGenerator[InsideAnswer | None, None]:
        return self._signs

    def cancel(self) -> None:
        self.is_cancelled = True


class Gateways:
    """A streaming Serve handle on gateways."""

    def __init__(self, answer: Callable[[InsideCall], AsyncGenerator[InsideAnswer | None, None]]) -> None:
        self._answer = answer
        self.calls: list[Signs] = []

    @property
    def answer_inside(self) -> Any:
        def remote(call: InsideCall) -> Signs:
            self.calls.append(Signs(self._answer(call)))
            return self.calls[-1]

        return type("Method", (), {"remote": staticmethod(remote)})


async def test_nobody_to_ask_is_waited_for(tmp_path: Path) -> None:
    world = open_world(tmp_path)
    batch = a_batch(world.store, a_line("a", name="a"))

    async def answer(call: InsideCall) -> AsyncGenerator[InsideAnswer | None, None]:
        if len(gateways.calls) <= 5:
            raise ActorDiedError
        yield None
        yield await world.ask(call)

    gateways: Any = Gateways(answer)
    world.server._ask = partial(ask_gateway, gateways)
    await world.server.resume(world.store)
    batch = await world.end(batch)
    assert (world.ended(batch), world.slept) == ({"a": "200"}, [RETRY_AFTER_S] * 5)
    world.close()


async def test_a_line_that_takes_its_gateways_along_is_tried_a_few_times(tmp_path: Path) -> None:
    """It was asked for again every five seconds for a day, of one gateway after the other."""
    world = open_world(tmp_path)
    batch = a_batch(world.store, a_line("a", name="a"))

    async def answer(call: InsideCall) -> AsyncGenerator[InsideAnswer | None, None]:
        yield None
        if call.method == "POST":
            lost.append(call)
            raise ActorDiedError
        yield await world.ask(call)

    lost: list[InsideCall] = []
    gateways: Any = Gateways(answer)
    world.server._ask = partial(ask_gateway, gateways)
    await world.server.resume(world.store)
    batch = await world.end(batch)
    assert (world.ended(batch), len(lost)) == ({"a": "502"}, MAX_FAILURES)
    (line,) = written(world.folder, batch.batch_id)
    assert "gateways that this request was sent to were lost" in line["response"]["body"]["error"]["message"]
    world.close()


async def test_a_gateway_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine had vanished, and the call to it lasted for five to seven minutes, as gRPC's keepalive has it."""
    monkeypatch.setattr(actor, "MAX_SILENT_S", 0.05)

    async def answer(call: InsideCall) -> AsyncGenerator[InsideAnswer | None, None]:
        yield None
        await asyncio.Event().wait()

    gateways: Any = Gateways(answer)
    call = InsideCall(tenant="", method="POST", path="/v1/completions", request_id="r")
    assert (await asyncio.wait_for(ask_gateway(gateways, call), 20.0)).status == 502
    assert [signs.is_cancelled for signs in gateways.calls] == [True]


async def test_each_sign_of_life_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "MAX_SILENT_S", 0.01)

    async def answer(call: InsideCall) -> AsyncGenerator[InsideAnswer | None, None]:
        monkeypatch.setattr(actor, "MAX_SILENT_S", 60.0)
        yield None
        await asyncio.sleep(0.05)
        yield InsideAnswer(status=200)

    gateways: Any = Gateways(answer)
    call = InsideCall(tenant="", method="POST", path="/v1/completions", request_id="r")
    assert (await ask_gateway(gateways, call)).status == 200


async def test_a_gateway_that_shows_signs_of_life_is_waited_for_and_not_cancelled() -> None:
    async def answer(call: InsideCall) -> AsyncGenerator[InsideAnswer | None, None]:
        for _ in range(3):
            yield None
        yield InsideAnswer(status=200)

    gateways: Any = Gateways(answer)
    call = InsideCall(tenant="", method="POST", path="/v1/completions", request_id="r")
    assert (await ask_gateway(gateways, call)).status == 200
    assert [signs.is_cancelled for signs in gateways.calls] == [False]


async def test_a_damaged_database_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A start told of it that a health check had failed, and that the folder was another server's."""
    (tmp_path / "batches.sqlite").write_bytes(b"no database" * 500)
    batches = object.__new__(Batches)
    await batches.__init__(config(tmp_path), ask=open_world(tmp_path / "other").ask)  # type: ignore[misc]
    await asyncio.wait([batches._opening])
    with pytest.raises(ConfigError, match=rf"args\.batches\.folder: the database in {tmp_path} cannot be opened: .*"):
        batches.check_health()
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_a_folder_in_use_is_waited_for_and_then_tidied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_tries = 0

    def opened(config: BatchesConfig) -> BatchStore:
        nonlocal num_tries
        num_tries += 1
        return BatchStore(config)

    monkeypatch.setattr(actor, "LOCK_POLL_S", 0)
    monkeypatch.setattr(actor, "TIDY_S", 0)
    monkeypatch.setattr(actor, "BatchStore", opened)
    first = open_world(tmp_path)
    expired = Path(first.store.content_path(upload(first.store, b"x", lasts_s=0)))
    batches = object.__new__(Batches)
    await batches.__init__(config(tmp_path), ask=first.ask)  # type: ignore[misc]
    async with asyncio.timeout(30):
        while num_tries < 3:
            await asyncio.sleep(0)
        batches.check_health()
        with pytest.raises(UnavailableError, match="another server"):
            await batches.stored("file", "blue", expired.name)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        first.close()
        while expired.exists():
            await asyncio.sleep(0)
        assert batches.store is not None
        expired = Path(batches.store.content_path(upload(batches.store, b"x", lasts_s=0)))
        while expired.exists():
            await asyncio.sleep(0)
    batches._opening.cancel()
    await asyncio.wait([batches._opening])
    batches._disk._thread.shutdown()
    batches.store.close()
