"""The registry: what it takes, what it refuses, and what it remembers."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.catalogue import Catalogue
from adapters.errors import AdapterError, AdapterUnavailableError
from adapters.file_store import FileStore
from adapters.folder import CONFIG_FILE, TENSOR_FILE
from adapters.registry import permitted_folder, reference
from adapters.store import AdapterStore
from deployments.errors import UnavailableError
from deployments.registry import adapter_registry
from deployments.registry.adapter_changes import Registration
from deployments.registry.adapter_registry import MAX_REGISTERING
from deployments.registry.drop_ins import MAX_WAIT_S
from engine.errors import OverloadError, RequestError
from tests.adapters.handmade import make_tensors, write
from tests.deployments.registry.place import Place, a_declared, contents, damage, wanted


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
    await registry.register(wanted("three", "a"))
    for name, field in (("two", "lora_name"), ("three", "version")):
        with pytest.raises(RequestError) as refused:
            await registry.unregister(name, 2)
        assert (refused.value.code, refused.value.field) == ("model_not_found", field)


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
    registry = place.open()
    for base, words, field in (
        (None, "must be one of", "base_model_name"),
        ("none", "does not exist", "base_model_name"),
        ("other", "no such folder", "lora_path"),
    ):
        with pytest.raises(RequestError, match=words) as refused:
            await registry.register(Registration(name="a", place="a", base=base))
        assert refused.value.field == field
    # Where there is only one, it need not be named, but no other may be.
    registry._bases = {"m": registry._bases["m"]}
    with pytest.raises(RequestError, match="does not exist"):
        await registry.register(Registration(name="a", place="a", base="none"))
    assert (await registry.register(Registration(name="a", place="a"))).entries["a"].base == "m"


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
    trial = replace(wanted("a", replaces=True), percent=0)
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
    # A name that has only such contents is not taken.
    await registry.register(replace(wanted("b", "a"), percent=0))
    place.put("b", seed=3)
    assert (await registry.register(wanted("b"))).entries["b"].split == ((2, 100),)


def tried(name: str, folder: str, *, percent: int = 100, replaces: bool = True) -> Registration:
    return replace(wanted(name, folder, replaces=replaces), percent=percent, is_tried=True)


async def test_a_content_that_passes_its_trial_gets_its_share_of_what_the_others_have_then(place: Place) -> None:
    """The share was taken of what the others had before it, so what was routed meanwhile was undone."""
    registry = place.open()
    for seed, folder in enumerate("abc", start=1):
        place.put(folder, seed=seed)
    await registry.register(wanted("x", "a"))
    await registry.register(wanted("x", "b", replaces=True))
    trial = tried("x", "c", percent=10)
    assert (await registry.register(trial)).entries["x"].split == ((2, 100),)
    await registry.route("x", {1: 100})
    assert (await registry.admit(trial, 3)).entries["x"].split == ((1, 90), (3, 10))
    assert await registry.withdraw("x", 3) == []


async def test_trials_side_by_side_lose_nothing_of_one_another(place: Place) -> None:
    registry = place.open()
    place.put("a", seed=1)
    await registry.register(wanted("x", "a"))
    for seed in range(2, 6):
        place.put(f"b{seed}", seed=seed)
        await registry.register(tried("x", f"b{seed}", percent=10))
    for number in range(2, 6):
        await registry.admit(tried("x", f"b{number}", percent=10), number)
    split = dict(registry.catalogue.entries["x"].split)
    assert (sum(split.values()), split[5], min(split.values()) > 0) == (100, 10, True)


async def test_a_name_is_loaded_once_though_its_first_contents_are_tried_at_a_time(place: Place) -> None:
    """Neither said that it replaced the other, and the second one did."""
    registry = place.open()
    place.put("a", seed=1)
    place.put("b", seed=2)
    first, second = (tried("x", folder, replaces=False) for folder in "ab")
    await registry.register(first)
    await registry.register(second)
    await registry.admit(second, 2)
    with pytest.raises(RequestError, match="loaded already"):
        await registry.admit(first, 1)
    ((_, gone),) = await registry.withdraw("x", 1)
    entry = registry.catalogue.entries["x"]
    assert (entry.split, [version.number for version in entry.versions]) == (((2, 100),), [2])
    assert gone.digest != entry.versions[0].ref.digest


async def test_a_trial_that_fails_takes_nothing_from_who_has_loaded_the_same_content(place: Place) -> None:
    """Before it, meanwhile, with traffic or without; other trials of it may still pass."""
    registry = place.open()
    place.put("a", seed=1)
    trial, loaded = tried("x", "a"), replace(wanted("x", "a", replaces=True), percent=0)
    await registry.register(trial)
    await registry.register(trial)
    assert await registry.withdraw("x", 1) == []
    await registry.register(loaded)
    assert await registry.withdraw("x", 1) == []
    await registry.register(trial)
    assert await registry.withdraw("x", 1) == []
    await registry.unregister("x")
    await registry.register(trial)
    await registry.route("x", {2: 100})
    assert await registry.withdraw("x", 2) == []
    place.put("a", seed=2)
    await registry.register(trial)
    await registry.register(trial)
    assert await registry.withdraw("x", 3) == []
    assert len(await registry.withdraw("x", 3)) == 1
    assert [version.number for version in registry.catalogue.entries["x"].versions] == [2]


async def test_a_trial_that_fails_after_its_registry_has_died_is_withdrawn_by_the_next(place: Place) -> None:
    """Its version stayed for good, though its load was refused: only the first process knew what it was there for."""
    registry = place.open()
    for number, folder in enumerate("abcd"):
        place.put(folder, seed=number)
    await registry.register(wanted("x", "a"))
    await registry.register(tried("x", "b"))
    await registry.register(tried("x", "c", percent=0))
    await registry.admit(tried("x", "c", percent=0), 3)
    await registry.register(tried("x", "d", percent=10))
    registry = place.open()
    assert len(await registry.withdraw("x", 2)) == 1
    # One that has passed stays, with traffic or without.
    assert await registry.withdraw("x", 3) == []
    await registry.admit(tried("x", "d", percent=10), 4)
    registry = place.open()
    assert await registry.withdraw("x", 4) == []
    entry = registry.catalogue.entries["x"]
    assert ([version.number for version in entry.versions], entry.split) == ([1, 3, 4], ((1, 90), (4, 10)))


async def test_what_was_unloaded_during_its_trial_is_not_admitted(place: Place) -> None:
    registry = place.open()
    place.put("a", seed=1)
    trial = tried("x", "a")
    await registry.register(trial)
    await registry.unregister("x", 1)
    with pytest.raises(RequestError, match="its version 1 was unloaded while it was tried") as refused:
        await registry.admit(trial, 1)
    assert refused.value.field == "lora_name"
    assert await registry.withdraw("x", 1) == []


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
    registry._drop_ins._bases = [gone, registry._bases["m"]]
    place.put("a")
    assert await registry.look()
    assert set(registry.catalogue.entries) == {"a"}
    place.put("b")
    assert await registry.look()
    assert caplog.text.count(f"there is no folder {gone.watched}") == 1
    # And again where it was there meanwhile.
    (place.dropin.parent / "gone").mkdir()
    await registry.look()
    (place.dropin.parent / "gone").rmdir()
    await registry.look()
    assert caplog.text.count(f"there is no folder {gone.watched}") == 2


async def test_a_folder_that_is_put_back_after_an_unload_is_served_again(place: Place) -> None:
    registry = place.open()
    place.put("a")
    assert await registry.look()
    (place.dropin / "a").rename(place.dropin.parent / "a")
    assert not await registry.look()
    await registry.unregister("a")
    (place.dropin.parent / "a").rename(place.dropin / "a")
    assert await registry.look()
    assert set(registry.catalogue.entries) == {"a"}


async def test_changes_run_one_at_a_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, changed = place.open(), set[str]()

    def locked(name: str, change: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **options: object) -> object:
            assert registry._lock.locked()
            changed.add(name)
            return change(*args, **options)

        return run

    names = {AdapterStore: ("add", "remove", "route", "tell", "told", "signatures"), FileStore: ("keep", "delete")}
    for owner, changes in names.items():
        for name in changes:
            monkeypatch.setattr(owner, name, locked(name, getattr(owner, name)))
    place.put("a")
    await registry.declare({"m": [reference("a", str(place.dropin / "a"))]}, "1")
    place.put("b", seed=1)
    assert await registry.look()
    await registry.register(wanted("c", "b"))
    await registry.route("c", {1: 100})
    for name in "bc":
        await registry.discard([displaced.ref for displaced in await registry.unregister(name)])
    assert changed == {name for changes in names.values() for name in changes}


async def test_a_pickle_in_the_drop_in_folder_is_told_of_once(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """It was ignored without a word, as a folder whose files are still on their way."""
    registry = place.open()
    place.put("a")
    damage(place.dropin / "a", "pickle")
    place.put("half")
    (place.dropin / "half" / TENSOR_FILE).unlink()
    assert not await registry.look()
    assert not await registry.look()
    (line,) = caplog.messages
    assert line.startswith("drop-in folder: Adapter 'a' cannot be used: adapter_model.bin is a pickle")
    place.put("a")
    assert await registry.look()


async def test_an_adapter_one_level_too_deep_is_told_of_once(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """It was ignored without a word."""
    registry = place.open()
    for path in ("team/mine", "team/other", "a", "a/checkpoint-10", ".hidden/b", "deep/er/c"):
        place.put(path)
    (place.dropin / "notes.txt").touch()
    (place.dropin / "adapter_config.json").touch()
    assert await registry.look()
    assert not await registry.look()
    assert set(registry.catalogue.entries) == {"a"}
    assert caplog.messages == [
        f"drop-in folder: {what} is not loaded; only folders directly in {place.dropin} are"
        for what in ("the adapter in it", "team/mine")
    ]


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
    with monkeypatch.context() as busy:
        too_many = AdapterUnavailableError("c", "adapter_config.json cannot be opened (Too many open files)")
        busy.setattr(FileStore, "bring", raising(too_many))
        registry._drop_ins._clock = lambda: time.monotonic() + MAX_WAIT_S
        assert not await registry.look()
        with pytest.raises(UnavailableError, match="Too many open files"):
            await registry.register(wanted("c", str(place.dropin / "b")))
    with monkeypatch.context() as full:
        for change in ("route", "remove"):
            full.setattr(AdapterStore, change, raising(sqlite3.OperationalError("database or disk is full")))
        with pytest.raises(UnavailableError):
            await registry.route("a", {1: 100})
        with pytest.raises(UnavailableError):
            await registry.unregister("a")
    registry._drop_ins._clock = lambda: time.monotonic() + 3 * MAX_WAIT_S
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


async def test_what_a_promotion_has_no_room_for_is_freed_and_a_failed_trial_costs_nothing(place: Place) -> None:
    place.max_versions = 2
    registry = place.open()
    for seed in (1, 2):
        place.put("a", seed=seed)
        await registry.register(wanted("a", replaces=True))
    before = contents(registry)
    place.put("a", seed=3)
    for number in (3, 4):
        await registry.register(replace(wanted("a", replaces=True), percent=0))
        assert contents(registry)[:2] == before
        if number == 3:
            await registry.unregister("a", 3)
    assert registry.take_displaced() == []
    await registry.route("a", {4: 100})
    assert [(number, share) for number, _, share in contents(registry)] == [(2, 0), (4, 100)]
    assert [ref.digest for _, ref in registry.take_displaced()] == [before[0][1]]


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
