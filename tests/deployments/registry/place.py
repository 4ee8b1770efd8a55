"""A registry's folders and stores, adapters that are declared, and damage done to them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from adapters.file_store import FileStore
from adapters.folder import CONFIG_FILE, TENSOR_FILE
from adapters.identity import AdapterRef
from adapters.registry import Signature, reference, signatures
from adapters.sources import AdapterSources
from adapters.store import AdapterStore
from deployments.config import AdapterBase
from deployments.registry.adapter_changes import Registration
from deployments.registry.adapter_registry import RegistryServer
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
        self.tokenizer: str | None = None
        self.max_versions = 64
        self.bases = ("m",)
        self.seen: dict[str, dict[str, Signature]] = {}

    def open(self) -> RegistryServer:
        if self.store is not None:
            self.store.close()
        self.store = AdapterStore(self.store_path, max_versions=self.max_versions)
        bases = [
            AdapterBase(
                name=name,
                module_shapes=SHAPES,
                max_rank=16,
                watched=str(self.dropin),
                allowed=self.allowed,
                tokenizer=self.tokenizer,
            )
            for name in self.bases
        ]
        bases.append(AdapterBase(name="other", module_shapes={}, max_rank=16))
        sources = AdapterSources(self.prefixes, max_bytes=MAX_SOURCE_BYTES, timeout_s=30.0)
        files = FileStore(str(self.copies))
        return RegistryServer(
            self.store, bases, files=files, sources=sources, cross_encoders=["judge"], seen_by_base=self.seen
        )

    def put(self, name: str, seed: int = 0) -> None:
        write(self.dropin / name, tensors=make_tensors(seed=seed))


def wanted(name: str, folder: str | None = None, *, replaces: bool = False) -> Registration:
    return Registration(name=name, place=folder or name, base="m", replaces=replaces)


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
