"""The scans of the drop-in folders: what is taken in, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.registry import Signature, signatures
from deployments.config import AdapterBase
from deployments.errors import UnavailableError
from deployments.registry.drop_ins import FIRST_WAIT_S, MAX_WAIT_S, DropIns
from tests.adapters.handmade import SHAPES, make_tensors, write


class Taken:
    """A drop-in folder, and what was taken in from it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: list[str] = []
        self.fault: Exception | None = None
        self.now_s = 0.0

    def put(self, name: str, seed: int = 0) -> None:
        write(self.root / name, tensors=make_tensors(seed=seed))

    def drop_ins(self) -> DropIns:
        base = AdapterBase(name="m", module_shapes=SHAPES, max_rank=16, watched=str(self.root))
        bases = [base, AdapterBase(name="unwatched", module_shapes={}, max_rank=16)]
        return DropIns(bases, self._take_in, clock=lambda: self.now_s)

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


async def test_what_there_is_no_room_for_is_told_of_once_and_tried_ever_more_seldom(
    taken: Taken, caplog: pytest.LogCaptureFixture
) -> None:
    """Each scan read all of it and filled the disk with it, and logged that."""
    taken.put("a")
    taken.fault = UnavailableError("The disk is full.", retry_after_s=5.0)
    drop_ins = taken.drop_ins()
    tried_s = []
    for now_s in range(300):
        taken.now_s = float(now_s)
        before = len(taken.names)
        await drop_ins.look()
        tried_s += [now_s] * (len(taken.names) - before)
    assert tried_s[:6] == [0, 1, 3, 7, 15, 31]
    assert tried_s[-1] - tried_s[-2] == MAX_WAIT_S
    assert [record.message for record in caplog.records] == [
        "drop-in folder: The disk is full. It is tried again until it can be loaded."
    ]
    # Other files are another chance, at once.
    num_tried = len(taken.names)
    taken.put("a", seed=1)
    await drop_ins.look()
    assert len(taken.names) == num_tried + 1
    taken.fault = None
    taken.now_s += FIRST_WAIT_S
    for _ in range(2):
        await drop_ins.look()
    assert len(taken.names) == num_tried + 2
    assert len(caplog.records) == 1
