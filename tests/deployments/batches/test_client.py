"""A gateway's client of the actor; tests/app/routes/test_files.py sends and reads every content by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import pytest

from deployments.batches import client
from deployments.batches.client import BatchClient
from deployments.batches.values import NewFile, PageQuestion
from deployments.errors import UnavailableError


class Hanging:
    """A handle on an actor whose disk never answers."""

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": staticmethod(lambda *_: asyncio.get_running_loop().create_future())})


async def test_who_asks_while_the_disk_hangs_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actor still passed its health checks, so its clients waited for ever."""
    monkeypatch.setattr(client, "TIMEOUT_S", 0.01)
    asked = BatchClient(Hanging())  # type: ignore[arg-type]
    question = PageQuestion(limit=1)
    for call in (asked.file("t", "file-1"), asked.list_batches("t", question), asked.cancel("t", "batch-1")):
        with pytest.raises(UnavailableError) as told:
            await call
        assert told.value.retry_after_s > 0


class Noting:
    """A handle on an actor that is told everything."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*args: object) -> asyncio.Future[str]:
            self.calls.append((name, *args))
            answer = asyncio.get_running_loop().create_future()
            answer.set_result("id")
            return answer

        return type("Method", (), {"remote": staticmethod(remote)})


@pytest.mark.parametrize("breaks_off", [False, True])
async def test_parts_lie_one_behind_the_other_and_an_upload_that_breaks_off_is_dropped(breaks_off: bool) -> None:
    async def content() -> AsyncIterator[bytes]:
        yield b"ab"
        yield b"c"
        if breaks_off:
            raise ConnectionError

    actor, new = Noting(), NewFile(tenant="t", name="n", purpose="batch")
    asked = BatchClient(actor)  # type: ignore[arg-type]
    with pytest.raises(ConnectionError) if breaks_off else nullcontext():
        async with asked.upload("t") as upload:
            await upload.claim(2)
            await upload.claim(3)
            await upload.store(new, content())
    claims = [("stored", "uploads.begin", "t", 2), ("stored", "uploads.grow", "id", 3)]
    parts = [("stored", "uploads.append", "id", 0, b"ab"), ("stored", "uploads.append", "id", 2, b"c")]
    end = ("stored", "uploads.drop", "id") if breaks_off else ("stored", "finish_upload", "id", new)
    assert actor.calls == [*claims, *parts, end]
