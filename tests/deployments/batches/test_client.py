"""A gateway's client of the actor; tests/app/routes/test_files.py sends and reads every content by it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployments.batches import client
from deployments.batches.client import BatchClient
from deployments.batches.values import PageQuestion
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
