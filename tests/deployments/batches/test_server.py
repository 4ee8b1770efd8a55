from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from deployments.batches.server import RETRY_AFTER_S, BatchServer
from deployments.batches.values import MAX_PART_BYTES, BatchStatus, NewBatch, NewFile, PageQuestion
from deployments.disk import Disk
from deployments.errors import UnavailableError
from engine.errors import RequestError
from tests.deployments.batches.batch_world import ENDPOINT, Asked, World, a_batch, a_line, config, open_world, upload


async def test_until_the_folder_is_open_everybody_is_told_to_come_back(tmp_path: Path) -> None:
    server = BatchServer(config(tmp_path), Disk("batches"), Asked())
    question = PageQuestion(9)
    for call in (
        server.stored("uploads.begin", "t", 0),
        server.stored("uploads.grow", "u", 1),
        server.stored("uploads.append", "u", 0, b""),
        server.stored("finish_upload", "u", NewFile(tenant="t", name="n", purpose="batch")),
        server.stored("uploads.drop", "u"),
        server.stored("file", "t", "f"),
        server.stored("list_files", "t", question),
        server.stored("read_file", "t", "f", 0),
        server.stored("delete_file", "t", "f"),
        server.create(NewBatch(tenant="t", input_file_id="f", endpoint=ENDPOINT)),
        server.batch("t", "b"),
        server.list_batches("t", question),
        server.cancel("t", "b"),
    ):
        with pytest.raises(UnavailableError) as refused:
            await call
        assert refused.value.retry_after_s == RETRY_AFTER_S


async def test_a_batch_begins_as_it_is_made(tmp_path: Path) -> None:
    world = open_world(tmp_path)
    made = a_batch(world.store, a_line("a", name="a"))
    new = NewBatch(tenant="blue", input_file_id=made.input_file_id, endpoint=made.endpoint)
    batch = await world.end(await world.server.create(new))
    assert batch.status is BatchStatus.COMPLETED
    assert world.server._runners == {}
    world.close()


async def test_who_leaves_after_asking_has_asked(tmp_path: Path) -> None:
    """Serve cancels what a client does not wait for: between the disk and the runner that left a batch which nobody
    ran, and a cancellation which the runner never heard of. Such batches counted as unfinished for ever."""
    world = open_world(tmp_path, max_concurrent_requests=1)
    world.ask.never_answers = True
    made = a_batch(world.store, a_line("a", name="a"))
    new = NewBatch(tenant="blue", input_file_id=made.input_file_id, endpoint=made.endpoint)
    await left_behind(world, world.server.create(new))
    [begun] = [batch for batch in world.store.unfinished() if batch.batch_id != made.batch_id]
    async with asyncio.timeout(30):
        while not world.ask.calls:
            await asyncio.sleep(0)
    await left_behind(world, world.server.cancel("blue", begun.batch_id))
    assert (await world.end(begun)).status is BatchStatus.CANCELLED
    world.close()


async def left_behind(world: World, call: Coroutine[Any, Any, object]) -> None:
    task = asyncio.create_task(call)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    for _ in range(2):  # `cancel` goes to the disk twice
        await world.disk.once(lambda: None)


async def test_a_content_is_read_in_parts_by_its_tenant(tmp_path: Path) -> None:
    world = open_world(tmp_path)
    content = bytes(range(256)) * (MAX_PART_BYTES // 256 - 1)
    file_id = upload(world.store, content)
    parts = [await world.server.stored("read_file", "blue", file_id, offset) for offset in (0, 1000, len(content))]
    assert parts == [content, content[1000:], b""]
    with pytest.raises(RequestError, match="no file"):
        await world.server.stored("read_file", "red", file_id, 0)
    world.close()
