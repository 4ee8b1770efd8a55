"""Adapters' files by digest: what comes in whole stays, and nothing else does."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from adapters.errors import AdapterError
from adapters.file_store import FileStore, copy_from
from adapters.identity import AdapterRef, adapter_digest
from tests.adapters.handmade import SHAPES, write


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(str(tmp_path / "store"))


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "store").iterdir())


def test_a_content_is_kept_once_by_its_digest(store: FileStore, tmp_path: Path) -> None:
    source = write(tmp_path / "a")
    refs = [store.keep("a", store.bring("a", copy_from("a", source)), SHAPES, 16) for _ in range(2)]
    assert refs[0] == refs[1] == store.ref("a", adapter_digest(source))
    assert adapter_digest(refs[0].path) == refs[0].digest
    # The second copy is the caller's to delete.
    assert len(names(tmp_path)) == 2
    store.clear()
    assert names(tmp_path) == [refs[0].digest]
    store.delete(refs[0])
    assert names(tmp_path) == []


def test_files_of_others_are_not_deleted(store: FileStore, tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "store" / "deep" / "a"):
        path = write(folder)
        ref = AdapterRef(name="a", path=path, digest=adapter_digest(path))
        assert not store.has(ref)
        store.delete(ref)
        assert adapter_digest(path) == ref.digest


def test_what_fails_on_its_way_leaves_nothing(store: FileStore, tmp_path: Path) -> None:
    def fail(error: Exception) -> None:
        raise error

    full, torn = OSError(errno.ENOSPC, "No space left"), OSError(errno.EIO, "Input/output error")
    # A full disk is not the adapter's fault, and there will be room again.
    for error, expected in ((full, OSError), (torn, AdapterError), (KeyError("a"), KeyError)):
        with pytest.raises(expected):
            store.bring("a", lambda target, error=error: fail(error))  # type: ignore[misc]
    with pytest.raises(AdapterError, match="missing"):
        store.bring("a", copy_from("a", str(tmp_path)))
    assert names(tmp_path) == []
