"""What the programs of one launch may do in any order: they run side by side, and only atomics order them.

    program 0    write x ── atomic add (release)
    program 1                       └─ atomic add (acquire) ── read x (ordered)
    program 2    read x: may come before the write, or after

The interpreter runs them one after the other, so that a program could rely on those before it and nothing would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.simulated_gpu.order import Block, Order, Stream

STEP = 2
"""Of an element, every second byte is marked: two accesses to the same one meet there, whatever its size."""
EPOCHS = 1 << 8
UNUSED = "it loads keys behind a row's own, and does not use them"
PADDING = "rows that pad a recorded step share a spare state, which nobody reads"
EXCUSED = {
    ("rope_attention_kernel", "reads", "written"): UNUSED,
    ("rope_attention_kernel", "writes", "read"): UNUSED,
    ("gated_delta_decode_kernel", "writes", "written"): PADDING,
    ("gated_delta_decode_kernel", "reads", "written"): PADDING,
    ("selective_decode_kernel", "writes", "written"): PADDING,
    ("selective_decode_kernel", "reads", "written"): PADDING,
    ("causal_conv_step_kernel", "writes", "written"): PADDING,
    ("causal_conv_step_kernel", "reads", "written"): PADDING,
}
"""(kernel, what it does, to what another has done) -> why the outcome does not matter."""


@dataclass(slots=True)
class Marks:
    """Who has accessed each byte of a block last: program * EPOCHS + epoch, 0 for nobody."""

    written: NDArray[np.int64]
    read: NDArray[np.int64]

    @classmethod
    def of(cls, block: Block) -> Marks:
        """Return the marks of a block that nobody has accessed."""
        num_bytes = block.end - block.start
        return cls(np.zeros(num_bytes, dtype=np.int64), np.zeros(num_bytes, dtype=np.int64))


@dataclass(slots=True)
class Programs:
    """The programs of all launches, numbered through; those of one launch may conflict.

    Attributes:
        overlaps: whether the launch may start before those before it have ended (`kernels.overlap`).
        has_waited, num_waited: the current program, and how many of the launch.
        first_by_stream: the first program that may not have ended when a launch on a stream starts.
        seen: of which epochs of each program of the launch the current program knows that they are over.
    """

    order: Order
    name: str = ""
    first: int = 1
    count: int = 0
    overlaps: bool = False
    has_waited: bool = True
    num_waited: int = 0
    first_by_stream: dict[int, int] = field(default_factory=dict)
    current: int = 0
    epoch: int = 0
    seen: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    released: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def launch(self, name: str, grid: Sequence[int], *, overlaps: bool) -> None:
        """Begin a launch, which may start before those before it on its stream have ended if it `overlaps` them."""
        self.first += self.count
        self.name, self.count = name, int(np.prod(grid))
        self.overlaps, self.num_waited = overlaps, 0
        self.released.clear()
        if not overlaps:
            self.first_by_stream[self.order.current.number] = self.first
        self.run(0)

    def end(self) -> None:
        """End a launch: if none of its programs waited, it may end before those that the next one relies on."""
        if self.overlaps and self.count and not self.num_waited:
            self.order.fault(f"no program of {self.name} waits")

    def end_all(self, stream: Stream) -> None:
        """Note that what comes on a stream next starts when all launches so far have ended."""
        self.first_by_stream[stream.number] = self.first + self.count

    def wait(self) -> None:
        """Have the current program wait for the launches before it."""
        self.has_waited = True
        self.num_waited += 1

    def run(self, number: int) -> None:
        """Begin a program."""
        self.has_waited = not self.overlaps
        self.current, self.epoch = self.first + number, 0
        self.seen = np.zeros(self.count, dtype=np.int64)

    def meet(self, address: int) -> None:
        """Acquire what others have released at an address, and release what is done."""
        mine = self.current - self.first
        known = self.released.get(address)
        if known is not None:
            self.seen = np.maximum(self.seen, known)
        self.epoch += 1
        self.seen[mine] = self.epoch
        self.released[address] = self.seen.copy()

    def access(self, block: Block, places: NDArray[np.int64], size: int, *, is_write: bool) -> None:
        """Check and note an access of the current program to elements of `size` bytes at byte offsets."""
        if block.marks is None:
            block.marks = Marks.of(block)
        marks = block.marks
        if not self.has_waited:
            self._check_early(marks.written[places] // EPOCHS, is_write=is_write)
        now = self.current * EPOCHS + min(self.epoch, EPOCHS - 1)
        for at in range(0, size, STEP):
            self._check(marks.written[places + at], is_write=is_write, was_write=True)
            if is_write:
                self._check(marks.read[places + at], is_write=True, was_write=False)
            (marks.written if is_write else marks.read)[places + at] = now

    def _check_early(self, writers: NDArray[np.int64], *, is_write: bool) -> None:
        first = self.first_by_stream.get(self.order.current.number, 1)
        if is_write or bool(((writers >= first) & (writers < self.first)).any()):
            self.order.fault(f"{self.name} {'writes' if is_write else 'reads what others write'} before it has waited")

    def _check(self, before: NDArray[np.int64], *, is_write: bool, was_write: bool) -> None:
        programs = before // EPOCHS - self.first
        others = (programs >= 0) & (programs != self.current - self.first)
        if not others.any():
            return
        programs, epochs = programs[others], before[others] % EPOCHS
        unordered = programs[self.seen[programs] <= epochs]
        does, did = ("writes" if is_write else "reads"), ("written" if was_write else "read")
        if len(unordered) and (self.name, does, did) not in EXCUSED:
            self.order.fault(
                f"program {self.current - self.first} of {self.name} {does} what program {unordered[0]} has {did}"
            )
