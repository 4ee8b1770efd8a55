"""An adapter that goes while it is asked for.

Unloaded, the stream that uses it ends as it began, and then the memory is free.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adapters.catalogue import AdapterEntry, AdapterVersion, Catalogue
from adapters.errors import AdapterUnavailableError
from adapters.host_cache import PASSING_S
from adapters.identity import AdapterRef
from adapters.loading import AdapterLoader
from adapters.registry import reference
from adapters.weights import AdapterWeights
from deployments.errors import UnavailableError
from deployments.gateway.gateway import Gateway
from deployments.generation_calls import GenerationResult
from deployments.replica import replica_server
from engine.decoder.reading import read_spec
from engine.errors import FailedAloneError
from tests.adapters.handmade import write
from tests.deployments.conftest import Serving
from tests.deployments.in_process import Judge, ask, events_of, text_of


def make_adapter(serving: Serving, folder: Path) -> tuple[Catalogue, dict[str, torch.Tensor]]:
    """Write the adapter `a` for the model that is served; return its name as gateways know it, and its tensors."""
    shapes = read_spec(serving.model.engine.model_path).module_shapes()
    tensors = {}
    for module, shape in shapes.items():
        if module.endswith("q_proj"):
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(4, shape[0])
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(shape[1], 4)
    ref = reference("a", write(folder, tensors=tensors))
    entry = AdapterEntry(
        name="a", base="chat", versions=(AdapterVersion(number=1, ref=ref, created_s=0),), split=((1, 100),)
    )
    return Catalogue(entries={"a": entry}), tensors


async def test_requests_for_an_adapter_whose_folder_is_gone_are_told_so(
    gateway: Callable[..., Awaitable[Gateway]], serving: Serving, tmp_path: Path
) -> None:
    catalogue, _ = make_adapter(serving, tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    opened = await gateway()
    opened.adapters.adopt(catalogue)
    with pytest.raises(FailedAloneError, match="Adapter 'a' cannot be used: its folder does not exist"):
        await events_of(opened, ask(model="a"))


async def test_files_that_cannot_be_had_now_are_worth_coming_back_for(
    gateway: Callable[..., Awaitable[Gateway]], serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue, _ = make_adapter(serving, tmp_path / "a")
    opened = await gateway()
    opened.adapters.adopt(catalogue)

    def far(_: object, ref: AdapterRef) -> AdapterWeights:
        raise AdapterUnavailableError(ref.name, "its files are on another node, which does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(AdapterLoader, "load", far)
        with pytest.raises(UnavailableError, match="which does not answer") as raised:
            await events_of(opened, ask(model="a"))
    assert raised.value.retry_after_s >= PASSING_S
    await asyncio.sleep(PASSING_S)
    assert text_of(await events_of(opened, ask(model="a")))


async def test_unloading_waits_for_who_uses_it_and_changes_nothing_for_him(
    gateway: Callable[..., Awaitable[Gateway]], serving: Serving, tmp_path: Path
) -> None:
    catalogue, tensors = make_adapter(serving, tmp_path / "a")
    ref = catalogue.entries["a"].versions[0].ref
    opened = await gateway()
    opened.adapters.adopt(catalogue)
    request = ask(model="a", max_tokens=60)
    expected = text_of(await events_of(opened, request))
    assert expected != text_of(await events_of(opened, ask(max_tokens=60)))

    engine, server = serving.replicas.engine, serving.replicas.server
    engine.hold_after_steps = engine.snapshot().num_steps + 10
    stream = asyncio.create_task(events_of(opened, request))
    while not engine.snapshot().num_running:
        await asyncio.sleep(0.001)
    release = asyncio.create_task(server.release_adapter(ref.digest))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not release.done()
    assert ref.digest in engine.adapters.places()
    engine.release()
    assert text_of(await stream) == expected
    assert await release >= sum(tensor.nbytes for tensor in tensors.values())
    assert engine.adapters.places() == {}


async def test_what_is_repaired_is_served_at_once(
    gateway: Callable[..., Awaitable[Gateway]], serving: Serving, tmp_path: Path
) -> None:
    catalogue, _ = make_adapter(serving, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "away")
    opened = await gateway()
    opened.adapters.adopt(catalogue)
    with pytest.raises(FailedAloneError, match="its folder does not exist"):
        await events_of(opened, ask(model="a"))
    (tmp_path / "away").rename(tmp_path / "a")
    await serving.replicas.server.retry_adapter(catalogue.entries["a"].versions[0].ref.digest)
    assert text_of(await events_of(opened, ask(model="a")))


async def test_a_replica_tells_which_are_used_and_which_are_waited_for(
    gateway: Callable[..., Awaitable[Gateway]], serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue, _ = make_adapter(serving, tmp_path / "a")
    opened = await gateway()
    opened.adapters.adopt(catalogue)
    engine, server = serving.replicas.engine, serving.replicas.server
    may_load, load = threading.Event(), AdapterLoader.load

    def load_later(loader: AdapterLoader, ref: AdapterRef) -> AdapterWeights:
        may_load.wait(60)
        return load(loader, ref)

    monkeypatch.setattr(AdapterLoader, "load", load_later)
    engine.hold_after_steps = engine.snapshot().num_steps + 10
    stream = asyncio.create_task(events_of(opened, ask(model="a", max_tokens=60)))
    await until(lambda: len(server._generations) == 1)
    assert server.adapters_in_use() == (frozenset(), {"a"})
    may_load.set()
    await until(lambda: server.adapters_in_use() == ({"a"}, frozenset()))
    engine.release()
    assert text_of(await stream)
    assert server.adapters_in_use() == (frozenset(), frozenset())


async def test_unloading_waits_for_who_is_about_to_use_it(
    gateway: Callable[..., Awaitable[Gateway]], serving: Serving, tmp_path: Path
) -> None:
    """While the classifier had it, no replica knew of it: it came to one that had no files any more, and got a 500."""
    catalogue, _ = make_adapter(serving, tmp_path / "a")
    ref = catalogue.entries["a"].versions[0].ref
    judge = Judge()
    opened = await gateway(judge=judge)
    opened.adapters.adopt(catalogue)
    judge.gate.clear()
    asked = asyncio.create_task(events_of(opened, ask(model="a")))
    unused = asyncio.create_task(opened.until_unused(ref.digest))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not unused.done()
    judge.gate.set()
    assert text_of(await asked)
    await unused


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.001)


async def test_unloading_does_not_wait_for_who_has_left(
    gateway: Callable[..., Awaitable[Gateway]], serving: Serving, tmp_path: Path
) -> None:
    """It waited for an answer that nobody would ever end, for as long as an unload may wait."""
    catalogue, _ = make_adapter(serving, tmp_path / "a")
    ref = catalogue.entries["a"].versions[0].ref
    opened = await gateway()
    opened.adapters.adopt(catalogue)
    engine, server = serving.replicas.engine, serving.replicas.server
    engine.hold_after_steps = engine.snapshot().num_steps + 10
    stream = asyncio.create_task(events_of(opened, ask(model="a", max_tokens=60)))
    await until(lambda: engine.snapshot().num_running > 0)
    release = asyncio.create_task(server.release_adapter(ref.digest))
    await asyncio.sleep(0)
    stream.cancel()
    async with asyncio.timeout(60):
        assert await release > 0
    assert engine.adapters.places() == {}


async def test_unloading_does_not_wait_for_those_who_ask_after_it_was_loaded_again(
    gateway: Callable[..., Awaitable[Gateway]],
    serving: Serving,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While somebody always asked for it, the unload did not end."""
    monkeypatch.setattr(replica_server, "SETTLE_S", 0.0)
    catalogue, _ = make_adapter(serving, tmp_path / "a")
    ref = catalogue.entries["a"].versions[0].ref
    opened = await gateway()
    opened.adapters.adopt(catalogue)
    request = ask(model="a", max_tokens=60)
    expected = text_of(await events_of(opened, request))
    engine, server = serving.replicas.engine, serving.replicas.server
    engine.hold_after_steps = engine.snapshot().num_steps + 10
    streams = [asyncio.create_task(events_of(opened, request))]
    await until(lambda: engine.snapshot().num_running > 0)
    release = asyncio.create_task(server.release_adapter(ref.digest))
    await asyncio.sleep(0)
    streams.append(asyncio.create_task(events_of(opened, replace(request, request_id="later"))))
    await until(lambda: len(server._generations) == 2)
    first = next(iter(server._generations.values()))
    server._end(first, GenerationResult())
    async with asyncio.timeout(60):
        assert await release == 0
    assert ref.digest in engine.adapters.places()
    engine.release()
    assert text_of(await streams[1]) == expected
    streams[0].cancel()


async def test_a_call_that_fails_as_it_is_taken_does_not_keep_its_adapter(
    gateway: Callable[..., Awaitable[Gateway]], serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generation stayed open for ever, and so did the adapter's unloading."""

    def fail(request: object) -> None:
        raise ZeroDivisionError

    catalogue, _ = make_adapter(serving, tmp_path / "a")
    opened = await gateway()
    opened.adapters.adopt(catalogue)
    await events_of(opened, ask(model="a"))
    call, server = serving.replicas.calls[-1], serving.replicas.server
    assert call.adapter is not None
    monkeypatch.setattr(serving.replicas.engine, "add", fail)
    with pytest.raises(ZeroDivisionError):
        await anext(aiter(server.generate_stream(call)))
    assert await asyncio.wait_for(server.release_adapter(call.adapter.digest), 20) > 0
