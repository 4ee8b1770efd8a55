"""Runs one batch from its current status to its end.

    validating -> failed | in_progress -> finalizing -> completed | expired
    validating | in_progress -> cancelling -> cancelled

The output files are the record of progress. If a runner is killed at any point, its successor runs only the lines
whose answers were not written yet.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from deployments.batches.lines import (
    ContentGoneError,
    InputLine,
    LineReader,
    answered_line,
    check_input,
    failed_line,
    parse_line,
)
from deployments.batches.result_file import ResultFile, output_ids
from deployments.batches.retries import Retries
from deployments.batches.store import BatchStore
from deployments.batches.values import (
    MAX_LINE_BYTES,
    Batch,
    BatchCounts,
    BatchStatus,
    InsideAnswer,
    InsideCall,
    LineError,
)
from deployments.config import BatchesConfig
from deployments.disk import Disk
from deployments.room import Room

T = TypeVar("T")

Ask = Callable[[InsideCall], Awaitable[InsideAnswer]]
"""Answers a request; with a 503 if no gateway can be reached now."""

MAX_GIVEN_UP, MAX_GIVEN_UP_BYTES = 100, MAX_LINE_BYTES
"""How many lines are given up at once, and of how many bytes: others wait meanwhile."""

_MESSAGE_BY_END = {
    BatchStatus.COMPLETED: (
        "storage_full",
        "This request was not begun: all files together had reached their bound (`batches.max_tenant_bytes`).",
    ),
    BatchStatus.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was answered."),
    BatchStatus.EXPIRED: ("batch_expired", "The batch expired before this request was answered."),
}
_TIME_TOO_SHORT = 503
"""Of an answer that would recur: even an idle server needs more time than the batch has left."""
_INPUT_GONE = LineError(
    code="file_not_found", message="The input file's content is gone; upload it again.", param="input_file_id"
)


class BatchRunner:
    """The execution of one batch.

    Args:
        room: bounds the concurrent requests of all batches together; tenants take turns.
    """

    def __init__(
        self,
        config: BatchesConfig,
        store: BatchStore,
        disk: Disk,
        ask: Ask,
        room: Room,
        batch: Batch,
    ) -> None:
        self._config = config
        self._store = store
        self._disk = disk
        self._ask = ask
        self._room = room
        self._batch = batch
        self._is_cancelled = asyncio.Event()
        self._is_full = False
        self._results: ResultFile | None = None
        self._failures: ResultFile | None = None

    @property
    def counts(self) -> BatchCounts:
        """The number of lines done so far."""
        if self._results is None or self._failures is None:
            return self._batch.counts
        return BatchCounts(
            total=self._batch.counts.total,
            completed=len(self._results.custom_ids),
            failed=len(self._failures.custom_ids),
        )

    def cancel(self) -> None:
        """Stop running lines. The store must already have the batch as cancelling."""
        self._is_cancelled.set()

    async def run(self) -> None:
        """Run the batch to its end."""
        try:
            if self._batch.status is BatchStatus.VALIDATING:
                await self._validate()
            if self._batch.status in (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING, BatchStatus.FINALIZING):
                await self._work()
        except ContentGoneError:
            # What was answered is kept; of the other lines not even the `custom_id` is known.
            is_cancelled = self._is_cancelled.is_set() or self._batch.status is BatchStatus.CANCELLING
            end = BatchStatus.CANCELLED if is_cancelled else BatchStatus.FAILED
            await self._finish(end, errors=(_INPUT_GONE,))
        finally:
            for file in filter(None, (self._results, self._failures)):
                self._disk.later(file.close)

    async def _validate(self) -> None:
        report = await self._disk.aside(
            check_input,
            self._store.content_path(self._batch.input_file_id),
            self._batch.endpoint,
            max_lines=self._config.max_lines,
            max_line_bytes=self._config.max_line_bytes,
        )
        errors = report.errors or await self._check_model(report.model)
        if errors:
            await self._move(BatchStatus.VALIDATING, BatchStatus.FAILED, errors=tuple(errors))
        else:
            counts = BatchCounts(total=report.num_lines)
            await self._move(BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, model=report.model, counts=counts)

    async def _move(self, out_of: BatchStatus, to: BatchStatus, **changes: Any) -> None:
        batch_id = self._batch.batch_id
        self._batch = await self._disk.surely(self._store.move, batch_id, to, out_of=[out_of], **changes)

    async def _check_model(self, model: str) -> list[LineError]:
        answer = await self._answer("GET", f"/v1/models/{model}", self._line_id())
        if answer is None or answer.status == 200:
            return []
        if answer.status == 404:
            message = f"The model '{model[:128]}' does not exist."
            return [LineError(code="model_not_found", message=message, line=1, param="body.model")]
        message = f"The server could not tell whether the model '{model[:128]}' exists (status {answer.status})."
        return [LineError(code="server_error", message=message)]

    async def _work(self) -> None:
        if self._batch.counts.total:  # zero if it was cancelled before it was validated
            output_id, error_id = output_ids(self._batch.batch_id)
            # Reading back the vectors of a large batch takes half a minute. Nothing of an earlier runner is still being
            # written: the batch was read in the disk's thread since.
            self._results = await self._disk.aside(ResultFile, self._store.content_path(output_id))
            self._failures = await self._disk.aside(ResultFile, self._store.content_path(error_id))
            async with self._input() as reader, asyncio.TaskGroup() as workers:
                for _ in range(self._config.max_concurrent_requests):
                    workers.create_task(self._answer_some(reader))
        await self._move(BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
        end = BatchStatus.COMPLETED
        if self._batch.status is BatchStatus.CANCELLING:
            end = BatchStatus.CANCELLED
        elif self._num_left and not self._is_full:
            end = BatchStatus.EXPIRED
        await self._give_up_rest(end)
        await self._finish(end)

    async def _finish(self, end: BatchStatus, **changes: Any) -> None:
        batch_id, counts = self._batch.batch_id, self.counts
        self._batch = await self._disk.surely(self._store.finish, batch_id, end, counts=counts, **changes)

    @property
    def _num_left(self) -> int:
        return self.counts.total - self.counts.completed - self.counts.failed

    async def _answer_some(self, reader: LineReader) -> None:
        while not self._is_over and not await self._has_no_room():
            line = await self._disk.surely(self._next, reader)
            if line is None:
                return
            line_id = self._line_id()
            answer = await self._answer("POST", self._batch.endpoint, line_id, line.body)
            if answer is not None:
                text = answered_line(line_id, line.custom_id, answer.status, answer.body)
                await self._write({line.custom_id: text}, is_good=200 <= answer.status < 300)

    async def _has_no_room(self) -> bool:
        # Answers may be a thousand times as long as their questions. Those under way are still written.
        self._is_full = self._is_full or await self._disk.surely(self._store.is_full, self._batch.tenant)
        return self._is_full

    async def _give_up_rest(self, end: BatchStatus) -> None:
        """Write an error line with the reason for every unanswered line."""
        if not self._num_left:
            return
        async with self._input() as reader:
            has_more = True
            while has_more:
                rest: dict[str, bytes] = {}
                has_more = await self._disk.surely(self._give_up_some, reader, end, rest)
                if rest:
                    await self._write(rest, is_good=False)

    def _give_up_some(self, reader: LineReader, end: BatchStatus, rest: dict[str, bytes]) -> bool:
        """Add the error lines of the next unanswered lines to `rest`, which a retried call goes on with.

        Returns whether there may be more.
        """
        num_bytes = 0
        while len(rest) < MAX_GIVEN_UP and num_bytes < MAX_GIVEN_UP_BYTES:
            line = self._next(reader)
            if line is None:
                return False
            num_bytes += len(line.body)
            rest[line.custom_id] = failed_line(self._line_id(), line.custom_id, *_MESSAGE_BY_END[end])
        return True

    async def _write(self, lines: Mapping[str, bytes], *, is_good: bool) -> None:
        file = self._results if is_good else self._failures
        assert file is not None
        await self._disk.surely(file.append, lines)

    async def _answer(self, method: str, path: str, line_id: str, body: bytes = b"") -> InsideAnswer | None:
        """Ask until there is a final answer; return None if the batch is over first, or will be before there is one."""
        call = InsideCall(tenant=self._batch.tenant, method=method, path=path, request_id=line_id, body=body)
        retries = Retries()
        while not self._is_over:
            async with AsyncExitStack() as place:
                await self._unless_over(place.enter_async_context(self._room.place(self._batch.tenant)))
                asked = replace(call, timeout_s=self._left_s)
                answer = None if self._is_over else await self._unless_over(self._ask(asked))
            if answer is None or (answer.is_final and answer.status == _TIME_TOO_SHORT):
                return None
            wait_s = retries.wait_s(answer)
            if wait_s is None:
                return answer
            await self._unless_over(self._disk.sleep(wait_s))
        return None

    async def _unless_over(self, work: Awaitable[T]) -> T | None:
        """Await work until the batch is cancelled or expires; then cancel it and return None."""
        task, cancelled = asyncio.ensure_future(work), asyncio.ensure_future(self._is_cancelled.wait())
        try:
            await asyncio.wait({task, cancelled}, timeout=self._left_s, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            cancelled.cancel()
            await asyncio.wait({task, cancelled})

    @property
    def _left_s(self) -> float:
        return max(0.0, self._batch.expires_s - self._store.clock())

    @property
    def _is_over(self) -> bool:
        return self._is_cancelled.is_set() or self._left_s == 0 or self._batch.status is BatchStatus.CANCELLING

    @asynccontextmanager
    async def _input(self) -> AsyncGenerator[LineReader, None]:
        path = self._store.content_path(self._batch.input_file_id)
        reader = await self._disk.surely(LineReader, path, MAX_LINE_BYTES)
        try:
            yield reader
        finally:
            self._disk.later(reader.close)

    def _next(self, reader: LineReader) -> InputLine | None:
        """Return the next line that is not done, or None at the end.

        The file has been validated, perhaps by a server with other limits: a line over those of today is refused as
        the request that it is.
        """
        assert self._results is not None
        assert self._failures is not None
        while (raw := reader.next()) is not None:
            line = parse_line(raw, self._batch.endpoint, max_line_bytes=MAX_LINE_BYTES)
            if line.custom_id not in self._results.custom_ids and line.custom_id not in self._failures.custom_ids:
                return line
        return None

    def _line_id(self) -> str:
        return f"batch_req_{uuid.uuid4().hex}"
