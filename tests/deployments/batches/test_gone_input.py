"""The end of a batch whose input file's content was deleted."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from deployments.batches import runner
from deployments.batches.result_file import ResultFile
from deployments.batches.values import BatchCounts, BatchStatus, InsideCall
from tests.deployments.batches.batch_world import a_batch, lines, open_world, until_idle


async def test_a_batch_whose_input_is_gone_fails_and_keeps_what_was_answered(tmp_path: Path) -> None:
    """It was looked for every five seconds, for ever."""
    first = open_world(tmp_path)
    early, late = a_batch(first.store, *lines("x")), a_batch(first.store, *lines("a", "b"))
    Path(first.store.content_path(early.input_file_id)).unlink()

    def answers_one(call: InsideCall) -> None:
        first.ask.never_answers = len(first.ask.calls) > 1

    first.ask.on_call = answers_one
    await first.server.resume(first.store)
    while (await first.server.batch("blue", late.batch_id)).counts.completed < 1:
        await asyncio.sleep(0)
    [task] = first.server._tasks.values()
    task.cancel()
    await until_idle(first.server)
    first.close()
    Path(first.store.content_path(late.input_file_id)).unlink()
    world = open_world(tmp_path)
    await world.server.resume(world.store)
    for batch, counts in ((early, BatchCounts()), (late, BatchCounts(total=2, completed=1))):
        ended = await world.end(batch)
        assert (ended.status, [error.code for error in ended.errors]) == (BatchStatus.FAILED, ["file_not_found"])
        assert (ended.counts, len(world.ended(ended))) == (counts, counts.completed)
    assert world.ask.calls == []
    world.close()


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_cancelled_batch_whose_input_is_gone_is_cancelled(
    tmp_path: Path, is_restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()

    class AwaitedFile(ResultFile):
        def _read(self) -> None:
            may_go_on.wait(30)
            super()._read()

    monkeypatch.setattr(runner, "ResultFile", AwaitedFile)
    world = open_world(tmp_path)
    batch = a_batch(world.store, *lines("a"))
    await world.server.resume(world.store)
    while (await world.server.batch("blue", batch.batch_id)).status is BatchStatus.VALIDATING:
        await asyncio.sleep(0)
    if is_restarted:
        world.store.move(batch.batch_id, BatchStatus.CANCELLING, out_of=[BatchStatus.IN_PROGRESS])
        [task] = world.server._tasks.values()
        task.cancel()
        may_go_on.set()
        await until_idle(world.server)
        world.close()
        world = open_world(tmp_path)
    else:
        await world.server.cancel("blue", batch.batch_id)
    Path(world.store.content_path(batch.input_file_id)).unlink()
    may_go_on.set()
    if is_restarted:
        await world.server.resume(world.store)
    assert (await world.end(batch)).status is BatchStatus.CANCELLED
    world.close()
