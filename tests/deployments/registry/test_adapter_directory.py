"""A gateway's view of adapters: it follows the registry, tells its siblings, and frees what nobody uses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorDiedError, RayTaskError

from adapters.catalogue import AdapterEntry, Catalogue, CatalogueChange
from adapters.identity import AdapterDigest, AdapterRef
from adapters.store import AdapterStore
from deployments.config import ModelConfig
from deployments.errors import UnavailableError
from deployments.registry.adapter_changes import Registration
from deployments.registry.adapter_directory import AdapterDirectory, declared_catalogue
from engine.config import EngineConfig
from engine.errors import OverloadError, RequestError
from tests.deployments.in_process import Broadcasted, at_once

REF = AdapterRef(name="sql", path="/sql", digest=AdapterDigest("d0"))
MODEL = ModelConfig(
    name="m",
    engine=EngineConfig(model_path="m", tokenizer_path="m"),
    tokenizer_path="m",
    max_model_len=64,
    vocab_size=64,
    adapters=(REF,),
)


class Call:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, *args: Any) -> Any:
        async def call() -> Any:
            return self._answer(*args)

        return call()


class RegistryHandle:
    """The registry's handle over a store; `dies` as its actor does."""

    def __init__(self) -> None:
        self.store = AdapterStore(":memory:")
        self.store.add(REF, "m")
        self.unloaded: list[str] = []
        self.confirmed: list[tuple[str, int]] = []
        self.in_use: frozenset[AdapterDigest] = frozenset()
        self.dies: Exception | None = None
        self.trials: list[tuple[object, ...]] = []
        for name in ("catalogue", "register", "admit", "withdraw", "unload", "route"):
            setattr(self, name, Call(getattr(self, f"_{name}")))

    def _alive(self) -> None:
        if self.dies:
            raise self.dies

    def _catalogue(
        self, gateway: str, store: str, revision: int, in_use: frozenset[AdapterDigest]
    ) -> Catalogue | CatalogueChange | None:
        self._alive()
        self.in_use = in_use
        self.confirmed.append((gateway, revision))
        return self.store.since(store, revision)

    def _register(self, wanted: Registration) -> AdapterEntry:
        self._alive()
        if wanted.place == "bad":
            raise RequestError("bad", field="lora_name")
        if wanted.place == "busy":
            # As it comes over a Serve handle.
            raise RayTaskError("register", "", OverloadError("busy", retry_after_s=3.0)).as_instanceof_cause()
        ref = AdapterRef(name=wanted.name, path="/new", digest=AdapterDigest(wanted.place))
        self.store.add(ref, "m", percent=0 if wanted.is_tried else wanted.percent)
        return self.store.catalogue().entries[wanted.name]

    def _admit(self, wanted: Registration, number: int) -> AdapterEntry:
        self.trials.append(("admit", wanted, number))
        if wanted.place == "late":
            raise RequestError("late", field="lora_name")
        self.store.route(wanted.name, {number: 100})
        return self.store.catalogue().entries[wanted.name]

    def _withdraw(self, name: str, number: int) -> None:
        self.trials.append(("withdraw", name, number))
        self.store.remove(name, number)

    def _route(self, name: str, split: dict[int, int]) -> AdapterEntry:
        self.store.route(name, split)
        return self.store.catalogue().entries[name]

    def _unload(self, name: str, number: int | None) -> list[int]:
        versions = self.store.catalogue().entries[name].versions
        self.unloaded += [version.ref.digest for version in versions if number in (None, version.number)]
        self.store.remove(name, number)
        return [100, 50]


class Broadcast:
    """A deployment's handle whose replicas answer what they are told to."""

    def __init__(self, *answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[str, Any]] = []

    def broadcast(self, method: str, *args: Any) -> Broadcasted:
        self.asked.append((method, *args))  # type: ignore[arg-type]
        return Broadcasted(*map(at_once, self.answers))


def a_directory(registry: RegistryHandle | None, replicas: Broadcast | None = None) -> AdapterDirectory:
    return AdapterDirectory("g", [MODEL], {"m": replicas or Broadcast()}, registry)  # type: ignore


def digest(directory: AdapterDirectory, name: str) -> str | None:
    found = directory.find(name)
    return None if found is None else found[1].ref.digest


async def test_a_change_is_followed_and_nothing_older_is() -> None:
    registry = RegistryHandle()
    directory = a_directory(registry)
    await directory.start()
    entry = await directory.load(Registration(name="sql", place="d1", replaces=True))
    assert [version.number for version in entry.versions] == [1, 2]
    assert digest(directory, "sql") == "d1"
    told = registry.store.catalogue()
    sibling = a_directory(registry)
    assert digest(sibling, "sql") == "d0"
    sibling.adopt(told)
    assert digest(sibling, "sql") == "d1"
    await directory.route("sql", {1: 100})
    assert digest(directory, "sql") == "d0"
    directory.adopt(told)
    assert digest(directory, "sql") == "d0"


async def test_a_change_is_enough_for_who_has_what_was_before_it_and_others_ask() -> None:
    registry = RegistryHandle()
    directory, late = a_directory(registry), a_directory(registry)
    await directory.start()
    first = registry.store.catalogue()
    changes = []
    for content in ("d1", "d2", "d3"):
        before = registry.store.catalogue()
        registry.store.add(replace(REF, digest=AdapterDigest(content)), "m")
        change = registry.store.since(before.store, before.revision)
        assert isinstance(change, CatalogueChange)
        changes.append(change)
    registry.confirmed.clear()
    await directory.follow(changes[0])
    assert (digest(directory, "sql"), registry.confirmed) == ("d1", [])
    await directory.follow(changes[2])
    assert digest(directory, "sql") == "d3"
    assert [revision for _, revision in registry.confirmed] == [first.revision + 1, first.revision + 3]
    await directory.follow(changes[1])
    assert digest(directory, "sql") == "d3"
    await late.follow(changes[0])
    assert digest(late, "sql") == "d3"


async def test_what_is_adopted_is_confirmed_at_once() -> None:
    registry = RegistryHandle()
    await a_directory(registry).start()
    assert registry.confirmed == [("g", -1), ("g", registry.store.catalogue().revision)]


async def test_each_poll_says_which_adapters_are_in_use() -> None:
    registry, in_use = RegistryHandle(), frozenset({AdapterDigest("d0")})
    await AdapterDirectory("g", [MODEL], {}, registry, in_use=lambda: in_use).start()  # type: ignore[arg-type]
    assert registry.in_use == in_use


async def test_unloading_says_how_much_was_freed() -> None:
    registry = RegistryHandle()
    directory = a_directory(registry)
    await directory.start()
    assert await directory.unload("sql") == [100, 50]
    assert registry.unloaded == ["d0"]
    assert digest(directory, "sql") is None
    assert directory.entry("sql") is None


@pytest.mark.parametrize(
    "error", [ActorDiedError(), AioRpcError(StatusCode.CANCELLED, Metadata(), Metadata(), "The server is stopped.")]
)
async def test_a_gateway_that_was_not_told_finds_out(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """An error of gRPC that Serve does not translate ended the questions for good."""
    monkeypatch.setattr("deployments.registry.adapter_directory.REFRESH_S", 0.001)
    monkeypatch.setattr("deployments.registry.adapter_directory.FIRST_WORD_S", 0.0)
    registry = RegistryHandle()
    directory = a_directory(registry)
    registry.dies = error
    await directory.start()
    # What it knows of is what the configuration says; of other names it cannot say that there are none.
    with pytest.raises(UnavailableError, match="not known yet"):
        directory.find("other")
    assert digest(directory, "sql") == "d0"
    registry.dies = None
    registry.store.add(replace(REF, digest=AdapterDigest("d5")), "m")
    async with asyncio.timeout(20):
        while digest(directory, "sql") != "d5":
            await asyncio.sleep(0.001)
    assert directory.find("other") is None


async def test_a_gateway_begins_with_what_the_registry_says_though_that_comes_a_little_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that started while the registry did answered by contents that names had stood for when the server started."""
    monkeypatch.setattr("deployments.registry.adapter_directory.REFRESH_S", 0.001)
    registry = RegistryHandle()
    registry.store.add(replace(REF, digest=AdapterDigest("d5")), "m")
    registry.dies = ActorDiedError()
    directory = a_directory(registry)
    start = asyncio.create_task(directory.start())
    for _ in range(10):
        await asyncio.sleep(0.001)
    assert not start.done()
    registry.dies = None
    await start
    assert digest(directory, "sql") == "d5"


async def test_a_registry_with_another_store_is_believed_from_its_start() -> None:
    registry = RegistryHandle()
    directory = a_directory(registry)
    await directory.start()
    for index in range(5):
        await directory.load(Registration(name="sql", place=f"d{index + 1}", replaces=True))
    old = registry.store.catalogue()
    registry.store = AdapterStore(":memory:")
    directory.adopt(registry.store.catalogue())
    assert digest(directory, "sql") is None
    assert old.revision > registry.store.catalogue().revision


async def test_errors_are_the_registry_s_and_its_absence_is_overload() -> None:
    registry = RegistryHandle()
    directory = a_directory(registry)
    with pytest.raises(RequestError, match="bad"):
        await directory.load(Registration(name="sql", place="bad"))
    with pytest.raises(OverloadError, match=r"^busy$") as refused:
        await directory.load(Registration(name="sql", place="busy"))
    assert refused.value.retry_after_s == 3.0
    registry.dies = ActorDiedError()
    with pytest.raises(UnavailableError, match="registry"):
        await directory.load(Registration(name="sql", place="d1"))
    with pytest.raises(RequestError, match="cannot be changed"):
        await a_directory(None).load(Registration(name="sql", place="d1"))


@pytest.mark.parametrize("name", ["sql", "new"])
async def test_a_content_on_trial_is_asked_by_its_version_and_forgotten_where_it_fails(name: str) -> None:
    registry = RegistryHandle()
    directory = a_directory(registry)
    await directory.start()
    before, number = digest(directory, name), 2 if name == "sql" else 1

    async def fail(model: str) -> None:
        assert model == f"{name}@{number}"
        assert digest(directory, model) == "d1"
        assert digest(directory, name) == before
        raise RequestError("No.", field="canary")

    wanted = Registration(name=name, place="d1", replaces=True)
    with pytest.raises(RequestError, match="No"):
        await directory.load_if(wanted, fail)
    assert (digest(directory, name), digest(directory, f"{name}@{number}")) == (before, None)
    assert registry.trials == [("withdraw", name, number)]

    async def succeed(model: str) -> None:
        assert digest(directory, model) == "d1"

    entry = await directory.load_if(wanted, succeed)
    assert entry.split == ((number + 1, 100),)
    assert digest(directory, name) == "d1"
    assert registry.trials[1:] == [("admit", replace(wanted, is_tried=True), number + 1)]


async def test_a_content_that_is_not_admitted_after_its_trial_is_forgotten_too() -> None:
    registry = RegistryHandle()
    directory = a_directory(registry)
    await directory.start()

    async def succeed(model: str) -> None:
        pass

    with pytest.raises(RequestError, match="late"):
        await directory.load_if(Registration(name="sql", place="late", replaces=True), succeed)
    assert [kind for kind, *_ in registry.trials] == ["admit", "withdraw"]
    assert digest(directory, "sql@2") is None


async def test_the_status_says_where_contents_lie() -> None:
    replicas = Broadcast(("r1", {"d0": "device"}), ("r2", {"d9": "host"}), ("r3", {"d0": "loading"}))
    (status,) = await a_directory(None, replicas).status()
    assert status.places_by_replica == {1: {"r1": "device", "r3": "loading"}}


async def test_the_status_says_what_does_not_fit() -> None:
    for answers, expected in (((), {}), (({"m": {"d0": "it is wide"}, "n": {}},), {1: "it is wide"})):
        (status,) = await a_directory(Broadcast(*answers), Broadcast()).status()  # type: ignore[arg-type]
        assert status.misfits == expected


@pytest.mark.parametrize(
    ("others", "cross_encoders", "shadow"),
    [(["sql"], (), "a base model"), ([], ["sql"], "a cross-encoder"), (["other"], ["judge"], None)],
)
async def test_an_adapter_whose_name_a_model_has_taken_is_only_in_the_status(
    others: Sequence[str], cross_encoders: Sequence[str], shadow: str | None
) -> None:
    """Its versions could be requested by tenants that may use the model, but not the adapter's base."""
    replicas: Any = dict.fromkeys(["m", *others], Broadcast())
    directory = AdapterDirectory("g", [MODEL], replicas, None, cross_encoders=cross_encoders)
    is_found = shadow is None
    assert [directory.find(name) is not None for name in ("sql", "sql@1", "sql@latest")] == [is_found] * 3
    assert [entry.name for entry in directory.entries()] == ["sql"] * is_found
    (status,) = await directory.status()
    assert (status.entry.name, status.shadowed_by) == ("sql", shadow)


def test_what_belongs_to_a_model_that_is_not_served_is_not_there() -> None:
    directory = AdapterDirectory("g", [MODEL], {}, None)
    assert directory.find("sql") is None
    assert directory.entries() == []
    assert declared_catalogue([MODEL]).revision < 0
