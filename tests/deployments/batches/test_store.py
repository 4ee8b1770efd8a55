from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from deployments.batches import pages
from deployments.batches.pages import delete_rows
from deployments.batches.result_file import output_ids
from deployments.batches.store import BatchStore, FolderTakenError
from deployments.batches.uploads import UPLOAD_LASTS_S
from deployments.batches.values import (
    MIN_FILE_BYTES,
    BatchCounts,
    BatchStatus,
    LineError,
    NewBatch,
    NewFile,
    PageQuestion,
)
from deployments.errors import UnavailableError
from engine.errors import RequestError
from tests.deployments.batches.batch_world import ENDPOINT, LIMITS, a_batch, a_line, config, upload


@pytest.fixture
def now_s() -> list[float]:
    return [1_700_000_000.0]


@pytest.fixture
def store(tmp_path: Path, now_s: list[float]) -> Iterator[BatchStore]:
    store = open_store(tmp_path, now_s)
    yield store
    store.close()


def open_store(folder: Path, now_s: list[float], **limits: int) -> BatchStore:
    return BatchStore(config(folder, **limits), clock=lambda: now_s[0])


def refusal(call: Any, *args: Any) -> str | None:
    with pytest.raises(RequestError) as refused:
        call(*args)
    return refused.value.code


def test_nobody_else_enters_the_folder(tmp_path: Path, now_s: list[float]) -> None:
    open_store(tmp_path / "batches", now_s).close()
    for folder in (tmp_path / "batches", tmp_path / "batches" / "files", tmp_path / "batches" / "uploads"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_content_comes_in_parts_and_twice_is_once(store: BatchStore) -> None:
    upload_id = store.uploads.begin("blue", 0)
    for offset, part in ((0, b"abc"), (3, b"de"), (3, b"de"), (5, b"f"), (3, b"de")):
        store.uploads.append(upload_id, offset, part)
    stored = store.finish_upload(upload_id, NewFile(tenant="blue", name="x", purpose="batch", lasts_s=3600))
    content = Path(store.content_path(stored.file_id))
    assert content.read_bytes() == b"abcdef"
    assert stat.S_IMODE(content.stat().st_mode) == 0o600, "prompts are nobody else's to read"
    assert (stored.num_bytes, stored.created_s, stored.expires_s) == (6, 1_700_000_000, 1_700_003_600)
    assert store.file("blue", stored.file_id) == stored
    with pytest.raises(UnavailableError, match="interrupted"):
        store.uploads.append(upload_id, 6, b"g")
    with pytest.raises(UnavailableError, match="interrupted"):
        store.uploads.append("../../etc/passwd", 0, b"g")
    store.uploads.drop(f"../files/{stored.file_id}")
    assert content.exists()


def test_a_tenant_sees_its_own_only(store: BatchStore) -> None:
    batch = a_batch(store, a_line("a"))
    assert refusal(store.file, "red", batch.input_file_id) == "file_not_found"
    assert refusal(store.delete_file, "red", batch.input_file_id) == "file_not_found"
    assert refusal(store.batch, batch.batch_id, "red") == "batch_not_found"
    new = NewBatch(tenant="red", input_file_id=batch.input_file_id, endpoint=ENDPOINT)
    assert refusal(store.add_batch, new) == "file_not_found"
    assert store.list_files("red", PageQuestion(9)).items == store.list_batches("red", PageQuestion(9)).items == ()


def test_lists_are_paged_in_both_directions(store: BatchStore) -> None:
    ids = [upload(store, b"x") for _ in range(5)]
    page = store.list_files("blue", PageQuestion(2))
    assert ([file.file_id for file in page.items], page.has_more) == ([ids[4], ids[3]], True)
    page = store.list_files("blue", PageQuestion(2, ids[1]))
    assert ([file.file_id for file in page.items], page.has_more) == ([ids[0]], False)
    page = store.list_files("blue", PageQuestion(2, ids[1], is_ascending=True))
    assert ([file.file_id for file in page.items], page.has_more) == ([ids[2], ids[3]], True)
    assert store.list_files("blue", PageQuestion(9, purpose="batch_output")).items == ()
    assert not store.list_files("blue", PageQuestion(5)).has_more
    assert refusal(store.list_files, "red", PageQuestion(2, ids[1])) is None


def test_bounds_are_told(store: BatchStore) -> None:
    for _ in range(LIMITS["max_unfinished"]):
        last = a_batch(store, a_line("a"))
    new = NewBatch(tenant="blue", input_file_id=last.input_file_id, endpoint=ENDPOINT)
    assert refusal(store.add_batch, new) == "batch_limit_exceeded"
    a_batch(store, a_line("a"), tenant="red")
    store.finish(last.batch_id, BatchStatus.COMPLETED)
    store.add_batch(new)
    with pytest.raises(RequestError, match="Delete some") as refused:
        upload(store, b"x" * LIMITS["max_tenant_bytes"])
    assert refused.value.code == "storage_full"
    assert len(list((Path(store.content_path("x")).parents[1] / "uploads").iterdir())) == 0


def test_a_small_file_counts_as_one_that_takes_a_block_of_the_disk(store: BatchStore) -> None:
    for _ in range(LIMITS["max_tenant_bytes"] // MIN_FILE_BYTES):
        last = upload(store, b"")
    assert refusal(upload, store, b"") == "storage_full"
    store.delete_file("blue", last)
    upload(store, b"x")


def test_the_newest_ended_batches_are_kept(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_ENDED", 2)
    first, *ended = [a_batch(store, a_line("a")) for _ in range(3)]
    for batch in ended:
        store.finish(batch.batch_id, BatchStatus.COMPLETED)
    for tenant in ("blue", "blue", "red"):
        store.finish((last := a_batch(store, a_line("a"), tenant=tenant)).batch_id, BatchStatus.COMPLETED)
    found = [batch.batch_id for batch in store.list_batches("blue", PageQuestion(9)).items]
    assert found[2:] == [ended[1].batch_id, first.batch_id]
    assert store.batch(last.batch_id).tenant == "red"


def test_what_unfinished_batches_have_written_counts_and_nothing_begins_without_room(store: BatchStore) -> None:
    batch = a_batch(store, a_line("a"))
    new = NewBatch(tenant="blue", input_file_id=batch.input_file_id, endpoint=ENDPOINT)
    Path(store.content_path(output_ids(batch.batch_id)[0])).write_bytes(b"x" * LIMITS["max_tenant_bytes"])
    assert (store.is_full("blue"), store.is_full("red")) == (True, False)
    assert refusal(store.add_batch, new) == "storage_full"
    assert refusal(upload, store, b"x") == "storage_full"
    a_batch(store, a_line("a"), tenant="red")
    ended = store.finish(batch.batch_id, BatchStatus.COMPLETED)
    assert refusal(store.add_batch, new) == "storage_full"
    assert ended.output_file_id is not None
    store.delete_file("blue", ended.output_file_id)
    store.add_batch(new)


def test_a_file_that_a_batch_reads_stays_until_the_batch_has_ended(store: BatchStore, now_s: list[float]) -> None:
    batch = a_batch(store, a_line("a"))
    assert refusal(store.delete_file, "blue", batch.input_file_id) == "file_in_use"
    store.finish(batch.batch_id, BatchStatus.COMPLETED)
    store.delete_file("blue", batch.input_file_id)
    assert refusal(store.file, "blue", batch.input_file_id) == "file_not_found"
    assert not os.path.exists(store.content_path(batch.input_file_id))


def test_files_and_left_uploads_go_when_their_time_has_come(
    store: BatchStore, now_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = upload(store, b"x", lasts_s=3600), upload(store, b"x", lasts_s=7200)
    left, bare = store.uploads.begin("blue", 0), store.uploads.begin("blue", 0)
    now_s[0] += 3601
    # Nobody sees it any more, though it is still to be deleted.
    assert refusal(store.file, "blue", short) == "file_not_found"
    assert [file.file_id for file in store.list_files("blue", PageQuestion(9)).items] == [long]
    assert store.drop_expired() == 1
    assert not os.path.exists(store.content_path(short))
    # A clock that is set, by a day even, ends no upload; its age does.
    now_s[0] += 86400
    store.drop_expired()
    monotonic, older_s = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + older_s)
    older_s = UPLOAD_LASTS_S * 0.6
    store.uploads.append(left, 0, b"x")
    for dropped in (bare, left):
        older_s += UPLOAD_LASTS_S * 0.6
        store.drop_expired()
        with pytest.raises(UnavailableError, match="interrupted"):
            store.uploads.append(dropped, 0, b"x")
        if dropped is bare:
            # Each part makes it last longer.
            assert Path(store.content_path("")).parent.joinpath("uploads", left).exists()


def test_files_on_a_full_disk_can_go(store: BatchStore, now_s: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite needs room to delete a row, and there was none before the content was gone: neither a tenant nor a date
    could free a disk that was full of files."""
    kept, expiring = upload(store, b"x"), upload(store, b"x", lasts_s=3600)

    def need_room(*args: Any) -> None:
        if len(os.listdir(Path(store.content_path("")))) == num_contents:
            raise OperationalError("DELETE", {}, Exception("database or disk is full"))
        delete_rows(*args)

    monkeypatch.setattr("deployments.batches.store.delete_rows", need_room)
    num_contents = 2
    store.delete_file("blue", kept)
    num_contents = 1
    now_s[0] += 3600
    assert store.drop_expired() == 1
    assert store.list_files("blue", PageQuestion(9)).items == ()
    assert refusal(store.file, "blue", expiring) == "file_not_found"


def test_any_number_of_files_may_expire_at_once(
    store: BatchStore, now_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite refused so long a statement, which was tried again for ever: no file was deleted any more."""
    monkeypatch.setattr("deployments.batches.store.MAX_DROPPED", 2)
    read = upload(store, b"x", lasts_s=3600)
    store.add_batch(NewBatch(tenant="blue", input_file_id=read, endpoint=ENDPOINT))
    for _ in range(5):
        upload(store, b"x", lasts_s=3600)
    now_s[0] += 3601
    assert [store.drop_expired() for _ in range(4)] == [2, 2, 1, 0]
    assert os.path.exists(store.content_path(read))


def test_a_batch_moves_only_out_of_what_it_is_in_and_outlives_the_process(tmp_path: Path, now_s: list[float]) -> None:
    store = open_store(tmp_path, now_s)
    batch = a_batch(store, a_line("a"), metadata={"k": "v"}, outputs_last_s=3600)
    now_s[0] += 5
    error = LineError(code="c", message="m", line=3, param="p")
    moved = store.move(
        batch.batch_id,
        BatchStatus.IN_PROGRESS,
        out_of=[BatchStatus.VALIDATING],
        model="base",
        counts=BatchCounts(total=1),
        errors=(error,),
    )
    assert moved.reached_s == {"in_progress": batch.created_s + 5}
    assert store.move(batch.batch_id, BatchStatus.FAILED, out_of=[BatchStatus.VALIDATING]) == moved
    store.close()
    store = open_store(tmp_path, now_s)
    assert store.unfinished() == [moved]
    output_id, error_id = output_ids(batch.batch_id)
    Path(store.content_path(output_id)).write_bytes(b"{}\n")
    Path(store.content_path(error_id)).touch()
    done = store.finish(batch.batch_id, BatchStatus.COMPLETED, counts=BatchCounts(total=1, completed=1))
    assert (done.output_file_id, done.error_file_id) == (output_id, None)
    # What nobody can read nobody could delete.
    assert not Path(store.content_path(error_id)).exists()
    output = store.file("blue", output_id)
    assert (output.purpose, output.num_bytes, output.expires_s) == ("batch_output", 3, int(now_s[0]) + 3600)
    # A second end is none.
    assert store.finish(batch.batch_id, BatchStatus.FAILED) == done
    assert store.unfinished() == []
    store.close()


def test_a_content_that_is_gone_is_told_from_a_disk_that_is_away(store: BatchStore) -> None:
    """Clients were told to come back, until the next start forgot the file."""
    file_id = upload(store, b"x")
    content = Path(store.content_path(file_id))
    content.unlink()
    with pytest.raises(RequestError) as told:
        store.read_file("blue", file_id, 0)
    assert (told.value.field, told.value.code) == ("file_id", "file_not_found")
    content.parent.rename(content.parents[1] / "away")
    with pytest.raises(FileNotFoundError):
        store.read_file("blue", file_id, 0)


def test_a_start_sweeps_what_nothing_tells_of(tmp_path: Path, now_s: list[float]) -> None:
    store = open_store(tmp_path, now_s)
    batch = a_batch(store, a_line("a"))
    output_id, _ = output_ids(batch.batch_id)
    for name in (output_id, "file-orphan"):
        Path(store.content_path(name)).write_bytes(b"{}\n")
    store.uploads.begin("blue", 0)
    half_deleted = upload(store, b"x")
    os.remove(store.content_path(half_deleted))
    store.close()
    store = open_store(tmp_path, now_s)
    assert [file.file_id for file in store.list_files("blue", PageQuestion(9)).items] == [batch.input_file_id]
    store.close()
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == sorted([batch.input_file_id, output_id])
    assert list((tmp_path / "uploads").iterdir()) == []


def test_a_folder_that_could_not_be_opened_is_not_taken(
    tmp_path: Path, now_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk was full at the start, files and batches waited for ever for the server that they were of."""

    def is_full(*_: object) -> None:
        raise OperationalError("", None, Exception("database or disk is full"))

    for broken in ("open_database", "BatchStore.unfinished"):
        with monkeypatch.context() as patch:
            patch.setattr(f"deployments.batches.store.{broken}", is_full)
            for _ in range(2):
                with pytest.raises(OperationalError):
                    open_store(tmp_path, now_s)
        open_store(tmp_path, now_s).close()


def test_a_folder_is_for_one_process(store: BatchStore, tmp_path: Path, now_s: list[float]) -> None:
    with pytest.raises(FolderTakenError):
        open_store(tmp_path, now_s)
