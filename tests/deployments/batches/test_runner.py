"""A batch comes to its end, each line once, whatever happens to its process and its disk on the way."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deployments.batches import runner
from deployments.batches.lines import InputLine, LineReader
from deployments.batches.result_file import ResultFile
from deployments.batches.runner import BatchRunner
from deployments.batches.server import RESTART_S
from deployments.batches.values import (
    WINDOW_S,
    Batch,
    BatchCounts,
    BatchStatus,
    InsideAnswer,
    InsideCall,
    NewBatch,
    PageQuestion,
)
from deployments.errors import RETRY_S, UnavailableError
from engine.errors import RequestError
from tests.deployments.batches.batch_world import (
    ENDPOINT,
    LIMITS,
    Fate,
    KilledError,
    World,
    a_batch,
    a_line,
    fateful_files,
    lines,
    open_world,
    until_idle,
    upload,
    written,
)

MEMORY = "/dev/shm"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = open_world(tmp_path)
    yield world
    world.close()


async def run(world: World, *given: object, **fields: object) -> Batch:
    batch = a_batch(world.store, *given, **fields)  # type: ignore[arg-type]
    await world.server.resume(world.store)
    return await world.end(batch)


async def test_each_line_is_answered_once_and_good_and_bad_answers_have_files_of_their_own(world: World) -> None:
    batch = await run(world, *lines("a", "b"), *lines("c", statuses=[400]))
    assert batch.status is BatchStatus.COMPLETED
    assert batch.counts == BatchCounts(total=3, completed=2, failed=1)
    assert list(batch.reached_s) == ["in_progress", "finalizing", "completed"]
    assert batch.model == "base"
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    output, errors = (Path(world.store.content_path(i)) for i in (batch.output_file_id, batch.error_file_id))
    assert sorted(json.loads(line)["custom_id"] for line in output.read_text().splitlines()) == ["a", "b"]
    [line] = map(json.loads, errors.read_text().splitlines())
    assert (line["custom_id"], line["response"]["status_code"], line["error"]) == ("c", 400, None)
    assert line["response"]["request_id"] == line["id"] in {call.request_id for call in world.ask.calls}
    assert {call.tenant for call in world.ask.calls} == {"blue"}
    assert all(0 < (call.timeout_s or 0) <= WINDOW_S for call in world.ask.calls)


async def test_who_is_told_to_come_back_does_and_failures_are_tried_again(world: World) -> None:
    batch = await run(world, *lines("a", statuses=[429, 503, 500, 200]), *lines("b", statuses=[500]))
    assert world.ended(batch) == {"a": "200", "b": "500"}
    assert sorted(world.slept) == [1.0, 2.0, 2.0, 4.0, 7.0]
    assert world.ask.names.count("a") == 4


@pytest.mark.parametrize(
    ("bad", "code", "line"),
    [(a_line("x", model="gone"), "model_not_found", 1), (["no"], "invalid_json_line", 1)],
)
async def test_a_bad_input_fails_before_anything_is_asked(world: World, bad: object, code: str, line: int) -> None:
    batch = await run(world, bad)
    assert (batch.status, [(error.code, error.line) for error in batch.errors]) == (BatchStatus.FAILED, [(code, line)])
    assert (world.ask.calls, batch.output_file_id, batch.error_file_id) == ([], None, None)


@pytest.mark.parametrize(("model", "end"), [("sql@3", BatchStatus.COMPLETED), ("sql@4", BatchStatus.FAILED)])
async def test_a_version_of_an_adapter_is_looked_for_itself(world: World, model: str, end: BatchStatus) -> None:
    """Its name was: a version on trial, whose name has no other, was not found, nor was one that a tenant may use by
    its number only."""
    world.ask.models = ("sql@3",)
    batch = await run(world, a_line("a", model=model, name="a"))
    assert batch.status is end


async def test_others_are_served_while_a_large_output_is_read_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read in the thread of the disk: for half a minute after a restart everybody got a 503."""
    is_served, was_served = threading.Event(), []

    class LargeFile(ResultFile):
        def _read(self) -> None:
            was_served.append(is_served.wait(10))
            super()._read()

    monkeypatch.setattr(runner, "ResultFile", LargeFile)
    batch = a_batch(world.store, *lines("a"))
    await world.server.resume(world.store)
    while (await world.server.batch("blue", batch.batch_id)).status is BatchStatus.VALIDATING:
        await asyncio.sleep(0)
    await world.server.batch("blue", batch.batch_id)
    is_served.set()
    assert world.ended(await world.end(batch)) == {"a": "200"}
    assert was_served == [True, True]


async def test_counts_move_while_it_runs_and_a_cancelled_batch_keeps_what_it_has(world: World) -> None:
    seen = []
    batch = a_batch(world.store, *lines(*"abcdef"))

    def look(call: InsideCall) -> None:
        world.ask.never_answers = len(world.ask.calls) > 3

    world.ask.on_call = look
    await world.server.resume(world.store)
    while (now := await world.server.batch("blue", batch.batch_id)).counts.completed < 3:
        seen.append(now.counts.completed)
    assert now.counts.total == 6
    assert (await world.server.list_batches("blue", PageQuestion(1))).items == (now,)
    with pytest.raises(RequestError, match="no batch"):
        await world.server.cancel("red", batch.batch_id)
    assert (await world.server.cancel("blue", batch.batch_id)).status is BatchStatus.CANCELLING
    batch = await world.end(batch)
    assert batch.status is BatchStatus.CANCELLED
    assert sorted(world.ended(batch).values()) == ["200"] * 3 + ["batch_cancelled"] * 3
    assert batch.counts == BatchCounts(total=6, completed=3, failed=3)
    assert world.slept == []
    with pytest.raises(RequestError, match="cannot be cancelled"):
        await world.server.cancel("blue", batch.batch_id)


@pytest.mark.parametrize(("bound", "num_writes"), [("MAX_GIVEN_UP", 2), ("MAX_GIVEN_UP_BYTES", 20), (None, 1)])
async def test_lines_are_given_up_many_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch, bound: str | None, num_writes: int
) -> None:
    """Each waited for the disk on its own: a batch of 50,000 lines took minutes to be cancelled."""
    world.ask.never_answers = True
    batch = a_batch(world.store, *lines(*map(str, range(20))))
    await world.server.resume(world.store)
    while not world.ask.calls:
        await asyncio.sleep(0)
    if bound is not None:
        monkeypatch.setattr(runner, bound, 10 if bound == "MAX_GIVEN_UP" else 1)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    await world.server.cancel("blue", batch.batch_id)
    batch = await world.end(batch)
    assert set(world.ended(batch).values()) == {"batch_cancelled"}
    assert batch.counts == BatchCounts(total=20, failed=20)
    assert len(synced) == num_writes


async def test_lines_that_were_read_before_the_disk_failed_are_given_up_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ask.never_answers = True
    batch = a_batch(world.store, *lines(*"abcde"))
    await world.server.resume(world.store)
    while not world.ask.calls:
        await asyncio.sleep(0)
    read, num_read = BatchRunner._next, 0

    def failing(self: BatchRunner, reader: LineReader) -> InputLine | None:
        nonlocal num_read
        num_read += 1
        if num_read == 3:
            raise OSError(errno.EIO, "the disk")
        return read(self, reader)

    monkeypatch.setattr(BatchRunner, "_next", failing)
    await world.server.cancel("blue", batch.batch_id)
    batch = await world.end(batch)
    assert set(world.ended(batch).values()) == {"batch_cancelled"}
    assert batch.counts == BatchCounts(total=5, failed=5)


async def test_a_batch_ends_though_others_have_all_turns(tmp_path: Path) -> None:
    """One that was cancelled or had expired stayed for as long as the lines of others, which may be a day."""
    world = open_world(tmp_path, max_concurrent_requests=1)
    world.ask.never_answers = True
    methods: list[str] = []

    async def ask(call: InsideCall) -> InsideAnswer:
        methods.append(call.method)
        return await world.ask(call)

    world.server._ask = ask
    first = a_batch(world.store, *lines("a"))
    await world.server.resume(world.store)
    while not world.ask.calls:
        await asyncio.sleep(0)
    new = NewBatch(tenant="blue", input_file_id=first.input_file_id, endpoint=ENDPOINT)
    second = await world.server.create(new)
    await world.disk.once(lambda: None)
    await world.server.cancel("blue", second.batch_id)
    await asyncio.wait({world.server._tasks[second.batch_id]}, timeout=10)
    assert world.store.batch(second.batch_id).status is BatchStatus.CANCELLED
    assert methods == ["GET", "POST"], "nothing is asked for a batch that is over"
    # Its turns are nobody's.
    await world.server.cancel("blue", first.batch_id)
    world.ask.never_answers = False
    third = await world.end(await world.server.create(new))
    assert third.status is BatchStatus.COMPLETED
    world.close()


async def test_tenants_take_turns_however_many_batches_they_have(tmp_path: Path) -> None:
    """One with eight batches had eight times the lines of one with a single batch."""
    world = open_world(tmp_path, max_concurrent_requests=2)

    async def slowly(call: InsideCall) -> InsideAnswer:
        for _ in range(20):  # meanwhile all others come to wait for their turns
            await world.disk.once(lambda: None)
        return await world.ask(call)

    world.server._ask = slowly
    for _ in range(3):
        a_batch(world.store, *lines(*map(str, range(10))))
    a_batch(world.store, *lines(*map(str, range(10))), tenant="red")
    await world.server.resume(world.store)
    await until_idle(world.server)
    tenants = [call.tenant for call in world.ask.calls]
    until_red_had_all = tenants[: len(tenants) - tenants[::-1].index("red")]
    assert until_red_had_all.count("blue") < 20
    world.close()


async def test_a_batch_that_is_cancelled_before_it_was_looked_at_has_no_lines(world: World) -> None:
    batch = a_batch(world.store, *lines("a"))
    await world.server.cancel("blue", batch.batch_id)
    await world.server.resume(world.store)
    batch = await world.end(batch)
    assert (batch.status, world.ask.calls, batch.error_file_id) == (BatchStatus.CANCELLED, [], None)


async def test_what_is_not_answered_in_time_has_expired(world: World) -> None:
    def late(call: InsideCall) -> None:
        world.now_s[0] += WINDOW_S / 2

    world.ask.on_call = late
    batch = await run(world, *lines(*"abcd"))
    assert batch.status is BatchStatus.EXPIRED
    assert sorted(set(world.ended(batch).values())) == ["200", "batch_expired"]
    assert len(world.ended(batch)) == 4


async def test_what_the_time_left_is_too_short_for_has_expired_and_what_is_shorter_is_still_answered(
    world: World,
) -> None:
    """Shortly before its end a batch took the refusals for answers, of all lines that were left, and was completed."""
    refused, failed = (lines(name, statuses=[status], would_recur=True) for name, status in (("a", 503), ("b", 500)))
    batch = await run(world, *refused, *failed, *lines("c"))
    assert batch.status is BatchStatus.EXPIRED
    assert world.ended(batch) == {"a": "batch_expired", "b": "500", "c": "200"}
    assert (world.slept, world.ask.names.count("a")) == ([], 1)


async def test_a_batch_whose_tenant_has_no_more_room_ends_with_what_it_has(world: World) -> None:
    def fill(call: InsideCall) -> None:
        while len(world.ask.calls) == 4 and not world.store.is_full("blue"):
            # Too much if a result is written meanwhile.
            with suppress(RequestError):
                upload(world.store, b"x" * (LIMITS["max_tenant_bytes"] - world.store._tenant_bytes("blue")))

    world.ask.on_call = fill
    batch = await run(world, *lines(*"abcdefgh"))
    assert batch.status is BatchStatus.COMPLETED
    ends = sorted(world.ended(batch).values())
    num_answered = ends.count("200")
    # What was under way when there was no more room is kept.
    assert 4 <= num_answered == len(world.ask.calls) <= 6
    assert ends == ["200"] * num_answered + ["storage_full"] * (8 - num_answered)
    assert batch.counts == BatchCounts(total=8, completed=num_answered, failed=8 - num_answered)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_batch_ends_though_a_limit_was_lowered_below_one_of_its_lines(
    tmp_path: Path, is_cancelled: bool
) -> None:
    world = open_world(tmp_path)
    batch = a_batch(world.store, *lines("a", pad="x" * 200), *lines("b"))
    world.ask.never_answers = True
    await world.server.resume(world.store)
    while len(world.ask.calls) < 2:
        await asyncio.sleep(0)
    for task in list(world.server._tasks.values()):
        task.cancel()
    await until_idle(world.server)
    world.close()
    world = open_world(tmp_path, max_line_bytes=100)
    try:
        if is_cancelled:
            await world.server.cancel("blue", batch.batch_id)
        await world.server.resume(world.store)
        async with asyncio.timeout(10):
            batch = await world.end(batch)
        assert batch.status is (BatchStatus.CANCELLED if is_cancelled else BatchStatus.COMPLETED)
        assert len(world.ended(batch)) == 2
    finally:
        world.close()


async def test_so_many_requests_are_under_way_and_no_more(world: World) -> None:
    world.ask.never_answers = True
    batches = [a_batch(world.store, *lines(*"abcd"), tenant=tenant) for tenant in ("blue", "red")]
    await world.server.resume(world.store)
    while len(world.ask.calls) < 3:
        await asyncio.sleep(0.001)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert len(world.ask.calls) == 3
    for batch in batches:
        await world.server.cancel(batch.tenant, batch.batch_id)
    await until_idle(world.server)


async def test_a_batch_that_trips_is_gone_on_with(world: World) -> None:
    trips = [True]

    def trip(call: InsideCall) -> None:
        if trips and len(world.ask.calls) > 2:
            trips.pop()
            raise ValueError("a bug")

    world.ask.on_call = trip
    batch = await run(world, *lines(*"abcd"))
    assert (batch.status, len(world.ended(batch))) == (BatchStatus.COMPLETED, 4)
    assert world.slept == [RESTART_S]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(num_lines=1, deaths=[1], full_at=frozenset({1}), is_cancelled=True)
@given(
    num_lines=st.integers(1, 5),
    deaths=st.lists(st.integers(1, 45), max_size=4),
    full_at=st.frozensets(st.integers(1, 45), max_size=4),
    is_cancelled=st.booleans(),
)
def test_every_line_has_one_answer_wherever_the_process_dies_and_the_disk_is_full(
    num_lines: int, deaths: list[int], full_at: frozenset[int], is_cancelled: bool
) -> None:
    names = [f"line-{i}" for i in range(num_lines)]
    # In memory: what a disk takes for every line is not what is tested.
    with tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        world = open_world(Path(folder))
        batch = a_batch(world.store, *lines(*names[:-1]), *lines(names[-1], statuses=[503, 400]))
        world.close()
        for number, dies_at in enumerate([*deaths, None]):
            fate = Fate(dies_at=dies_at, full_at=full_at)
            done_before = {line["custom_id"] for line in written(Path(folder), batch.batch_id)}
            world = open_world(Path(folder), fate=fate)
            try:
                if is_cancelled and number == len(deaths) and number > 0:
                    fate.dies_at = None
                    asyncio.run(cancelled(world, batch))
                with fateful_files(fate):
                    asyncio.run(one_life(world, batch))
            finally:
                world.close()
            # What is on the disk is never asked for again, and waits for the disk are short.
            assert done_before.isdisjoint(world.ask.names)
            assert {*world.slept} <= {RETRY_S, 1.0}
        ended = world.ended(batch)
        assert set(ended) in ({*names}, set())
        with_status = {name for name, end in ended.items() if end.isdigit()}
        world = open_world(Path(folder))
        batch = world.store.batch(batch.batch_id)
        world.close()
        assert batch.counts.completed + batch.counts.failed == batch.counts.total == len(ended)
        if batch.status is BatchStatus.COMPLETED:
            assert with_status == {*names}
            assert (batch.counts.failed, batch.error_file_id is not None) == (1, True)
        else:
            assert is_cancelled
            assert batch.status is BatchStatus.CANCELLED


async def one_life(world: World, batch: Batch) -> None:
    """Run what there is until its end, or the process's."""
    server = world.server
    for found in world.store.unfinished():
        runner = BatchRunner(server._config, world.store, world.disk, world.ask, server._room, found)
        try:
            await runner.run()
        except BaseException as death:
            rest = death.split(KilledError)[1] if isinstance(death, BaseExceptionGroup) else death
            if not isinstance(rest, KilledError | None):
                raise


async def cancelled(world: World, batch: Batch) -> None:
    while world.store.unfinished():
        try:
            await world.server.cancel("blue", batch.batch_id)
        except UnavailableError:
            continue  # A client that is told of a full disk asks again.
        return
