"""Recurrent states: stores them for each row of a step, and calls the modules that keep them row by row.

tokens   0 ........ D ............ D + n1
         [ D rows   )[ row of n1   )         the first in one call, [D, 1, hidden]; the others one by one
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import prod

import torch

from engine.fallback.spec import StateForm, StateKey, StateKind
from engine.fallback.state_caches import StatesOfPart, StatesOfSingles
from engine.placing import placed
from engine.step import Snapshot, StateMoves
from kernels.arena import lazy_zeros
from kernels.state_rows import StateRows

CACHE_NAMES = ("cache", "cache_params", "past_key_values")
"""Names of the `forward` argument that takes a cache: the first since transformers 5.24, the others before it."""
NOTHING_KEPT: Mapping[int, Sequence[Snapshot]] = {}


class RowStates:
    """The states of all rows of the engine, and snapshots of states at the ends of cached prefixes.

    Args:
        dtype: of the model.
    """

    def __init__(
        self, form_by_key: Mapping[StateKey, StateForm], num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dtype, self._device = dtype, device
        self._form_by_key = form_by_key
        # The last one is that of all rows that pad a recorded step.
        self._states = self._zeros(num_rows + 1)
        self._spare = num_rows
        self._kept: dict[int, dict[StateKey, torch.Tensor]] = {}

    def make_room(self, num_places: int) -> None:
        """Allocate `num_places` snapshots; until then there are none."""
        self._kept = self._zeros(num_places)

    def begin(self, moves: StateMoves) -> None:
        """Restore rows from the snapshots that they continue from."""
        for layer, states in self._states.items():
            for key, state in states.items():
                for row, place in moves.begun:
                    state[row] = self._kept[layer][key][place]

    def keep(self, kept: Mapping[int, Sequence[Snapshot]]) -> None:
        """Take snapshots of rows as they are."""
        for layer, states in self._states.items():
            for row, snapshots in kept.items():
                self._keep(layer, states, row, snapshots)

    def singles(self, rows: torch.Tensor) -> StateRows:
        """Return rows of one token or none for `call_singles`; `rows` as in `engine.attention.AttentionBatch`."""
        _, starts, counts, places = rows.unbind(1)
        return StateRows(places.masked_fill(counts == 0, self._spare), starts == 0)

    def call_singles(
        self,
        module: Callable[..., torch.Tensor],
        layer: int,
        x: torch.Tensor,
        rows: StateRows,
        direct: Collection[StateKind] = (),
    ) -> torch.Tensor:
        """Call a layer's module on rows of one token, [1, rows, hidden], and update the states; can be recorded.

        Args:
            direct: as in `StatesOfSingles`.
        """
        handed = StatesOfSingles(self._states[layer], rows, direct)
        y = module(x.transpose(0, 1), handed)
        handed.put_back()
        return y.transpose(0, 1)

    def call(
        self,
        module: Callable[..., torch.Tensor],
        layer: int,
        x: torch.Tensor,
        rows: Sequence[Sequence[int]],
        kept: Mapping[int, Sequence[Snapshot]] = NOTHING_KEPT,
    ) -> torch.Tensor:
        """Call a layer's module on each row with its state, update the states and take snapshots.

        Args:
            module: takes [rows, tokens, hidden], a cache, and which of the step's tokens these are, as `start` and
                `end`; returns the same shape.
            x: [1, tokens, hidden].
            rows: as `engine.attention.AttentionBatch.rows`; those of one token come first.
            kept: the snapshots to take, by row; a longer row is split at their positions.
        """
        num_single = sum(count == 1 for _, _, count, _ in rows)
        parts = []
        if num_single:
            singles = rows[:num_single]
            y, keys = self._call(
                partial(module, start=0, end=num_single), layer, x[0, :num_single].unsqueeze(1), singles
            )
            parts.append(y.transpose(0, 1))
            for *_, row in singles if kept else ():
                self._keep(layer, keys, row, kept.get(row, ()))
        for first, start, count, row in rows[num_single:]:
            stop, snapshots = start + count, kept.get(row, ())
            for position in [*(found.position for found in snapshots if found.position < stop), stop]:
                length = position - start
                last, part = first + length, [(first, start, length, row)]
                y, keys = self._call(partial(module, start=first, end=last), layer, x[:, first:last], part)
                parts.append(y)
                self._keep(layer, keys, row, [found for found in snapshots if found.position == position])
                first, start = last, position
        return torch.cat(parts, dim=1)

    def _keep(self, layer: int, keys: Iterable[StateKey], row: int, snapshots: Sequence[Snapshot]) -> None:
        # Not the states of the layer's other modules, which are at other positions.
        for _, place in snapshots:
            for key in keys:
                self._kept[layer][key][place] = self._states[layer][key][row]

    def _zeros(self, count: int) -> dict[int, dict[StateKey, torch.Tensor]]:
        zeros: dict[int, dict[StateKey, torch.Tensor]] = {}
        for key, form in self._form_by_key.items():
            shape, dtype = (count, *form.shape), torch.float32 if form.is_wide else self._dtype
            if count and self._device.type == "cpu":
                # Host memory is taken only by rows that are used.
                state = lazy_zeros(prod(shape), dtype).view(shape)
            else:
                state = torch.zeros(shape, dtype=dtype, device=self._device)
            zeros.setdefault(key.layer, {})[key] = state
        return zeros

    def _call(
        self, module: Callable[..., torch.Tensor], layer: int, x: torch.Tensor, rows: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, Iterable[StateKey]]:
        """Return a module's output and the keys of the states that it accessed."""
        held, first, last = self._states[layer], rows[0][3], rows[-1][3]
        # Adjacent rows, the usual case, have their states updated in place.
        are_neighbours = [row for _, _, _, row in rows] == list(range(first, last + 1))
        places = slice(first, last + 1) if are_neighbours else placed([row for *_, row in rows], x.device)
        states = {key: state[places] for key, state in held.items()}
        for index, (_, start, _, _) in enumerate(rows):
            if not start:
                for state in states.values():
                    state[index] = 0
        handed = StatesOfPart(states)
        y = module(x, handed)
        if not are_neighbours:
            for key, state in states.items():
                held[key][places] = state
        return y, handed.asked_for


def cache_name(module: torch.nn.Module) -> str | None:
    """Return the name of a module's cache argument, None if it takes no cache."""
    if not hasattr(module, "layer_idx"):
        return None
    return next((name for name in CACHE_NAMES if name in inspect.signature(module.forward).parameters), None)
