from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError

from deployments.batches.result_file import output_ids
from deployments.batches.store import BatchStore
from deployments.batches.tables import files
from deployments.batches.tenant_bytes import TenantBytes
from deployments.batches.values import MIN_FILE_BYTES, BatchStatus, KeptResponse
from engine.errors import RequestError
from tests.deployments.batches.batch_world import LIMITS, a_batch, a_line, config, upload

NOW_S = 1_700_000_000


@pytest.fixture
def now_s() -> list[int]:
    return [NOW_S]


@pytest.fixture
def store(tmp_path: Path, now_s: list[int]) -> Iterator[BatchStore]:
    store = BatchStore(config(tmp_path), clock=lambda: now_s[0])
    yield store
    store.close()


@pytest.fixture
def summed() -> Iterator[list[str]]:
    """The statements that sum up rows."""
    statements: list[str] = []

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        if "sum(" in statement:
            statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield statements
    event.remove(Engine, "before_cursor_execute", note)


def test_files_are_summed_up_once_however_they_come_and_go(
    store: BatchStore, now_s: list[int], summed: list[str]
) -> None:
    """Every line of a batch and every part of an upload did so, in the thread that all others wait for."""
    for tenant in ("blue", "red"):
        upload(store, b"x" * 5000, tenant)
    batch = a_batch(store, a_line("a"), tenant="red")
    del summed[:]
    kept, expiring = upload(store, b"x" * 9000), upload(store, b"x", lasts_s=60)
    assert store._tenant_bytes("blue") == 5000 + 9000 + MIN_FILE_BYTES
    store.delete_file("blue", kept)
    now_s[0] += 60
    assert store.drop_expired() == 1
    with pytest.raises(RequestError):
        store.delete_file("blue", expiring)
    assert store._tenant_bytes("blue") == 5000
    Path(store.content_path(output_ids(batch.batch_id)[0])).write_bytes(b"x" * 7000)
    before = store._tenant_bytes("red")
    store.finish(batch.batch_id, BatchStatus.COMPLETED)
    assert store._tenant_bytes("red") == before == 5000 + MIN_FILE_BYTES + 7000
    assert summed == []


def test_responses_are_summed_up_once_however_they_come_and_go(
    store: BatchStore, now_s: list[int], summed: list[str]
) -> None:
    """One that was deleted or had expired let the next one sum up all: seconds for 100,000, once a minute."""
    kept = store.responses

    def keep(*names: str, num_bytes: int) -> None:
        for name in names:
            body = b"x" * (num_bytes - 2)
            kept.keep(
                KeptResponse(
                    response_id=name, tenant="blue", previous_id=None, created_s=now_s[0], input_items=b"[]", body=body
                )
            )

    keep("a", "b", num_bytes=LIMITS["max_response_bytes"] // 4)
    del summed[:]
    kept.forget("blue", "a")
    now_s[0] += LIMITS["responses_last_s"] - 1
    keep("c", num_bytes=LIMITS["max_response_bytes"])
    assert not kept.several("blue", ["b"]), "it made room"
    now_s[0] += 1
    keep("d", num_bytes=LIMITS["max_response_bytes"] // 4)
    now_s[0] += LIMITS["responses_last_s"] - 1
    store.drop_expired()
    names = "efgh"
    keep(*names, num_bytes=LIMITS["max_response_bytes"] // 4)
    assert [one.response_id for one in kept.several("blue", ["d", *names])] == [*names]
    now_s[0] += LIMITS["responses_last_s"]
    store.drop_expired()
    keep(*"ijkl", num_bytes=LIMITS["max_response_bytes"] // 4)
    assert len(kept.several("blue", [*"ijkl"])) == 4
    assert summed == []


def fail(connection: Any) -> None:
    raise OperationalError("COMMIT", {}, Exception("disk I/O error"))


@pytest.mark.parametrize("end", [fail, lambda connection: None])
def test_what_was_not_committed_does_not_count(
    store: BatchStore, summed: list[str], end: Callable[[Any], None]
) -> None:
    upload(store, b"x" * 5000)
    sums = TenantBytes(files.c.tenant, files.c.num_bytes)
    with store._engine.connect() as connection:
        assert sums.of(connection, "blue") == 5000
    event.listen(store._engine, "commit", end)
    try:
        with sums.changes() as change, store._engine.begin() as connection:
            change["blue"] += 10
            change["red"] += 10
    except OperationalError:
        assert end is fail
    event.remove(store._engine, "commit", end)
    with store._engine.connect() as connection:
        # Whatever that commit has done is read from the table.
        assert sums.of(connection, "blue") == (5000 if end is fail else 5010)
        assert sums.of(connection, "red") == 0
