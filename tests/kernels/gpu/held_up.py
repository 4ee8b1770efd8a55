"""Holds the programs of an interpreted kernel up, which cannot begin before the one before has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Before:
    """The kernel before at its slowest: what it writes is NaN until a program waits, in each program anew."""

    def __init__(self) -> None:
        self._written: tuple[torch.Tensor, ...] = ()
        self._late: list[torch.Tensor] | None = None

    @contextmanager
    def writes(self, *numbers: torch.Tensor) -> Iterator[None]:
        """Take these for what the kernel before writes."""
        self._written = numbers
        yield
        assert self._late is None, "a program ended without waiting"

    def let_begin(self, _: object) -> None:
        """Begin a program."""
        assert self._late is None, "a program ended without waiting"
        self._late = [numbers.clone() for numbers in self._written]
        for numbers in self._written:
            numbers.fill_(torch.nan)

    def wait(self, _: object) -> None:
        """End the kernel before."""
        for numbers, late in zip(self._written, self._late or self._written, strict=True):
            numbers.copy_(late)
        self._late = None
