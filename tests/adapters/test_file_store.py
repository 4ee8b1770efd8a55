"""Adapters' files by digest: what comes in whole stays, and nothing else does."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tracemalloc
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adapters.errors import AdapterError, AdapterUnavailableError
from adapters.file_store import INCOMING, MARGIN_BYTES, FileStore, copy_files
from adapters.folder import CONFIG_FILE, TENSOR_FILE
from adapters.identity import AdapterDigest, AdapterRef, adapter_digest
from adapters.tensor_file import MAX_FILE_BYTES
from tests.adapters.handmade import HOLE_BYTES, SHAPES, make_config, make_tensors, write, write_a_hole


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(str(tmp_path / "store"))


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "store").iterdir())


def test_a_content_is_kept_once_by_its_digest(store: FileStore, tmp_path: Path) -> None:
    source = write(tmp_path / "a")
    refs = [store.keep("a", store.bring(partial(copy_files, "a", source)), SHAPES, 16) for _ in range(2)]
    assert refs[0] == refs[1] == store.ref("a", adapter_digest(source))
    assert adapter_digest(refs[0].path) == refs[0].digest
    # The second copy is the caller's to delete.
    assert len(names(tmp_path)) == 2
    store.clear()
    assert names(tmp_path) == [refs[0].digest]
    store.delete(refs[0].digest)
    assert names(tmp_path) == []


def test_a_classifier_is_told_by_its_reference(store: FileStore, tmp_path: Path) -> None:
    tensors = make_tensors() | {"base_model.model.score.weight": torch.ones(3, 16)}
    source = write(tmp_path / "a", make_config(task_type="SEQ_CLS", modules_to_save=["score"]), tensors)
    assert store.keep("a", store.bring(partial(copy_files, "a", source)), SHAPES, 16).num_labels == 3


def test_files_of_others_are_not_deleted(store: FileStore, tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "store" / "deep" / "a"):
        path = write(folder)
        ref = AdapterRef(name="a", path=path, digest=adapter_digest(path))
        assert not store.has(ref)
        store.delete(ref.digest)
        assert adapter_digest(path) == ref.digest


def test_what_fails_on_its_way_leaves_nothing(store: FileStore, tmp_path: Path) -> None:
    def fail(error: Exception) -> None:
        raise error

    for error in (OSError(errno.ENOSPC, "No space left"), OSError(errno.EIO, "Input/output error"), KeyError("a")):
        with pytest.raises(type(error)):
            store.bring(lambda target, error=error: fail(error))  # type: ignore[misc]
    with pytest.raises(AdapterError, match="missing"):
        store.bring(partial(copy_files, "a", str(tmp_path)))
    assert names(tmp_path) == []


def test_what_was_half_deleted_or_has_rotted_is_no_content_and_is_brought_anew(
    store: FileStore, tmp_path: Path
) -> None:
    """A process that died while it deleted left a folder that later passed for the content, for ever."""
    source = write(tmp_path / "a")
    ref = store.keep("a", store.bring(partial(copy_files, "a", source)), SHAPES, 16)
    for damage in (
        (Path(ref.path) / TENSOR_FILE).unlink,
        lambda: (Path(ref.path) / TENSOR_FILE).write_bytes(b"\0" * 100),
    ):
        damage()
        assert not store.is_whole(ref)
        assert store.keep("a", store.bring(partial(copy_files, "a", source)), SHAPES, 16) == ref
        assert store.is_whole(ref)
        assert names(tmp_path) == [ref.digest]


def test_a_content_goes_at_once_however_long_its_files_take(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a")
    ref = store.keep("a", store.bring(partial(copy_files, "a", source)), SHAPES, 16)
    with monkeypatch.context() as dying:
        dying.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        store.delete(ref.digest)
    assert not os.path.exists(ref.path)
    assert names(tmp_path) == [f"{INCOMING}{ref.digest}"]
    store.delete(ref.digest)
    assert names(tmp_path) == []


def test_contents_that_nobody_uses_are_found_and_what_is_no_content_is_left_alone(
    store: FileStore, tmp_path: Path
) -> None:
    assert store.unused([]) == []
    source = write(tmp_path / "a")
    ref = store.keep("a", store.bring(partial(copy_files, "a", source)), SHAPES, 16)
    (tmp_path / "store" / "lost+found").mkdir()
    assert store.unused([ref.digest]) == []
    assert [found.path for found in store.unused([])] == [ref.path]
    assert store.find(ref) == ref
    assert store.find(AdapterRef(name="a", path=ref.path, digest=AdapterDigest(f"../store/{ref.digest}"))) is None
    assert store.find(AdapterRef(name="a", path=ref.path, digest=AdapterDigest("0" * 64))) is None


def test_what_does_not_fit_is_refused_before_its_numbers_are_read(store: FileStore, tmp_path: Path) -> None:
    write_a_hole(tmp_path / "a")
    incoming = store.bring(partial(copy_files, "a", str(tmp_path / "a")))
    tracemalloc.start()
    with pytest.raises(AdapterError, match="no module"):
        store.keep("a", incoming, SHAPES, 16)
    assert tracemalloc.get_traced_memory()[1] < HOLE_BYTES / 4
    tracemalloc.stop()


def test_what_is_too_large_to_be_read_is_not_copied(store: FileStore, tmp_path: Path) -> None:
    """A file that was meant for something else filled the disk before it was refused."""
    for file in (CONFIG_FILE, TENSOR_FILE):
        write(tmp_path / "a")
        os.truncate(tmp_path / "a" / file, MAX_FILE_BYTES + 1)
        with pytest.raises(AdapterError, match=f"{file} has more than"):
            store.bring(partial(copy_files, "a", str(tmp_path / "a")))
        assert names(tmp_path) == []


@pytest.mark.parametrize(("spare_bytes", "fits"), [(0, True), (-1, False)])
def test_what_the_disk_has_no_room_for_is_not_copied(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare_bytes: int, fits: bool
) -> None:
    """It filled the disk to its last byte, under all others that write to it."""
    source = Path(write(tmp_path / "a"))
    free_bytes = sum(file.stat().st_size for file in source.iterdir()) + MARGIN_BYTES + spare_bytes
    disk = SimpleNamespace(f_bavail=free_bytes, f_frsize=1, f_blocks=1 << 40)
    copied: list[object] = []
    copy = shutil.copyfileobj
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    monkeypatch.setattr(shutil, "copyfileobj", lambda *args: (copied.append(args), copy(*args)))
    if fits:
        assert os.listdir(store.bring(partial(copy_files, "a", str(source))))
    else:
        with pytest.raises(AdapterUnavailableError, match="the server's disk has room for"):
            store.bring(partial(copy_files, "a", str(source)))
        assert (names(tmp_path), copied) == ([], [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), None])
def test_a_tensor_that_is_not_finite_is_named(
    store: FileStore, tmp_path: Path, dtype: torch.dtype, value: float | None
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in make_tensors(seed=0).items()}
    bad = sorted(tensors)[1]
    if value is not None:
        tensors[bad].view(-1)[-1] = value
    incoming = store.bring(partial(copy_files, "a", write(tmp_path / "a", tensors=tensors)))
    if value is None:
        store.keep("a", incoming, SHAPES, 16)
    else:
        with pytest.raises(AdapterError, match=f"{re.escape(bad)}' holds NaN or infinity"):
            store.keep("a", incoming, SHAPES, 16)
