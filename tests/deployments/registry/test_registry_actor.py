"""The registry's actor: what it carries through, whom it tells, and whose files it leaves alone."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from adapters.catalogue import CatalogueChange
from adapters.file_store import INCOMING, copy_files
from adapters.folder import TENSOR_FILE
from adapters.identity import AdapterDigest
from adapters.store import AdapterStore, StoreTakenError
from deployments import waits
from deployments.config import AdapterBase, RegistryConfig
from deployments.registry import registry_actor
from deployments.registry.adapter_changes import Registration
from deployments.registry.adapter_registry import RegistryServer
from deployments.registry.followers import Followers
from deployments.registry.misfits import misfits
from deployments.registry.registry_actor import Registry, open_store
from engine.errors import ConfigError
from tests.adapters.handmade import SHAPES, make_tensors, write
from tests.deployments.in_process import Broadcasted, at_once


class Replicas:
    """The handle of a deployment whose replicas answer when they may."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answer: object = 512
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def broadcast(self, method: str, argument: Any) -> Broadcasted:
        self.asked.append((method, argument))
        return Broadcasted(self._answer(), at_once(RuntimeError("one has died")))

    async def _answer(self) -> object:
        await self.may_answer.wait()
        return self.answer


class Actor:
    """A registry without a cluster, over a folder that others open later."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.dropin = folder, folder / "dropin"
        self.gateways, self.replicas = Replicas(), Replicas()
        self.dropin.mkdir(exist_ok=True)

    @property
    def config(self) -> RegistryConfig:
        base = AdapterBase(name="m", module_shapes=SHAPES, max_rank=16, allowed=(str(self.dropin),))
        return RegistryConfig(
            store_path=str(self.folder / "store" / "adapters.sqlite"),
            folder=str(self.folder / "store" / "adapters"),
            bases=(base,),
            watch_period_s=0.01,
        )

    async def open(self, monkeypatch: pytest.MonkeyPatch) -> Registry:
        handles = {"Gateway": self.gateways, "Model-m": self.replicas}
        monkeypatch.setattr(Registry, "_handle", lambda _, deployment: handles[deployment])
        registry = object.__new__(Registry)
        await registry.__init__(self.config)  # type: ignore[misc]
        return registry

    async def end(self, registry: Registry) -> None:
        """End it as a kill does: whatever it was about stays undone."""
        tasks = [registry._watch, registry._fit_check, *waits._detached]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        registry._server._store.close()

    def put(self, name: str, seed: int = 0) -> Registration:
        write(self.dropin / name, tensors=make_tensors(seed=seed))
        return Registration(name=name, place=name, base="m")

    def kept(self) -> set[str]:
        return {path.name for path in (self.folder / "store" / "adapters").iterdir()}


@pytest.fixture
def actor(tmp_path: Path) -> Actor:
    return Actor(tmp_path)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():
            await asyncio.sleep(0.001)


async def test_an_unload_tells_waits_frees_and_deletes_though_its_client_has_left(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = await actor.open(monkeypatch)
    (version,) = (await registry.register(actor.put("a"))).versions
    assert actor.gateways.asked == [("adopt", registry._server.catalogue)]
    actor.replicas.may_answer.clear()
    clients = [asyncio.create_task(registry.unload("a"))]
    await until(lambda: bool(actor.replicas.asked))
    assert actor.replicas.asked == [("release_adapter", version.ref.digest)]
    (_, told), waited = actor.gateways.asked[1:]
    assert told.entries == {"a": None}
    assert waited == ("until_unused", version.ref.digest)
    clients[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await clients[0]
    assert actor.kept() == {version.ref.digest}
    actor.replicas.may_answer.set()
    await until(lambda: not actor.kept())
    await registry.register(actor.put("b"))
    freed = await registry.unload("b", 1)
    assert (registry._server.catalogue.entries, freed, actor.kept()) == ({}, [512], set())
    await actor.end(registry)


async def test_many_contents_are_released_a_few_at_a_time(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand calls at once took all places that a replica has for requests."""
    monkeypatch.setattr(registry_actor, "MAX_RELEASING", 2)
    registry = await actor.open(monkeypatch)
    for seed, name in enumerate("abcd"):
        await registry.register(actor.put(name, seed))
    actor.replicas.may_answer.clear()
    unloads = [asyncio.create_task(registry.unload(name)) for name in "abcd"]
    await until(lambda: len(actor.replicas.asked) == 2)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(actor.replicas.asked) == 2
    actor.replicas.may_answer.set()
    await asyncio.gather(*unloads)
    assert (len(actor.replicas.asked), actor.kept()) == (4, set())
    await actor.end(registry)


async def test_adapters_of_a_model_that_is_gone_can_be_unloaded(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve has no handle for its deployment: the unload seemed to fail, and the files stayed."""
    registry = await actor.open(monkeypatch)
    await registry.register(actor.put("a"))
    monkeypatch.setattr(Registry, "_handle", lambda _, deployment: {"Gateway": actor.gateways}[deployment])
    freed = await registry.unload("a")
    assert (freed, actor.kept()) == ([], set())
    await actor.end(registry)


async def test_no_replica_forgets_what_a_gateway_is_about_to_send_it(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was at the tokenizer while its adapter was unloaded got a 500: no replica knew of it, and the files went."""
    registry = await actor.open(monkeypatch)
    (version,) = (await registry.register(actor.put("a"))).versions
    actor.gateways.may_answer.clear()
    unload = asyncio.create_task(registry.unload("a"))
    await until(lambda: len(actor.gateways.asked) == 2)
    actor.gateways.may_answer.set()
    actor.gateways.may_answer.clear()
    await until(lambda: len(actor.gateways.asked) == 3)
    assert actor.gateways.asked[-1] == ("until_unused", version.ref.digest)
    for _ in range(100):
        await asyncio.sleep(0)
    assert (actor.replicas.asked, actor.kept()) == ([], {version.ref.digest})
    actor.gateways.may_answer.set()
    await unload
    assert (len(actor.replicas.asked), actor.kept()) == (1, set())
    await actor.end(registry)


async def test_no_replica_forgets_what_a_gateway_that_drains_is_about_to_send_it(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not in the handle, so that nobody asked it."""
    registry = await actor.open(monkeypatch)
    digest = (await registry.register(actor.put("a"))).versions[0].ref.digest
    catalogue = registry._server.catalogue
    await registry.catalogue("drains", catalogue.store, catalogue.revision, frozenset({digest}))
    unload = asyncio.create_task(registry.unload("a"))
    await until(lambda: "adopt" in dict(actor.gateways.asked[1:]))
    now = await registry.catalogue("drains", catalogue.store, catalogue.revision, frozenset({digest}))
    assert now is not None
    await registry.catalogue("drains", now.store, now.revision, frozenset({digest}))
    await until(lambda: actor.gateways.asked[-1] == ("until_unused", digest))
    await asyncio.sleep(2 * registry_actor.CONFIRM_POLL_S)
    assert (actor.replicas.asked, actor.kept()) == ([], {digest})
    await registry.catalogue("drains", now.store, now.revision, frozenset())
    await unload
    assert (len(actor.replicas.asked), actor.kept()) == (1, set())
    await actor.end(registry)


async def test_an_unload_ends_though_its_content_is_loaded_again_and_never_unused(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for as long as a gateway that was not asked used the content, under its new name."""
    registry = await actor.open(monkeypatch)
    digest = (await registry.register(actor.put("a"))).versions[0].ref.digest
    catalogue = registry._server.catalogue

    async def confirm_for_ever() -> None:
        now = catalogue
        while True:
            now = await registry.catalogue("unasked", now.store, now.revision, frozenset({digest})) or now
            await asyncio.sleep(0.001)

    confirming = asyncio.create_task(confirm_for_ever())
    await until(lambda: bool(registry._followers.use(digest, but=())))
    unload = asyncio.create_task(registry.unload("a"))
    await until(lambda: actor.gateways.asked[-1] == ("until_unused", digest))
    assert not actor.replicas.asked
    await registry.register(actor.put("b"))
    await asyncio.wait_for(unload, 30)
    assert actor.kept() == {digest}
    confirming.cancel()
    await actor.end(registry)


async def test_adapters_that_a_new_checkpoint_cannot_serve_are_told_after_a_restart(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were listed as served, and each request failed."""
    registry = await actor.open(monkeypatch)
    (version,) = (await registry.register(actor.put("a"))).versions
    await registry._fit_check
    assert await registry.misfits() == {"m": {}}
    await actor.end(registry)
    monkeypatch.setitem(SHAPES, "model.layers.0.self_attn.q_proj", (32, 32))
    registry = await actor.open(monkeypatch)
    await registry._fit_check
    assert list((await registry.misfits())["m"]) == [version.ref.digest]
    await actor.end(registry)


@pytest.mark.parametrize("name", ["a", "b"])
async def test_replicas_try_again_at_once_what_a_load_has_repaired(
    actor: Actor, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """For ten seconds its requests still failed, and no load of it could pass a canary."""
    registry = await actor.open(monkeypatch)
    (version,) = (await registry.register(actor.put("a"))).versions
    again = replace(actor.put(name), replaces=True)
    await registry.register(again)
    assert actor.replicas.asked == []
    (Path(version.ref.path) / TENSOR_FILE).write_bytes(b"")
    await registry.register(again)
    shutil.rmtree(version.ref.path)
    await registry.register(again)
    assert actor.replicas.asked == [("retry_adapter", version.ref.digest)] * 2
    await actor.end(registry)


@pytest.mark.parametrize("when", ["after", "during"])
async def test_an_adapter_that_is_loaded_again_is_no_misfit_any_more(
    actor: Actor, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It was listed as one until the registry's next start, though it was served."""
    registry = await actor.open(monkeypatch)
    (version,) = (await registry.register(actor.put("a"))).versions
    await actor.end(registry)
    shutil.rmtree(version.ref.path)
    may_end = threading.Event()

    def check(*args: Any, **options: Any) -> Any:
        found = misfits(*args, **options)
        assert may_end.wait(30)
        return found

    monkeypatch.setattr(registry_actor, "misfits", check)
    registry = await actor.open(monkeypatch)
    if when == "after":
        may_end.set()
        await registry._fit_check
        assert list((await registry.misfits())["m"]) == [version.ref.digest]
    await registry.register(replace(actor.put("a"), replaces=True))
    may_end.set()
    await registry._fit_check
    assert await registry.misfits() == {"m": {}}
    await actor.end(registry)


async def test_what_a_process_left_undone_is_done_by_the_next(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = await actor.open(monkeypatch)
    for seed, name in enumerate("ab"):
        await registry.register(actor.put(name, seed))
    actor.replicas.may_answer.clear()
    unload = asyncio.create_task(registry.unload("a"))
    await until(lambda: bool(actor.replicas.asked))
    await actor.end(registry)
    await asyncio.gather(unload, return_exceptions=True)
    assert len(actor.kept()) == 2
    (actor.folder / "store" / "adapters" / f"{INCOMING}half").mkdir()
    # Requests that use it may go on: replicas outlive a registry.
    registry = await actor.open(monkeypatch)
    await until(lambda: len(actor.replicas.asked) == 2)
    assert actor.replicas.asked[0] == actor.replicas.asked[1]
    assert len(actor.kept()) == 2
    actor.replicas.may_answer.set()
    await until(lambda: len(actor.kept()) == 1)
    assert set((await registry.catalogue("g", "", -1)).entries) == {"b"}  # type: ignore[union-attr]
    await actor.end(registry)


async def test_changes_that_are_made_while_others_are_told_of_are_told_together(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = await actor.open(monkeypatch)
    actor.gateways.may_answer.clear()
    wanted = [actor.put(f"a{seed}", seed) for seed in range(6)]
    changes = [asyncio.create_task(registry.register(one)) for one in wanted]
    await until(lambda: len(registry._server.catalogue.entries) == len(wanted))
    assert not any(change.done() for change in changes)
    actor.gateways.may_answer.set()
    await asyncio.gather(*changes)
    assert len(actor.gateways.asked) == 2
    first, second = (set(change.entries) for _, change in actor.gateways.asked)
    assert (first | second, first & second) == ({one.name for one in wanted}, set())
    await actor.end(registry)


async def test_a_change_waits_for_a_gateway_that_the_handle_does_not_know(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that had just started answered with the old content for up to a second after a promotion."""
    registry = await actor.open(monkeypatch)
    before = await registry.catalogue("new", "", -1)
    assert before is not None
    change = asyncio.create_task(registry.register(actor.put("a")))
    await until(lambda: bool(actor.gateways.asked))
    after = await registry.catalogue("new", before.store, before.revision)
    assert after is not None
    await asyncio.sleep(2 * registry_actor.CONFIRM_POLL_S)
    assert not change.done()
    assert await registry.catalogue("new", after.store, after.revision) is None
    assert after.entries == {"a": await change}
    await actor.end(registry)


async def test_a_gateway_that_cannot_use_a_change_gets_the_whole_catalogue(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an earlier release would have kept its names, and every later change would have waited for it."""
    registry = await actor.open(monkeypatch)
    actor.gateways.answer = "other"
    before = registry._server.catalogue
    assert await registry.catalogue("old", before.store, before.revision) is None
    registry._followers = Followers()
    await registry.register(actor.put("a"))
    found = [await registry.catalogue("old", before.store, before.revision) for _ in range(3)]
    assert isinstance(found[0], CatalogueChange)
    assert found[1:] == [registry._server.catalogue] * 2
    await actor.end(registry)


async def test_a_gateway_that_was_told_need_not_ask(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = await actor.open(monkeypatch)
    registry._followers = Followers(clock=lambda: 0.0)
    await registry.catalogue("told", "", -1)
    actor.gateways.answer = "told"
    await asyncio.wait_for(registry.register(actor.put("a")), 30)
    await actor.end(registry)


async def test_what_is_dropped_in_is_told_of_though_a_scan_has_failed(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, failures = RegistryServer.look, [RuntimeError("once")]

    async def fail_once(server: RegistryServer) -> bool:
        if failures:
            raise failures.pop()
        return await look(server)

    monkeypatch.setattr(RegistryServer, "look", fail_once)
    base = replace(actor.config.bases[0], watched=str(actor.dropin))
    monkeypatch.setattr(Actor, "config", replace(actor.config, bases=(base,)))
    actor.put("a")
    registry = await actor.open(monkeypatch)
    await until(lambda: any("a" in told.entries for _, told in actor.gateways.asked))
    await actor.end(registry)


async def test_a_registry_that_is_replaced_scans_no_more(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve had shut down its threads, and each of its scans logged a traceback until the process ended."""
    registry = await actor.open(monkeypatch)
    await registry._fit_check
    registry.__del__()
    await asyncio.wait([registry._watch], timeout=30)
    assert registry._watch.cancelled()
    await actor.end(registry)


async def test_another_server_s_registry_leaves_the_files_of_the_first_alone(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It deleted contents that its own names did not stand for, though the first one's did."""
    monkeypatch.setattr(registry_actor, "NUM_LOCK_TRIES", 1)
    first, files = open_store(actor.config)
    actor.put("a")
    copy = partial(copy_files, "a", str(actor.dropin / "a"))
    ref = files.keep("a", files.bring(copy), SHAPES, 16)
    first.add(ref, "m")
    second = await actor.open(monkeypatch)
    await second.register(Registration(name="b", place="a", base="m"))
    await second.unload("b")
    assert os.path.isdir(ref.path)
    assert isinstance(first, AdapterStore)
    first.close()
    await actor.end(second)


async def test_a_store_whose_disk_is_full_at_the_start_is_named(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was told of it was "database or disk is full", and there are three databases."""

    def fail(*args: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(AdapterStore, "signatures", fail)
    with pytest.raises(
        ConfigError, match=r"args\.registry\.folder: .*sqlite cannot be written: database or disk is full"
    ):
        await actor.open(monkeypatch)


def test_a_damaged_store_is_named(actor: Actor) -> None:
    """All that was told of it was "file is not a database", and there are three of them."""
    path = Path(actor.config.store_path)
    path.parent.mkdir()
    path.write_bytes(b"no database" * 500)
    with pytest.raises(ConfigError, match=rf"args\.registry\.folder: {path} cannot be opened: file is not a database"):
        open_store(actor.config)


def test_a_store_that_another_server_has_is_not_waited_for_long(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_actor, "NUM_LOCK_TRIES", 2)
    monkeypatch.setattr(registry_actor, "NUM_LOCK_TRIES_IN_ROLLOUT", 1 << 60)
    monkeypatch.setattr(registry_actor, "LOCK_POLL_S", 0)
    another, _ = open_store(replace(actor.config, build="1", server="s"))
    another.tell([], "1")
    store, files = open_store(replace(actor.config, build="2", server="t"))
    assert not files.ref("a", AdapterDigest("d")).path.startswith(os.path.realpath(actor.config.folder))
    store.close()
    another.close()


@pytest.mark.parametrize("build", ["1", "2"], ids=["which may be frozen", "which finishes in a rollout"])
async def test_a_registry_waits_for_the_one_before_it(
    actor: Actor, monkeypatch: pytest.MonkeyPatch, build: str
) -> None:
    """It began without the names that its own server had loaded, and told every gateway that they were gone."""
    monkeypatch.setattr(registry_actor, "NUM_LOCK_TRIES", 1)
    monkeypatch.setattr(registry_actor, "LOCK_POLL_S", 0.001)
    if build == "1":
        monkeypatch.setattr(registry_actor, "NUM_LOCK_TRIES_IN_ROLLOUT", 1)
    config = replace(actor.config, build="1", server="s")
    frozen, _ = open_store(config)
    frozen.tell([], "1")
    config = replace(config, build=build)
    taken = threading.Semaphore(0)

    class Counted(AdapterStore):
        def __init__(self, *args: Any, **options: Any) -> None:
            try:
                super().__init__(*args, **options)
            except StoreTakenError:
                taken.release()
                raise

    monkeypatch.setattr(registry_actor, "AdapterStore", Counted)
    opening = asyncio.create_task(asyncio.to_thread(open_store, config))
    for _ in range(5):
        assert await asyncio.to_thread(taken.acquire, timeout=30)
    assert not opening.done()
    frozen.close()
    store, files = await opening
    assert (store.build, files.ref("a", AdapterDigest("d")).path) == ("1", os.path.realpath(config.folder) + "/d")
    store.close()
