"""The scans of the drop-in folders: what is taken in, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.registry import Signature, signatures
from deployments.config import AdapterBase
from deployments.registry.drop_ins import DropIns
from tests.adapters.handmade import SHAPES, make_tensors, write


class Taken:
    """A drop-in folder, and what was taken in from it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: list[str] = []
        self.fault: Exception | None = None

    def put(self, name: str, seed: int = 0) -> None:
        write(self.root / name, tensors=make_tensors(seed=seed))

    def drop_ins(self) -> DropIns:
        base = AdapterBase(name="m", module_shapes=SHAPES, max_rank=16, watched=str(self.root))
        return DropIns([base, AdapterBase(name="unwatched", module_shapes={}, max_rank=16)], self._take_in)

    async def _take_in(self, name: str, signature: Signature, base: AdapterBase) -> None:
        self.names.append(name)
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def taken(tmp_path: Path) -> Taken:
    return Taken(tmp_path)


async def test_what_is_new_or_put_back_is_taken_in_once(taken: Taken) -> None:
    taken.put("a")
    drop_ins = taken.drop_ins()
    drop_ins.know(signatures(str(taken.root)))
    taken.put("b")
    for _ in range(2):
        await drop_ins.look()
    assert taken.names == ["b"]
    (taken.root / "a").rename(taken.root / ".away")
    await drop_ins.look()
    (taken.root / ".away").rename(taken.root / "a")
    for _ in range(2):
        await drop_ins.look()
    assert taken.names == ["b", "a"]
