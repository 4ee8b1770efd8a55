"""A folder of batches whose process can be killed, and whose disk can be full, at any point."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from deployments.batches import result_file
from deployments.batches.result_file import output_ids
from deployments.batches.server import BatchServer
from deployments.batches.store import BatchStore
from deployments.batches.values import Batch, InsideAnswer, InsideCall, NewBatch, NewFile
from deployments.config import BatchesConfig
from deployments.disk import Disk

ENDPOINT = "/v1/chat/completions"
LIMITS: dict[str, int] = {
    "max_tenant_bytes": 1 << 20,
    "max_unfinished": 3,
    "responses_last_s": 3600,
    "max_response_bytes": 1 << 20,
}


def config(folder: Path, **changes: Any) -> BatchesConfig:
    fields = {"max_lines": 50, "max_line_bytes": 4096, "max_concurrent_requests": 3} | LIMITS | changes
    return BatchesConfig(folder=str(folder), **fields)


def a_line(custom_id: str, *, model: str = "base", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"model": model} | body}


def lines(*names: str, **body: object) -> list[dict[str, object]]:
    """Lines whose bodies have their names."""
    return [a_line(name, name=name, **body) for name in names]


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def upload(store: BatchStore, content: bytes, tenant: str = "blue", **fields: Any) -> str:
    upload_id = store.uploads.begin(tenant, 0)
    store.uploads.append(upload_id, 0, content)
    new = NewFile(**{"tenant": tenant, "name": "in.jsonl", "purpose": "batch"} | fields)
    return store.finish_upload(upload_id, new).file_id


def a_batch(store: BatchStore, *lines: Any, tenant: str = "blue", **fields: Any) -> Batch:
    return store.add_batch(
        NewBatch(tenant=tenant, input_file_id=upload(store, jsonl(*lines), tenant), endpoint=ENDPOINT, **fields)
    )


def written(folder: Path, batch_id: str) -> list[dict[str, Any]]:
    """The whole lines of both output files."""
    found = []
    for file_id in output_ids(batch_id):
        path = folder / "files" / file_id
        if path.exists():
            lines = path.read_bytes().splitlines(keepends=True)
            found += [json.loads(line) for line in lines if line.endswith(b"\n")]
    return found


class KilledError(BaseException):
    """SIGKILL, as far as one process can tell of it: nothing that it still does has an effect."""


@dataclass
class Fate:
    """What happens to a process, by the number of the point that it has come to."""

    dies_at: int | None = None
    full_at: frozenset[int] = frozenset()
    point: int = 0

    def come(self) -> bool:
        """Come to a point; return whether the disk is full there."""
        self.point += 1
        if self.dies_at is not None and self.point >= self.dies_at:
            raise KilledError
        return self.point in self.full_at


class FatefulStore(BatchStore):
    fate = Fate()

    def move(self, *args: Any, **options: Any) -> Batch:
        return self._done(lambda: BatchStore.move(self, *args, **options))

    def finish(self, *args: Any, **options: Any) -> Batch:
        return self._done(lambda: BatchStore.finish(self, *args, **options))

    def _done(self, work: Callable[[], Batch]) -> Batch:
        if self.fate.come():
            raise OperationalError("UPDATE", {}, Exception("database or disk is full"))
        batch = work()
        self.fate.come()
        return batch


@contextmanager
def fateful_files(fate: Fate) -> Iterator[None]:
    """Let writes of output lines be cut, fail and be killed in their middle."""

    class FatefulOs:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def pwrite(self, file: int, data: bytes, offset: int) -> int:
            if fate.come():
                return os.pwrite(file, data[: len(data) // 2], offset)
            os.pwrite(file, data[: len(data) // 2], offset)
            fate.come()
            return os.pwrite(file, data, offset)

        def fsync(self, file: int) -> None:
            if fate.come():
                raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(result_file, "os", FatefulOs())
        yield


@dataclass
class Asked:
    """Answers lines as their bodies say: `statuses` one after the other, the last one for ever, and `would_recur`."""

    fate: Fate = field(default_factory=Fate)
    calls: list[InsideCall] = field(default_factory=list)
    on_call: Callable[[InsideCall], None] = lambda call: None
    never_answers: bool = False
    models: tuple[str, ...] = ("base",)
    seen: dict[bytes, int] = field(default_factory=dict)

    async def __call__(self, call: InsideCall) -> InsideAnswer:
        self.fate.come()
        if call.method == "GET":
            return InsideAnswer(status=200 if call.path.removeprefix("/v1/models/") in self.models else 404)
        self.calls.append(call)
        self.on_call(call)
        if self.never_answers:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        self.fate.come()
        body = json.loads(call.body)
        statuses: Sequence[int] = body.get("statuses", [200])
        status = statuses[min(self.seen.get(call.body, 0), len(statuses) - 1)]
        self.seen[call.body] = self.seen.get(call.body, 0) + 1
        return InsideAnswer(
            status=status,
            body=b'{"ok": true}',
            retry_after_s=7.0 if status == 429 else None,
            is_final=body.get("would_recur", False),
        )

    @property
    def names(self) -> list[str]:
        return [json.loads(call.body)["name"] for call in self.calls]


async def until_idle(server: BatchServer) -> None:
    """Wait until no batch is under way."""
    while server._tasks:
        await asyncio.wait(server._tasks.values())


@dataclass
class World:
    """One process over a folder."""

    folder: Path
    ask: Asked
    store: BatchStore
    server: BatchServer
    disk: Disk
    slept: list[float]
    now_s: list[float]

    def close(self) -> None:
        self.disk._thread.shutdown()
        self.store.close()

    async def end(self, batch: Batch) -> Batch:
        await until_idle(self.server)
        return self.store.batch(batch.batch_id)

    def ended(self, batch: Batch) -> dict[str, str]:
        """What became of each line: "200", another status, or the code of an error."""
        lines = written(self.folder, batch.batch_id)
        told = {
            line["custom_id"]: str((line["response"] or {}).get("status_code") or line["error"]["code"])
            for line in lines
        }
        assert len(told) == len(lines)
        return told


def open_world(folder: Path, *, fate: Fate | None = None, **changes: Any) -> World:
    """Open the folder as a process that has just started; nothing in it sleeps."""
    fate = fate or Fate()
    slept: list[float] = []
    now_s = [time.time()]

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)

    store = FatefulStore(config(folder), clock=lambda: now_s[0])
    store.fate = fate
    disk, ask = Disk("batches", sleep=sleep), Asked(fate=fate)
    server = BatchServer(config(folder, **changes), disk, ask)
    server.store = store
    return World(folder, ask, store, server, disk, slept, now_s)
