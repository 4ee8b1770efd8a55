"""The registry: what it takes, what it refuses, and what it remembers."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from adapters.catalogue import Catalogue
from adapters.errors import AdapterError
from adapters.file_store import FileStore
from adapters.folder import CONFIG_FILE, TENSOR_FILE
from adapters.identity import AdapterRef
from adapters.registry import Signature, permitted_folder, reference, signatures
from adapters.sources import AdapterSources
from adapters.store import AdapterStore
from deployments.config import AdapterBase
from deployments.errors import UnavailableError
from deployments.registry import adapter_registry
from deployments.registry.adapter_changes import Registration
from deployments.registry.adapter_registry import MAX_REGISTERING, NUM_FETCHERS, RegistryServer
from engine.errors import OverloadError, RequestError
from tests.adapters.handmade import SHAPES, make_config, make_tensors, write

MAX_SOURCE_BYTES = 1 << 20


class Place:
    """A drop-in folder, a store, and registries that come and go over it."""

    def __init__(self, folder: Path) -> None:
        self.dropin, self.store_path = folder / "dropin", str(folder / "store" / "adapters.sqlite")
        self.copies = folder / "store" / "adapters"
        self.dropin.mkdir()
        self.store: AdapterStore | None = None
        self.prefixes: tuple[str, ...] = ()
        self.allowed: tuple[str, ...] = ()
        self.max_versions = 64
        self.seen: dict[str, dict[str, Signature]] = {}

    def open(self) -> RegistryServer:
        if self.store is not None:
            self.store.close()
        self.store = AdapterStore(self.store_path, max_versions=self.max_versions)
        bases = [
            AdapterBase(name="m", module_shapes=SHAPES, max_rank=16, watched=str(self.dropin), allowed=self.allowed),
            AdapterBase(name="other", module_shapes={}, max_rank=16),
        ]
        sources = AdapterSources(self.prefixes, max_bytes=MAX_SOURCE_BYTES, timeout_s=30.0)
        files = FileStore(str(self.copies))
        return RegistryServer(
            self.store, bases, files=files, sources=sources, cross_encoders=["judge"], seen_by_base=self.seen
        )

    def put(self, name: str, seed: int = 0) -> None:
        write(self.dropin / name, tensors=make_tensors(seed=seed))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def wanted(name: str, folder: str | None = None, *, replaces: bool = False) -> Registration:
    return Registration(name=name, place=folder or name, base="m", replaces=replaces)


async def test_what_is_registered_is_copied_and_outlives_its_source_and_the_registry(place: Place) -> None:
    place.put("a")
    catalogue = await place.open().register(wanted("sql", "a"))
    (version,) = catalogue.entries["sql"].versions
    assert version.ref.path == os.path.realpath(place.copies / version.ref.digest)
    shutil.rmtree(place.dropin / "a")
    after = place.open().catalogue
    assert after.entries["sql"].versions == (version,)
    assert reference("sql", version.ref.path).digest == version.ref.digest


async def test_a_name_that_is_loaded_gets_a_new_version_only_where_that_is_said(place: Place) -> None:
    registry = place.open()
    place.put("a", seed=1)
    await registry.register(wanted("a"))
    place.put("a", seed=2)
    with pytest.raises(RequestError, match="load_inplace") as refused:
        await registry.register(wanted("a"))
    assert refused.value.field == "lora_name"
    entry = (await registry.register(wanted("a", replaces=True))).entries["a"]
    assert [version.number for version in entry.versions] == [1, 2]
    assert entry.split == ((2, 100),)
    assert (await registry.route("a", {1: 100})).entries["a"].split == ((1, 100),)
    for name, split, field, code in (
        ("a", {1: 50}, "split", None),
        ("a", {7: 100}, "split", None),
        ("nope", {1: 100}, "name", "model_not_found"),
    ):
        with pytest.raises(RequestError) as refused:
            await registry.route(name, split)
        assert (refused.value.field, refused.value.code) == (field, code)


async def test_unregistering_tells_which_contents_nobody_uses_any_more(place: Place) -> None:
    registry = place.open()
    place.put("a", seed=1)
    await registry.register(wanted("one", "a"))
    await registry.register(wanted("two", "a"))
    assert await registry.unregister("one") == []
    ((base, ref),) = await registry.unregister("two")
    assert (base, registry.catalogue.entries) == ("m", {})
    await registry.discard([ref])
    assert not os.path.exists(ref.path)
    with pytest.raises(RequestError) as refused:
        await registry.unregister("two")
    assert refused.value.code == "model_not_found"


async def test_a_content_that_was_registered_again_is_not_discarded(place: Place) -> None:
    registry = place.open()
    place.put("a")
    await registry.register(wanted("a"))
    ((_, ref),) = await registry.unregister("a")
    await registry.register(wanted("again", "a"))
    await registry.discard([ref])
    assert reference("again", ref.path).digest == ref.digest


async def test_a_pickle_is_refused_by_its_name(place: Place) -> None:
    place.put("a")
    damage(place.dropin / "a", "pickle")
    with pytest.raises(RequestError, match="pickle"):
        await place.open().register(wanted("a"))


@pytest.mark.parametrize(
    "folder", ["../outside", "/etc", ".", "", "missing", "a/../../outside", "link", "a\x00b", "a" * 5000]
)
async def test_no_folder_outside_the_permitted_ones_is_read(place: Place, tmp_path: Path, folder: str) -> None:
    write(tmp_path / "outside", tensors=make_tensors(seed=0))
    (place.dropin / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(RequestError) as refused:
        await place.open().register(Registration(name="x", place=folder, base="m"))
    assert refused.value.field == "lora_path"


def damage(folder: Path, kind: str) -> None:
    tensors = make_tensors(seed=0)
    match kind:
        case "truncated":
            file = folder / TENSOR_FILE
            file.write_bytes(file.read_bytes()[:-8])
        case "pickle":
            (folder / TENSOR_FILE).rename(folder / "adapter_model.bin")
        case "config":
            (folder / CONFIG_FILE).write_text("{")
        case "nan":
            tensors[min(tensors)][0, 0] = float("nan")
            save_file(tensors, folder / TENSOR_FILE)
        case "rank":
            write(folder, config=make_config(r=64), tensors=make_tensors(rank=64))
        case "base":
            save_file({f"{name}x": tensor for name, tensor in tensors.items()}, folder / TENSOR_FILE)
        case "shape":
            save_file({name: torch.zeros(3, 3) for name in tensors}, folder / TENSOR_FILE)
        case "link":
            (folder / TENSOR_FILE).unlink()
            (folder / TENSOR_FILE).symlink_to("/etc/passwd")


@pytest.mark.parametrize("kind", ["truncated", "pickle", "config", "nan", "rank", "base", "shape", "link"])
async def test_an_adapter_at_fault_is_refused_and_leaves_nothing_behind(place: Place, kind: str) -> None:
    place.put("a")
    damage(place.dropin / "a", kind)
    registry = place.open()
    with pytest.raises(RequestError) as refused:
        await registry.register(wanted("a"))
    assert refused.value.field == "lora_path"
    assert str(place.dropin) not in refused.value.message
    assert registry.catalogue.entries == {}
    assert not place.copies.exists() or not list(place.copies.iterdir())


@pytest.mark.parametrize("name", ["m", "other", "judge", "a/b", "..", "", "a@1", "a" * 200, "ä"])
async def test_a_name_that_cannot_be_is_refused(place: Place, name: str) -> None:
    place.put("a")
    with pytest.raises(RequestError) as refused:
        await place.open().register(wanted(name, "a"))
    assert refused.value.field == "lora_name"


async def test_an_adapter_names_its_base(place: Place) -> None:
    place.put("a")
    for base, words in ((None, "must be one of"), ("none", "does not exist"), ("other", "no such folder")):
        with pytest.raises(RequestError, match=words):
            await place.open().register(Registration(name="a", place="a", base=base))


async def test_files_are_given_to_nodes_that_do_not_have_them(place: Place) -> None:
    registry = place.open()
    place.put("a")
    (version,) = (await registry.register(wanted("a"))).entries["a"].versions
    for file in (CONFIG_FILE, TENSOR_FILE):
        content = Path(version.ref.path, file).read_bytes()
        assert await registry.read_file(version.ref, file, 0) == content
        assert await registry.read_file(version.ref, file, 7) == content[7:]
        assert await registry.read_file(version.ref, file, len(content)) == b""
    with pytest.raises(AdapterError, match="not loaded"):
        await registry.read_file(version.ref, "../../adapters.sqlite", 0)
    await registry.unregister("a")
    # Requests that use it still have to end.
    assert await registry.read_file(version.ref, CONFIG_FILE, 0)
    await registry.discard([version.ref])
    with pytest.raises(AdapterError, match="not loaded"):
        await registry.read_file(version.ref, CONFIG_FILE, 0)


async def test_a_content_on_trial_has_no_traffic(place: Place) -> None:
    registry = place.open()
    place.put("a", seed=1)
    trial = replace(wanted("a", replaces=True), takes_traffic=False)
    entry = (await registry.register(trial)).entries["a"]
    assert (entry.split, registry.catalogue.find("a", 0.0)) == ((), None)
    assert registry.catalogue.find("a@1", 0.0) == (entry, entry.versions[0])
    await registry.route("a", {1: 100})
    place.put("a", seed=2)
    entry = (await registry.register(trial)).entries["a"]
    assert (len(entry.versions), entry.split) == (2, ((1, 100),))
    registry = place.open()
    assert registry.catalogue.entries["a"] == entry
    ((_, gone),) = await registry.unregister("a", 2)
    assert registry.catalogue.entries["a"].split == ((1, 100),)
    assert gone == entry.versions[1].ref


async def test_the_drop_in_folder_is_watched(place: Place) -> None:
    registry = place.open()
    place.put("a", seed=1)
    assert await registry.look()
    assert not await registry.look()
    place.put("a", seed=2)
    place.put("b", seed=3)
    (place.dropin / ".hidden").mkdir()
    assert await registry.look()
    entries = registry.catalogue.entries
    assert {name: len(entry.versions) for name, entry in entries.items()} == {"a": 2, "b": 1}
    damage(place.dropin / "b", "truncated")
    assert not await registry.look()
    place.put("b", seed=4)
    assert await registry.look()
    assert len(registry.catalogue.entries["b"].versions) == 2


async def test_a_drop_in_folder_that_is_gone_is_told_of_once_and_keeps_no_other_from_being_watched(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    registry = place.open()
    gone = replace(registry._bases["other"], watched=str(place.dropin.parent / "gone"))
    registry._bases = {"other": gone, "m": registry._bases["m"]}
    place.put("a")
    assert await registry.look()
    assert set(registry.catalogue.entries) == {"a"}
    place.put("b")
    assert await registry.look()
    assert caplog.text.count(f"there is no folder {gone.watched}") == 1


async def test_a_full_disk_refuses_for_now_and_what_was_dropped_in_is_served_once_there_is_room(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was dropped in meanwhile was never looked at again."""
    registry = place.open()
    place.put("a")
    assert await registry.look()
    place.put("b", seed=1)
    with monkeypatch.context() as full:
        full.setattr(FileStore, "bring", raising(OSError(errno.ENOSPC, "No space left on device")))
        assert not await registry.look()
        with pytest.raises(UnavailableError):
            await registry.register(wanted("c", str(place.dropin / "b")))
    with monkeypatch.context() as full:
        for change in ("route", "remove"):
            full.setattr(AdapterStore, change, raising(sqlite3.OperationalError("database or disk is full")))
        with pytest.raises(UnavailableError):
            await registry.route("a", {1: 100})
        with pytest.raises(UnavailableError):
            await registry.unregister("a")
    assert await registry.look()
    assert set(registry.catalogue.entries) == {"a", "b"}


def raising(error: Exception) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise error

    return fail


async def test_a_link_may_lead_from_one_permitted_folder_into_another(place: Place, tmp_path: Path) -> None:
    place.allowed = (str(tmp_path / "releases"),)
    registry = place.open()
    write(tmp_path / "releases" / "sql-7", tensors=make_tensors(seed=7))
    write(tmp_path / "secret" / "sql-8", tensors=make_tensors(seed=8))
    write(tmp_path / "releases" / "out", tensors=make_tensors(seed=9))
    for name, target in (("sql", "releases/sql-7"), ("out", "secret/sql-8"), ("all", "releases")):
        (place.dropin / name).symlink_to(tmp_path / target)
    assert await registry.look()
    assert set(registry.catalogue.entries) == {"sql"}


async def test_a_name_takes_new_versions_for_ever_and_says_which_contents_made_room(place: Place) -> None:
    place.max_versions = 3
    registry = place.open()
    digests = []
    for seed in (1, 2, 3, 1, 5):
        place.put("a", seed=seed)
        assert await registry.look()
        digests.append(registry.catalogue.entries["a"].versions[-1].ref.digest)
    entry = registry.catalogue.entries["a"]
    assert [version.number for version in entry.versions] == [3, 4, 5]
    # Version 4 has the content of the first one, which is not gone therefore.
    ((base, ref),) = registry.take_displaced()
    assert (base, ref.digest) == ("m", digests[1])
    assert registry.take_displaced() == []
    assert os.path.exists(ref.path)
    await registry.discard([ref])
    assert {path.name for path in place.copies.iterdir()} == {digests[0], digests[2], digests[4]}
    await registry.route("a", {3: 40, 4: 30, 5: 30})
    place.put("a", seed=6)
    with pytest.raises(RequestError, match="too few without traffic") as refused:
        await registry.register(wanted("a", replaces=True))
    assert refused.value.field == "lora_name"
    assert registry.catalogue.entries["a"].versions == entry.versions
    assert len([*place.copies.iterdir()]) == 3


async def test_traffic_goes_to_no_version_whose_files_are_lost(place: Place) -> None:
    place.put("a", seed=1)
    registry = place.open()
    await registry.declare({"m": [reference("a", str(place.dropin / "a"))]}, "1")
    await registry.look()
    place.put("a", seed=2)
    assert await registry.look()
    with pytest.raises(RequestError, match="version 1 have been overwritten") as caught:
        await registry.route("a", {1: 50, 2: 50})
    assert caught.value.field == "split"
    assert registry.catalogue.entries["a"].split == ((2, 100),)
    place.put("a", seed=1)
    assert (await registry.route("a", {1: 100})).entries["a"].split == ((1, 100),)
    shutil.rmtree(place.dropin / "a")
    await registry.route("a", {2: 100})
    with pytest.raises(RequestError, match="does not exist"):
        await registry.route("a", {1: 100})


async def test_nothing_is_unloaded_where_that_would_leave_the_traffic_to_lost_files(place: Place) -> None:
    """Whoever took back a bad version that had been dropped in over a good one got nothing but failures."""
    registry, _ = await a_declared(place)
    place.put("a", seed=2)
    assert await registry.look()
    with pytest.raises(RequestError, match="version 1 have been overwritten") as refused:
        await registry.unregister("a", 2)
    assert refused.value.field == "version"
    assert [share for _, _, share in contents(registry)] == [0, 100]
    place.put("b", seed=3)
    await registry.register(wanted("a", "b", replaces=True))
    await registry.unregister("a", 2)
    await registry.unregister("a", 1)
    await registry.unregister("a", 3)
    assert contents(registry) == []


async def test_the_configuration_is_taken_over_and_what_it_names_no_more_is_forgotten(place: Place) -> None:
    place.put("a", seed=1)
    place.put("b", seed=2)
    refs = [reference(name, str(place.dropin / name)) for name in ("a", "b")]
    registry = place.open()
    await registry.declare({"m": refs}, "1")
    await registry.register(wanted("copied", "a"))
    revision = registry.catalogue.revision
    registry = place.open()
    await registry.declare({"m": refs}, "2")
    assert registry.catalogue.revision == revision
    await registry.declare({"m": refs[:1]}, "3")
    assert set(registry.catalogue.entries) == {"a", "copied"}


async def a_declared(place: Place, seed: int = 1) -> tuple[RegistryServer, list[AdapterRef]]:
    """A registry of the first build, whose configuration names `a` where it was dropped in."""
    place.put("a", seed=seed)
    place.seen = {"m": signatures(str(place.dropin))}
    refs = [reference("a", str(place.dropin / "a"))]
    registry = place.open()
    await registry.declare({"m": refs}, "1")
    return registry, refs


def contents(registry: RegistryServer, name: str = "a") -> list[tuple[int, str, int]]:
    """Number, beginning of the digest and share of each version."""
    entry = registry.catalogue.entries.get(name)
    versions = () if entry is None else entry.versions
    return [(v.number, v.ref.digest, dict(entry.split).get(v.number, 0)) for v in versions] if entry else []


async def test_a_registry_that_begins_anew_takes_nothing_back(place: Place) -> None:
    """What its configuration says is as old as the server: an adapter that was unloaded came back, and where a later
    version had taken over, the oldest content took all of its traffic."""
    registry, refs = await a_declared(place)
    place.put("b", seed=2)
    await registry.register(wanted("a", "b", replaces=True))
    await registry.unregister("a", 1)
    left = contents(registry)
    for build in ("1", "2"):
        # Another build's configuration still has the content that was unloaded, while its name has others.
        registry = place.open()
        await registry.declare({"m": refs}, build)
        await registry.look()
        assert contents(registry) == left
    await registry.unregister("a")
    registry = place.open()
    await registry.declare({"m": refs}, "2")
    assert contents(registry) == []
    await registry.declare({"m": refs}, "3")
    assert [share for _, _, share in contents(registry)] == [100]


async def test_files_that_change_while_the_registry_is_away_are_a_new_version(place: Place) -> None:
    """They were taken for what the configuration had told of, until they changed again."""
    registry, refs = await a_declared(place)
    place.put("a", seed=2)
    registry = place.open()
    await registry.declare({"m": refs}, "1")
    assert await registry.look()
    assert [number for number, _, _ in contents(registry)] == [1, 2]
    assert not await registry.look()
    # Nor does what was unloaded since come back.
    await registry.unregister("a")
    registry = place.open()
    await registry.declare({"m": refs}, "1")
    assert not await registry.look()


async def test_what_changed_while_a_server_started_is_seen_and_what_did_not_is_not_read_again(place: Place) -> None:
    place.put("a", seed=1)
    place.put("b", seed=2)
    place.seen = {"m": signatures(str(place.dropin))}
    refs = [reference(name, str(place.dropin / name)) for name in ("a", "b")]
    place.put("a", seed=3)
    registry = place.open()
    await registry.declare({"m": refs}, "1")
    (place.dropin / "b" / TENSOR_FILE).chmod(0)  # another ctime, and unreadable but to root
    os.utime(place.dropin / "b" / TENSOR_FILE)
    assert await registry.look()
    assert (len(contents(registry, "a")), len(contents(registry, "b"))) == (2, 1)


async def test_times_of_files_are_no_content(place: Place) -> None:
    """Whoever copied the same files again undid the way that traffic had been routed."""
    registry = place.open()
    for seed in (1, 2):
        place.put("a", seed=seed)
        assert await registry.look()
    await registry.route("a", {1: 100})
    for _ in range(2):
        os.utime(place.dropin / "a" / CONFIG_FILE)
        assert not await registry.look()
        assert [share for _, _, share in contents(registry)] == [100, 0]
        registry = place.open()
    # What was unloaded and is put there again is meant to be served.
    await registry.unregister("a")
    place.put("a", seed=2)
    assert await registry.look()
    assert [(number, share) for number, _, share in contents(registry)] == [(3, 100)]


async def test_a_name_moves_to_the_base_model_that_the_configuration_has_it_for(place: Place) -> None:
    """It stayed with a base that had another name by then, and nobody was served; or the registry could not start."""
    registry, refs = await a_declared(place)
    place.put("b", seed=2)
    await registry.register(wanted("b"))
    registry = place.open()
    await registry.declare({"other": [*refs, replace(refs[0], name="b")]}, "2")
    assert {name: entry.base for name, entry in registry.catalogue.entries.items()} == {"a": "other", "b": "other"}
    assert contents(registry, "b")[0][1] == refs[0].digest
    assert [ref.name for _, ref in registry.take_displaced()] == ["b"]


async def test_a_configuration_that_has_no_room_for_a_version_keeps_no_registry_from_starting(place: Place) -> None:
    place.max_versions = 2
    registry, refs = await a_declared(place)
    place.put("b", seed=2)
    await registry.register(wanted("a", "b", replaces=True))
    await registry.route("a", {1: 50, 2: 50})
    place.put("a", seed=1)
    place.put("c", seed=3)
    registry = place.open()
    await registry.declare({"m": [*refs, replace(reference("c", str(place.dropin / "c")), name="a")]}, "2")
    assert [share for _, _, share in contents(registry)] == [50, 50]


async def test_folders_that_were_moved_take_nothing_with_them(place: Place) -> None:
    """The names in a store's folder that was moved or restored elsewhere were forgotten; those of adapters that the
    configuration names led to where they had been."""
    registry, refs = await a_declared(place)
    place.put("b", seed=2)
    await registry.register(wanted("b"))
    before = contents(registry, "b")
    assert place.store is not None
    place.store.close()
    os.rename(place.copies.parent, place.dropin.parent / "moved")
    os.rename(place.dropin / "a", place.dropin / "a2")
    place.store, place.copies = None, place.dropin.parent / "moved" / "adapters"
    place.store_path = str(place.copies.parent / "adapters.sqlite")
    registry = place.open()
    await registry.declare({"m": [replace(refs[0], path=str(place.dropin / "a2"))]}, "2")
    assert contents(registry, "b") == before
    for name, path in (("a", str(place.dropin / "a2")), ("b", os.path.realpath(place.copies / before[0][1]))):
        (version,) = registry.catalogue.entries[name].versions
        assert version.ref.path == path


async def test_what_a_process_left_that_ended_while_it_unloaded_is_freed_by_the_next(place: Place) -> None:
    """Its files stayed for ever."""
    registry = place.open()
    for seed, name in enumerate("ab"):
        place.put(name, seed=seed)
        await registry.register(wanted(name))
    ((_, gone),) = await registry.unregister("a")
    registry = place.open()
    displaced = registry.take_displaced()
    assert {(base, ref.digest) for base, ref in displaced} == {("m", gone.digest), ("other", gone.digest)}
    await registry.discard([ref for _, ref in displaced])
    assert [path.name for path in place.copies.iterdir()] == [contents(registry, "b")[0][1]]


def put_in_memory(name: str, folder: Path) -> None:
    """Put the files of a folder into fsspec's store in memory."""
    for file in folder.iterdir():
        fsspec.filesystem("memory").pipe(f"/registry/{name}/{file.name}", file.read_bytes())


async def test_an_adapter_from_elsewhere_is_one_as_any_other(place: Place) -> None:
    place.prefixes = ("memory://registry/",)
    place.put("a", seed=1)
    put_in_memory("far", place.dropin / "a")
    registry = place.open()
    url = "memory://registry/far"
    # Both are fetched, and the content is kept once.
    await asyncio.gather(registry.register(wanted("far", url)), registry.register(wanted("again", url)))
    place.put("a", seed=2)
    put_in_memory("far", place.dropin / "a")
    entry = (await registry.register(wanted("far", url, replaces=True))).entries["far"]
    assert [version.number for version in entry.versions] == [1, 2]
    assert {path.name for path in place.copies.iterdir()} == {version.ref.digest for version in entry.versions}
    assert reference("far", entry.versions[1].ref.path).digest == entry.versions[1].ref.digest


@pytest.mark.parametrize("kind", ["truncated", "config", "nan", "rank", "base", "shape", "pickle"])
async def test_an_adapter_from_elsewhere_is_trusted_no_more_than_another(place: Place, kind: str) -> None:
    place.prefixes = ("memory://registry/",)
    place.put("a")
    damage(place.dropin / "a", kind)
    put_in_memory(kind, place.dropin / "a")
    registry = place.open()
    with pytest.raises(RequestError) as refused:
        await registry.register(wanted("a", f"memory://registry/{kind}"))
    assert refused.value.field == "lora_path"
    assert registry.catalogue.entries == {}
    assert list(place.copies.iterdir()) == []


async def test_a_source_that_fails_is_told_as_that(place: Place) -> None:
    place.prefixes = ("http://127.0.0.1:9/",)
    registry = place.open()
    with pytest.raises(UnavailableError, match="cannot be read now"):
        await registry.register(wanted("a", "http://127.0.0.1:9/a"))
    for url in ("http://127.0.0.1:10/a", "org/name"):
        with pytest.raises(RequestError) as refused:
            await registry.register(wanted("a", url))
        assert refused.value.field == "lora_path"
    assert list(place.copies.iterdir()) == []


async def test_a_slow_source_holds_up_nobody_and_its_name_is_decided_when_it_is_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.prefixes = ("memory://registry/",)
    place.put("slow", seed=1)
    put_in_memory("slow", place.dropin / "slow")
    place.put("a", seed=3)
    registry = place.open()
    may_end = threading.Event()
    fetch = AdapterSources.fetch

    def fetch_late(self: AdapterSources, name: str, url: str, target: str) -> None:
        assert may_end.wait(60)
        fetch(self, name, url, target)

    monkeypatch.setattr(AdapterSources, "fetch", fetch_late)
    names = ["slow", "a", *(f"s{index}" for index in range(NUM_FETCHERS))]
    slow = [asyncio.create_task(registry.register(wanted(name, "memory://registry/slow"))) for name in names]
    await asyncio.sleep(0)
    await registry.register(wanted("a"))
    await registry.route("a", {1: 100})
    assert set(registry.catalogue.entries) == {"a"}
    may_end.set()
    with pytest.raises(RequestError, match="loaded already"):
        await slow.pop(1)
    await asyncio.gather(*slow)
    assert set(registry.catalogue.entries) == set(names)
    assert len(list(place.copies.iterdir())) == 2


async def test_a_folder_that_hangs_holds_up_nobody(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads were those of every change, and of nodes that ask for files."""
    registry = place.open()
    place.put("a")
    (version,) = (await registry.register(wanted("a"))).entries["a"].versions
    may_end = threading.Event()

    def hang(folder: str, roots: Sequence[str]) -> str | None:
        assert may_end.wait(60)
        return permitted_folder(folder, roots)

    monkeypatch.setattr(adapter_registry, "permitted_folder", hang)
    waiting = [asyncio.create_task(registry.register(wanted(f"n{index}", "a"))) for index in range(64)]
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await registry.route("a", {1: 100})
        assert await registry.read_file(version.ref, CONFIG_FILE, 0)
    may_end.set()
    await asyncio.gather(*waiting)


async def test_a_thousand_registrations_at_once_are_served_or_refused(place: Place) -> None:
    registry = place.open()
    place.put("a")
    answers = await asyncio.gather(
        *(registry.register(wanted(f"n{index}", "a")) for index in range(1000)), return_exceptions=True
    )
    refused = [answer for answer in answers if isinstance(answer, OverloadError)]
    assert {type(answer) for answer in answers} == {Catalogue, OverloadError}
    assert len(registry.catalogue.entries) == 1000 - len(refused) == MAX_REGISTERING
    assert all(error.retry_after_s > 0 for error in refused)
    place.put("late", seed=5)
    assert "late" in (await registry.register(wanted("late"))).entries
    assert len(list(place.copies.iterdir())) == 2
