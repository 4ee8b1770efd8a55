"""What the actor asks of gateways; tests/app/routes asks whole ones in their own process, tests/e2e kills them."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.batches.actor import RETRY_AFTER_S, Batches, ask_gateway
from deployments.batches.values import InsideAnswer, InsideCall
from engine.errors import ConfigError
from tests.deployments.batches.batch_world import Asked, a_batch, a_line, config, open_world


class Gateways:
    """A Serve handle on gateways, of which there are none for the first calls."""

    def __init__(self, asked: Asked, num_lost: int) -> None:
        self._asked = asked
        self.num_lost = num_lost

    @property
    def answer_inside(self) -> Any:
        async def answer(call: InsideCall) -> InsideAnswer:
            self.num_lost -= 1
            if self.num_lost >= 0:
                raise ActorDiedError
            return await self._asked(call)

        return type("Method", (), {"remote": staticmethod(lambda call: asyncio.ensure_future(answer(call)))})


async def test_nobody_to_ask_is_waited_for(tmp_path: Path) -> None:
    world = open_world(tmp_path)
    batch = a_batch(world.store, a_line("a", name="a"))
    world.server._ask = partial(ask_gateway, Gateways(world.ask, num_lost=5))
    await world.server.resume(world.store)
    batch = await world.end(batch)
    assert (world.ended(batch), world.slept) == ({"a": "200"}, [RETRY_AFTER_S] * 5)
    world.close()


async def test_a_damaged_database_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A start told of it that a health check had failed, and that the folder was another server's."""
    (tmp_path / "batches.sqlite").write_bytes(b"no database" * 500)
    batches = object.__new__(Batches)
    await batches.__init__(config(tmp_path), ask=open_world(tmp_path / "other").ask)  # type: ignore[misc]
    await asyncio.wait([batches._opening])
    with pytest.raises(ConfigError, match=rf"args\.batches\.folder: the database in {tmp_path} cannot be opened: .*"):
        batches.check_health()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
