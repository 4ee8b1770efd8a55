"""Adapters that are fetched from other places than folders."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest

from adapters.folder import CONFIG_FILE, TENSOR_FILE
from adapters.registry import reference
from adapters.sources import AdapterSources
from deployments.errors import UnavailableError
from deployments.registry.adapter_registry import NUM_FETCHERS
from engine.errors import RequestError
from tests.adapters.handmade import write_tokenizer
from tests.deployments.registry.place import Place, damage, wanted


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


async def test_one_with_tokens_of_its_own_is_refused_from_wherever_it_comes(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """It was served with the base's tokenization, which it was not trained with."""
    place.prefixes, place.tokenizer = ("memory://registry/",), str(write_tokenizer(place.dropin.parent, {"<|end|>": 2}))
    for name, added in (("own", {"<|tool|>": 3}), ("same", {"<|end|>": 2})):
        place.put(name, seed=len(name))
        write_tokenizer(place.dropin / name, added)
        put_in_memory(f"tokens/{name}", place.dropin / name)
    registry = place.open()
    for where in ("own", "memory://registry/tokens/own"):
        with pytest.raises(RequestError, match=r"'a' .* adds the token '<\|tool\|>' \(3\)") as refused:
            await registry.register(wanted("a", where))
        assert refused.value.field == "lora_path"
    assert await registry.look()
    assert registry.catalogue.entries.keys() == {"same"}
    assert "Adapter 'own' cannot be used: its tokenizer adds" in caplog.text
    await registry.register(wanted("far", "memory://registry/tokens/same"))
    assert registry.catalogue.entries.keys() == {"far", "same"}
    (stored,) = place.copies.iterdir()
    assert {file.name for file in stored.iterdir()} == {CONFIG_FILE, TENSOR_FILE}


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

    def fetch_late(self: AdapterSources, name: str, url: str, target: str, **rest: Any) -> None:
        assert may_end.wait(60)
        fetch(self, name, url, target, **rest)

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
