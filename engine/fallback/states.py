"""Recurrent states: stores them for each row of a step, and calls the modules that keep them row by row.

A state has a fixed size for any sequence length: the last inputs of a convolution, and a matrix or vector per head
(Gu and Dao, 2023, Mamba, arXiv 2312.00752; Yang et al., 2024, gated delta networks, arXiv 2412.06464). Modules access
their states through the methods of transformers' caches, which are implemented here.

    tokens   0 ........ D ............ D + n1
             [ D rows   )[ row of n1   )         the first in one call, [D, 1, hidden]; the others one by one
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from engine.fallback.spec import StateForm, StateKey
from engine.step import Snapshot, StateMoves
from kernels.arena import lazy_zeros

CACHE_NAMES = ("cache_params", "past_key_values")
"""Names of the `forward` argument that takes a cache."""
NOTHING_KEPT: Mapping[int, Sequence[Snapshot]] = {}


class SingleRows(NamedTuple):
    """The rows of a step with one token each, as the device knows them.

    Attributes:
        places: index of each row's states, int64 [rows].
        are_new: whether the token is a sequence's first, bool [rows].
    """

    places: torch.Tensor
    are_new: torch.Tensor


class _Cache:
    """Cache methods of transformers that do not depend on the states."""

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: states are never rolled back."""
        return False


class NotedStates(_Cache):
    """A cache that records which states modules keep when a sequence begins; `modules` has those modules' names.

    Args:
        dtype: of the model.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.form_by_key: dict[StateKey, StateForm] = {}
        self.modules: list[str] = []
        self.module = ""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: there is no state yet."""

    get_recurrent_state = get_conv_state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return False: there is no state yet."""
        return False

    def update_conv_state(
        self, x: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        """Record how many of the last inputs [1, channels, tokens] are kept."""
        width = x.shape[-1] if conv_kernel_size is None else conv_kernel_size
        self._note(StateKey(layer_idx, "conv", state_idx), (*x.shape[1:-1], width), x.dtype)
        return x

    def update_recurrent_state(self, state: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Record the shape and dtype of a state [1, ...]."""
        self._note(StateKey(layer_idx, "recurrent", state_idx), tuple(state.shape[1:]), state.dtype)
        return state

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values unchanged, for attention."""
        return key, value

    def _note(self, key: StateKey, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.form_by_key[key] = StateForm(shape, dtype is torch.float32 and dtype is not self._dtype)
        if self.module not in self.modules:
            self.modules.append(self.module)


class _Handed(_Cache):
    """A cache with the states of some rows, by key [rows, ...], which one module updates in place.

    Attributes:
        asked_for: keys that the module has accessed; the layer may have states of other modules.
    """

    def __init__(self, states: Mapping[StateKey, torch.Tensor]) -> None:
        self._states = states
        self.asked_for: set[StateKey] = set()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self._state(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self._state(StateKey(layer_idx, "recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        # Zeros at the start of a sequence.
        return True

    def update_conv_state(self, x: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        state = self.get_conv_state(layer_idx, state_idx)
        if x.device.type == "cpu":
            # Token-major, as the linear product returns it: transposing takes longer than the convolution.
            whole = torch.cat([state.transpose(1, 2), x.transpose(1, 2)], dim=1).transpose(1, 2)
        else:
            whole = torch.cat([state, x], dim=-1)
        state.copy_(whole[..., -state.shape[-1] :])
        return whole

    def update_recurrent_state(self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        return self.get_recurrent_state(layer_idx, state_idx).copy_(new)

    def _state(self, key: StateKey) -> torch.Tensor:
        self.asked_for.add(key)
        return self._states[key]


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

    def singles(self, rows: torch.Tensor) -> SingleRows:
        """Return rows of one token or none for `call_singles`; `rows` as in `engine.attention.AttentionBatch`."""
        _, starts, counts, places = rows.unbind(1)
        return SingleRows(places.masked_fill(counts == 0, self._spare), starts == 0)

    def call_singles(
        self, module: Callable[..., torch.Tensor], layer: int, x: torch.Tensor, rows: SingleRows
    ) -> torch.Tensor:
        """Call a layer's module on rows of one token, [1, rows, hidden], and update the states; can be recorded."""
        held = self._states[layer]
        states = {key: state.index_select(0, rows.places) for key, state in held.items()}
        for state in states.values():
            state.masked_fill_(rows.are_new.view(-1, *[1] * (state.dim() - 1)), 0)
        handed = _Handed(states)
        y = module(x.transpose(0, 1), handed)
        for key in handed.asked_for:
            held[key].index_copy_(0, rows.places, states[key])
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
            module: takes [rows, tokens, hidden] and a cache, and returns the same shape.
            x: [1, tokens, hidden].
            rows: as `engine.attention.AttentionBatch.rows`; those of one token come first.
            kept: the snapshots to take, by row; a longer row is split at their positions.
        """
        num_single = sum(count == 1 for _, _, count, _ in rows)
        parts = []
        if num_single:
            singles = rows[:num_single]
            y, keys = self._call(module, layer, x[0, :num_single].unsqueeze(1), singles)
            parts.append(y.transpose(0, 1))
            for *_, row in singles if kept else ():
                self._keep(layer, keys, row, kept.get(row, ()))
        for first, start, count, row in rows[num_single:]:
            stop, snapshots = start + count, kept.get(row, ())
            for position in [*(found.position for found in snapshots if found.position < stop), stop]:
                length = position - start
                part = [(first, start, length, row)]
                y, keys = self._call(module, layer, x[:, first : first + length], part)
                parts.append(y)
                self._keep(layer, keys, row, [found for found in snapshots if found.position == position])
                first, start = first + length, position
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
        places = slice(first, last + 1) if are_neighbours else torch.tensor([row for *_, row in rows], device=x.device)
        states = {key: state[places] for key, state in held.items()}
        for index, (_, start, _, _) in enumerate(rows):
            if not start:
                for state in states.values():
                    state[index] = 0
        handed = _Handed(states)
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
