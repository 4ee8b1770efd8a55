"""Uploads against a real store's files; test_store.py reads what they become."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.batches.store import BatchStore
from deployments.batches.uploads import Uploads
from deployments.batches.values import MIN_FILE_BYTES, NewFile
from deployments.errors import UnavailableError
from engine.errors import RequestError
from tests.deployments.batches.batch_world import LIMITS, config, upload

LIMIT = LIMITS["max_tenant_bytes"]
NEW = NewFile(tenant="blue", name="x", purpose="batch")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    store = BatchStore(config(tmp_path))
    yield store
    store.close()


@pytest.fixture
def uploads(store: BatchStore) -> Uploads:
    return store.uploads


def is_full(call: Any, *args: Any) -> bool:
    with pytest.raises(RequestError, match="or on their way") as refused:
        call(*args)
    return (refused.value.field, refused.value.code) == ("file", "storage_full")


def test_what_does_not_fit_beside_the_tenant_s_other_uploads_does_not_begin(uploads: Uploads) -> None:
    """Any number could fill the disk, each to be refused at its end."""
    first = uploads.begin("blue", LIMIT - MIN_FILE_BYTES)
    assert is_full(uploads.begin, "blue", MIN_FILE_BYTES + 1)
    second = uploads.begin("blue", 0)
    assert is_full(uploads.begin, "blue", 0)
    assert uploads.begin("red", LIMIT)
    uploads.drop(first)
    assert is_full(uploads.begin, "blue", LIMIT)
    uploads.drop(second)
    assert uploads.begin("blue", LIMIT)


def test_what_grows_beyond_the_storage_is_deleted_at_once(store: BatchStore, uploads: Uploads, tmp_path: Path) -> None:
    upload(store, b"x")
    growing, other = uploads.begin("blue", 0), uploads.begin("blue", LIMIT - 3 * MIN_FILE_BYTES)
    uploads.append(growing, 0, b"x" * MIN_FILE_BYTES)
    # Twice is once, and what was claimed before takes no more room.
    uploads.append(growing, 0, b"x" * MIN_FILE_BYTES)
    uploads.append(growing, MIN_FILE_BYTES, b"x" * MIN_FILE_BYTES)
    assert is_full(uploads.append, growing, 2 * MIN_FILE_BYTES, b"x")
    assert os.listdir(tmp_path / "uploads") == [other]
    with pytest.raises(UnavailableError, match="interrupted"):
        uploads.append(growing, 0, b"x")
    uploads.grow(other, LIMIT - MIN_FILE_BYTES)


def test_a_stored_file_takes_the_room_that_its_upload_had(store: BatchStore, uploads: Uploads) -> None:
    upload_id = uploads.begin("blue", LIMIT)
    uploads.append(upload_id, 0, b"x" * LIMIT)
    file_id = store.finish_upload(upload_id, NEW).file_id
    assert is_full(uploads.begin, "blue", 0)
    store.delete_file("blue", file_id)
    assert uploads.begin("blue", LIMIT)


@pytest.mark.parametrize("end", ["grow", "complete"])
def test_an_upload_that_is_gone_is_to_be_sent_again(uploads: Uploads, end: str) -> None:
    upload_id = uploads.begin("blue", 0)
    uploads.drop(upload_id)
    for wrong in (upload_id, "../../etc/passwd"):
        with pytest.raises(UnavailableError, match="interrupted"):
            uploads.grow(wrong, 1) if end == "grow" else uploads.complete(wrong)
