"""Leaves rotary embeddings to the attention kernel, which rotates queries and keys as it writes them to the cache.

Most architectures call one global function, `apply_rotary_pos_emb`, just before attention. A trace (`NotedRotations`)
shows in which modules attention gets exactly what it returns; there `LaterRotations` returns queries and keys as they
are, and attention asks for the angles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from engine.fallback.rebinding import rebound
from kernels.rope_kv_write.reference import rotate

FUNCTION = "apply_rotary_pos_emb"
STILL = (1.0, 0.0)
"""Cosine and sine of what does not rotate."""


class Rotation(NamedTuple):
    """Which module rotates, and how many leading dimensions of a head."""

    module: str
    dim: int


class NotedRotations:
    """Notes what a traced model rotates: half by half (`kernels.rope_kv_write`), with angles of the model's dtype."""

    def __init__(self) -> None:
        self._turned: tuple[Rotation, torch.Tensor, torch.Tensor] | None = None

    def watch(self, name: str, module: torch.nn.Module) -> None:
        """Make a module note its rotations; modifies its `forward`."""
        forward, replaced = rebound(module, {FUNCTION: partial(self._note, name)})
        if replaced:
            module.forward = forward

    def of(self, query: torch.Tensor, key: torch.Tensor) -> Rotation | None:
        """Return the last rotation if these are its results."""
        turned, self._turned = self._turned, None
        return turned[0] if turned is not None and turned[1] is query and turned[2] is key else None

    def _note(self, name: str, theirs: Callable[..., Any], *arguments: Any, **told: Any) -> Any:
        result = theirs(*arguments, **told)
        if len(arguments) == 4 and not told and all(isinstance(part, torch.Tensor) for part in arguments):
            query, key, cos, sin = arguments
            head_dim, dim = query.shape[-1], cos.shape[-1]
            is_plain = cos.shape == sin.shape and cos.dtype is sin.dtype is query.dtype is key.dtype
            # The fraction is what a `RopeSpec` holds.
            fits = key.shape[-1] == head_dim and int(head_dim * (dim / head_dim)) == dim and dim % 2 == 0
            if is_plain and fits and _rotates_halves(theirs, head_dim, dim):
                self._turned = Rotation(name, dim), *result
        return result


class LaterRotations:
    """Passes the angles of rotations that are put off to the attention that follows, in one step after another."""

    def __init__(self) -> None:
        self._is_wanted = False
        self._put_off: tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._tables: list[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]] = []

    def put_off(self, module: torch.nn.Module) -> None:
        """Make a module leave its rotations to attention while `begin` says so."""
        module.forward, _ = rebound(module, {FUNCTION: self._turn})

    def begin(self) -> None:
        """Begin a step: from now on rotations are put off."""
        self._is_wanted = True

    def end(self) -> None:
        """End the step, whether it succeeded or not."""
        self._is_wanted, self._put_off = False, None
        self._tables.clear()

    def table(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        """Return the cosines and sines [tokens, 2, head_dim] of what attention gets; None if it is to stay as it is."""
        if self._put_off is None:
            return None
        (own_query, own_key, angles), self._put_off = self._put_off, None
        assert own_query is query, "a query was put off, and another one attends"
        assert own_key is key, "a key was put off, and another one is attended to"
        for known, table in self._tables:
            if known[0] is angles[0] and known[1] is angles[1] and table.shape[-1] == key.shape[-1]:
                return table
        table = _table(angles, key.shape[-1])
        self._tables.append((angles, table))
        return table

    def _turn(
        self,
        theirs: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._is_wanted:
            return theirs(query, key, cos, sin)
        self._put_off = query, key, (cos, sin)
        return query, key


def _rotates_halves(theirs: Callable[..., Any], head_dim: int, dim: int) -> bool:
    """Try the function on a few numbers; it may expect them in another shape."""
    numbers = torch.Generator().manual_seed(1)
    query, key, cos, sin = (
        torch.randn(1, *shape, generator=numbers) for shape in ((2, 3, head_dim), (1, 3, head_dim), (3, dim), (3, dim))
    )
    table = _table((cos, sin), head_dim)
    expected = [rotate(part[0].transpose(0, 1), table, dim).transpose(0, 1).unsqueeze(0) for part in (query, key)]
    try:
        found = theirs(query, key, cos, sin)
        return all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(found, expected, strict=True))
    except (RuntimeError, TypeError, ValueError):
        return False


def _table(angles: tuple[torch.Tensor, torch.Tensor], head_dim: int) -> torch.Tensor:
    """Return cosines and sines, each [1, tokens, rotated dimensions], as `kernels.rope_kv_write` takes them.

    That is [tokens, 2, head_dim].
    """
    room = head_dim - angles[0].shape[-1]
    parts = (functional.pad(part[0], (0, room), value=still) for part, still in zip(angles, STILL, strict=True))
    return torch.stack(tuple(parts), dim=1)
