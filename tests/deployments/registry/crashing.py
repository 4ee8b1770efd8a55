"""Kills a registry before each thing that it writes, and looks at what the next one finds; a program of its own.

A process that forks has to be one without threads, which that of the tests is not.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from adapters.file_store import FileStore
from adapters.registry import reference
from deployments.registry.adapter_registry import RegistryServer
from tests.adapters.handmade import make_tensors, write
from tests.deployments.registry.place import Place, wanted

KILLED = 9
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
_FOR_WRITING = frozenset("wxa+")


async def free(registry: RegistryServer) -> None:
    """What the actor does for contents that nobody uses, once the replicas have let go of them."""
    await registry.discard([ref for _, ref in registry.take_displaced()])


async def start(place: Place) -> RegistryServer:
    """What the actor does as it starts."""
    FileStore(str(place.copies)).clear()
    registry = place.open()
    await registry.declare({"m": [reference("d", str(place.dropin / "d"))]}, "1")
    await free(registry)
    return registry


async def live(place: Place, step: Callable[[str], None], done: Callable[[str], object]) -> None:
    """Change names in every way; `step` is told of what is about to be written, `done` of what was answered."""
    registry = await start(place)
    assert place.store is not None
    place.store._database.set_trace_callback(step)
    await registry.register(wanted("x", "a"))
    done("x is there")
    await registry.register(wanted("x", "b", replaces=True))
    await registry.route("x", {1: 50, 2: 50})
    await registry.register(wanted("y", "a"))
    await registry.discard([ref for _, ref in await registry.unregister("x", 2)])
    await registry.look()
    done("x is going")
    await registry.discard([ref for _, ref in await registry.unregister("x")])
    done("x is gone")
    await registry.discard([ref for _, ref in await registry.unregister("y")])


async def check(place: Place, done: list[str]) -> None:
    """What was answered holds, every name can be served, nothing lies about, and life goes on."""
    registry = await start(place)
    await registry.look()
    entries = registry.catalogue.entries
    own = set()
    for entry in entries.values():
        assert sum(percent for _, percent in entry.split) == 100, entry
        for version in entry.versions:
            assert reference("q", version.ref.path).digest == version.ref.digest, entry
            if version.ref.path.startswith(os.path.realpath(place.copies)):
                own.add(version.ref.digest)
    assert {path.name for path in place.copies.iterdir()} == own
    assert entries.keys() >= ({"a", "b", "d", "x"} if done[-1:] == ["x is there"] else {"a", "b", "d"})
    assert "x is gone" not in done or "x" not in entries
    await registry.register(wanted("z", "a"))
    assert place.store is not None
    place.store.close()


def run_until(place: Place, number: int, told: int) -> None:
    """Live until the `number`-th thing is about to be written; a child's main, which never returns."""
    steps = count(1)

    def step(what: object) -> None:
        if next(steps) == number:
            os._exit(KILLED)

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if event in _CHANGES or (event == "open" and not _FOR_WRITING.isdisjoint(str(arguments[1]))):
            step(event)

    sys.addaudithook(audit)
    try:
        asyncio.run(live(place, step, lambda what: os.write(told, f"{what}\n".encode())))
        os._exit(0)
    finally:
        traceback.print_exc()
        os._exit(1)


def places(folder: Path) -> Iterator[Place]:
    """Yield drop-in folders with three adapters."""
    for number in count(1):
        own = folder / str(number)
        own.mkdir()
        place = Place(own)
        for seed, name in enumerate("abd"):
            write(place.dropin / name, tensors=make_tensors(seed=seed))
        yield place


def main() -> None:
    """Die at every step; print how many there were."""
    # In memory where there is such a folder: a kill is no failure of power, and disks take their time.
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        for number, place in enumerate(places(Path(folder)), start=1):
            reading, told = os.pipe()
            child = os.fork()
            if child == 0:
                run_until(place, number, told)
            os.close(told)
            with open(reading) as answers:
                done = answers.read().splitlines()
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code in (0, KILLED), code
            asyncio.run(check(place, done))
            if code == 0:
                print(number - 1)
                return


if __name__ == "__main__":
    main()
