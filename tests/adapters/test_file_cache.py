"""Adapters of another node: fetched once, checked, kept within a bound."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from adapters.errors import AdapterError, AdapterUnavailableError
from adapters.file_cache import ABANDONED_S, RECENT_S, FileCache
from adapters.folder import CONFIG_FILE, TENSOR_FILE, read_part
from adapters.identity import AdapterRef, adapter_digest
from adapters.registry import reference
from tests.adapters.handmade import make_tensors, write


class Nodes:
    """A node that has adapters, and another whose cache asks it."""

    def __init__(self, folder: Path) -> None:
        self.far, self.near = folder / "far", folder / "near"
        self.read: Counter[str] = Counter()

    def ref(self, name: str, seed: int = 0) -> AdapterRef:
        """An adapter as the other node knows it: its path does not exist here."""
        found = reference(name, write(self.far / name, tensors=make_tensors(seed=seed)))
        return AdapterRef(name=name, path=f"/nowhere/{name}", digest=found.digest)

    def cache(self, max_bytes: int = 1 << 30) -> FileCache:
        return FileCache(str(self.near), max_bytes=max_bytes, read=self._read)

    def _read(self, ref: AdapterRef, file: str, offset: int) -> bytes:
        self.read[ref.name] += offset == 0
        return read_part(ref.name, str(self.far / ref.name), file, offset)[:1000]

    def kept(self) -> set[str]:
        return {path.name for path in self.near.iterdir()}


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def test_files_that_are_here_are_taken_from_where_they_are(nodes: Nodes, tmp_path: Path) -> None:
    ref = reference("a", write(tmp_path / "a"))
    assert nodes.cache().locate(ref) == ref
    assert not nodes.near.exists()


def test_a_full_disk_is_not_the_adapter_s_fault(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("adapters.file_store.FileStore.bring", full)
    with pytest.raises(AdapterUnavailableError, match=r"cannot be kept here \(No space left on device\)"):
        nodes.cache().locate(nodes.ref("a"))


def test_a_folder_that_goes_while_it_is_filled_is_not_the_adapter_s_fault(nodes: Nodes) -> None:
    """A clock that is set forward makes it look abandoned to whoever evicts meanwhile."""

    def delete(ref: AdapterRef, file: str, offset: int) -> bytes:
        for left in nodes.near.iterdir():
            shutil.rmtree(left)
        return b""

    cache = FileCache(str(nodes.near), max_bytes=1 << 20, read=delete)
    with pytest.raises(AdapterUnavailableError, match=r"cannot be kept here \(No such file or directory\)"):
        cache.locate(nodes.ref("a"))
    assert nodes.kept() == set()


def test_files_of_another_node_are_fetched_once(nodes: Nodes) -> None:
    ref = nodes.ref("a")
    for cache in (nodes.cache(), nodes.cache()):
        here = cache.locate(ref)
        assert here == AdapterRef(name="a", path=str(nodes.near / ref.digest), digest=ref.digest)
        assert adapter_digest(here.path) == ref.digest
    assert nodes.read["a"] == 2  # once each file


def test_another_content_is_not_kept(nodes: Nodes) -> None:
    ref = nodes.ref("a", seed=1)
    write(nodes.far / "a", tensors=make_tensors(seed=2))
    with pytest.raises(AdapterError, match="have been overwritten"):
        nodes.cache().locate(ref)
    (nodes.far / "a" / TENSOR_FILE).unlink()
    with pytest.raises(AdapterError, match="missing"):
        nodes.cache().locate(ref)
    assert nodes.kept() == set()


def test_the_least_recently_used_goes_first_and_the_one_that_is_wanted_stays(nodes: Nodes) -> None:
    refs = [nodes.ref(f"a{seed}", seed) for seed in range(4)]
    size = sum((nodes.far / "a0" / file).stat().st_size for file in (CONFIG_FILE, TENSOR_FILE))
    cache = nodes.cache(max_bytes=2 * size)
    for age, ref in enumerate((refs[1], refs[0])):
        os.utime(cache.locate(ref).path, (1000 + age, 1000 + age))
    os.utime(cache.locate(refs[2]).path, (2000, 2000))
    assert nodes.kept() == {refs[0].digest, refs[2].digest}
    nodes.cache(max_bytes=1).locate(refs[3])
    assert nodes.kept() == {refs[3].digest}


def test_what_lost_its_process_on_the_way_is_deleted_in_the_end(nodes: Nodes) -> None:
    for name in (".incoming-old", ".incoming-new"):
        (nodes.near / name).mkdir(parents=True)
    os.utime(nodes.near / ".incoming-old", (0, ABANDONED_S))
    ref = nodes.ref("a")
    nodes.cache().locate(ref)
    assert nodes.kept() == {".incoming-new", ref.digest}


def test_what_another_process_has_left_in_pieces_is_fetched_anew(nodes: Nodes) -> None:
    """It stayed where it was, and its adapter could not be served on that node any more."""
    ref = nodes.ref("a")
    here = Path(nodes.cache().locate(ref).path)
    content = (here / TENSOR_FILE).read_bytes()
    for damage in ((here / TENSOR_FILE).unlink, lambda: (here / TENSOR_FILE).write_bytes(content[:-8])):
        damage()
        cache = nodes.cache()
        assert adapter_digest(cache.locate(ref).path) == ref.digest
    assert nodes.kept() == {ref.digest}


def test_what_others_have_just_located_is_not_taken_from_them(nodes: Nodes) -> None:
    """With a bound of less than two adapters the replicas of a node deleted each other's before they were read."""
    refs = [nodes.ref(f"a{seed}", seed) for seed in range(2)]
    first, second = (nodes.cache(max_bytes=1) for _ in refs)
    here = first.locate(refs[0])
    second.locate(refs[1])
    assert adapter_digest(here.path) == refs[0].digest
    os.utime(here.path, (0, time.time() - RECENT_S))
    second.locate(refs[1])
    assert nodes.kept() == {refs[1].digest}


def test_what_took_long_to_fetch_is_as_new_as_what_did_not(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its age counted from the first byte: the next replica to locate anything deleted it before it was read."""

    def digest(folder: str, name: str) -> str:
        os.utime(folder, (0, time.time() - RECENT_S - 1))
        return adapter_digest(folder, name)

    refs = [nodes.ref(f"a{seed}", seed) for seed in range(2)]
    first, second = (nodes.cache(max_bytes=1) for _ in refs)
    monkeypatch.setattr("adapters.file_cache.adapter_digest", digest)
    first.locate(refs[0])
    second.locate(refs[1])
    assert nodes.kept() == {ref.digest for ref in refs}


def test_what_another_was_first_to_fetch_is_as_new_as_if_it_had_not_been(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = nodes.ref("a")
    first, second = nodes.cache(max_bytes=1), nodes.cache(max_bytes=1)

    def digest(folder: str, name: str) -> str:
        found = adapter_digest(folder, name)
        monkeypatch.undo()
        os.utime(second.locate(ref).path, (0, time.time() - RECENT_S - 1))
        return found

    monkeypatch.setattr("adapters.file_cache.adapter_digest", digest)
    assert os.path.isdir(first.locate(ref).path)


def test_a_clock_that_is_set_back_keeps_nothing_over_the_bound(nodes: Nodes) -> None:
    """What had been used before, and half-copied, stayed until the clock had caught up, for hours or days."""
    refs = [nodes.ref(f"a{seed}", seed) for seed in range(2)]
    (nodes.near / ".incoming-old").mkdir(parents=True)
    for path in (nodes.near / ".incoming-old", Path(nodes.cache().locate(refs[0]).path)):
        os.utime(path, (0, time.time() + 2 * ABANDONED_S))
    nodes.cache(max_bytes=1).locate(refs[1])
    assert nodes.kept() == {refs[1].digest}


def test_a_copy_that_goes_while_it_is_looked_for_is_fetched_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = nodes.ref("a")
    cache = nodes.cache()
    cache.locate(ref)
    utime = os.utime

    def too_late(path: str) -> None:
        monkeypatch.setattr(os, "utime", utime)
        shutil.rmtree(path)
        utime(path)

    monkeypatch.setattr(os, "utime", too_late)
    assert adapter_digest(cache.locate(ref).path) == ref.digest


def test_files_of_others_in_the_folder_hinder_nobody(nodes: Nodes) -> None:
    (nodes.near / "lost+found" / "deep").mkdir(parents=True)
    (nodes.near / ".DS_Store").write_text("x")
    ref = nodes.ref("a")
    nodes.cache(max_bytes=1).locate(ref)
    assert nodes.kept() == {ref.digest, "lost+found", ".DS_Store"}
