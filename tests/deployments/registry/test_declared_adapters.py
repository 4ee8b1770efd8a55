"""Adapters of a configuration, taken over by registries that begin anew."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from adapters.folder import CONFIG_FILE, TENSOR_FILE
from adapters.registry import reference, signatures
from engine.errors import RequestError
from tests.deployments.registry.place import Place, a_declared, contents, wanted


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


async def test_a_copy_goes_with_the_last_name_though_that_one_reads_the_content_in_place(place: Place) -> None:
    """It stayed on the disk until the registry's next start."""
    registry, _ = await a_declared(place)
    await registry.register(wanted("copied", "a"))
    assert await registry.unregister("copied") == []
    ((_, ref),) = await registry.unregister("a")
    await registry.discard([ref])
    assert (list(place.copies.iterdir()), sorted(path.name for path in place.dropin.iterdir())) == ([], ["a"])


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


async def test_an_adapter_of_a_model_that_is_gone_is_in_nobody_s_way(place: Place) -> None:
    """Nothing listed it, and yet nobody could have its name, not even with `load_inplace`."""
    place.put("x", seed=1)
    place.bases = ("m", "old")
    (old,) = (await place.open().register(replace(wanted("x"), base="old"))).entries["x"].versions
    place.bases = ("m",)
    place.put("x", seed=2)
    registry = place.open()
    await registry.declare({}, "2")
    with pytest.raises(RequestError, match="no such folder"):
        await registry.register(wanted("x", "nowhere"))
    assert registry.catalogue.entries["x"].base == "old", "the model may come back"
    entry = (await registry.register(wanted("x"))).entries["x"]
    assert (entry.base, entry.split, len(entry.versions)) == ("m", ((2, 100),), 1)
    assert [displaced.ref.digest for displaced in registry.take_displaced()] == [old.ref.digest]
    assert place.open().catalogue.entries["x"].versions == entry.versions


async def test_what_a_model_that_is_gone_had_can_be_dropped_in_for_another(place: Place) -> None:
    """It counted as registered already, and nobody served it."""
    place.put("x", seed=1)
    place.bases = ("m", "old")
    registry = place.open()
    registry._bases["m"] = replace(registry._bases["m"], watched=None)
    assert await registry.look()
    assert registry.catalogue.entries["x"].base == "old"
    place.bases = ("m",)
    registry = place.open()
    assert await registry.look()
    assert registry.catalogue.entries["x"].base == "m"
