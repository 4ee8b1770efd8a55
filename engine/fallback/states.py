"""Layers that keep a state instead of keys: what each row of a step has kept, and their modules called by rows.

A state is of one length whatever the text's: the last inputs of a convolution, and a matrix or vector for each head
(Gu and Dao, 2023, Mamba, arXiv 2312.00752; Yang et al., 2024, gated delta networks, arXiv 2412.06464). What a module
does with it is its own affair; it asks for it by the methods of transformers' caches, which is what is answered here.

    tokens   0 ........ D ............ D + n1
             [ D rows   )[ row of n1   )         the first at once, [D, 1, hidden]; the others each by itself
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from engine.fallback.spec import StateForm, StateKey
from engine.step import Snapshot, StateMoves
from kernels.arena import lazy_zeros

CACHE_NAMES = ("cache_params", "past_key_values")
"""By one of these a module is given a cache."""
NOTHING_KEPT: Mapping[int, Sequence[Snapshot]] = {}


class _Cache:
    """What modules ask a cache of transformers for."""

    def is_recording_past(self, layer_idx: int) -> bool:
        """No state is ever taken back."""
        return False


class NotedStates(_Cache):
    """Notes what is kept, of the first tokens of a text; `modules` are the names of those that keep it.

    Args:
        dtype: of the model.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.form_by_key: dict[StateKey, StateForm] = {}
        self.modules: list[str] = []
        self.module = ""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """There is none yet."""

    get_recurrent_state = get_conv_state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """There is none yet."""
        return False

    def update_conv_state(
        self, x: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        """Note how many of the last inputs, [1, channels, tokens], are kept."""
        width = x.shape[-1] if conv_kernel_size is None else conv_kernel_size
        self._note(StateKey(layer_idx, "conv", state_idx), (*x.shape[1:-1], width), x.dtype)
        return x

    def update_recurrent_state(self, state: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Note what is kept of a state [1, ...]."""
        self._note(StateKey(layer_idx, "recurrent", state_idx), tuple(state.shape[1:]), state.dtype)
        return state

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Leave keys and values to attention."""
        return key, value

    def _note(self, key: StateKey, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.form_by_key[key] = StateForm(shape, dtype is torch.float32 and dtype is not self._dtype)
        if self.module not in self.modules:
            self.modules.append(self.module)


class _Handed(_Cache):
    """The states of some rows, by key [rows, ...], given to one module and taken back changed.

    Attributes:
        asked_for: those that the module has asked for: a layer may have others, of other modules.
    """

    def __init__(self, states: Mapping[StateKey, torch.Tensor]) -> None:
        self._states = states
        self.asked_for: set[StateKey] = set()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self._state(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self._state(StateKey(layer_idx, "recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        # Zeros, where a text begins.
        return True

    def update_conv_state(self, x: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        state = self.get_conv_state(layer_idx, state_idx)
        if x.device.type == "cpu":
            # By tokens, as it comes of a product: to turn it takes longer than to convolve it.
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
    """The states of all rows of the engine, and those that are kept at the ends of prefixes.

    Args:
        dtype: of the model.
    """

    def __init__(
        self, form_by_key: Mapping[StateKey, StateForm], num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dtype, self._device = dtype, device
        self._form_by_key = form_by_key
        self._states = self._zeros(num_rows)
        self._kept: dict[int, dict[StateKey, torch.Tensor]] = {}

    def make_room(self, num_places: int) -> None:
        """Have room for so many states that are kept; there is none before."""
        self._kept = self._zeros(num_places)

    def begin(self, moves: StateMoves) -> None:
        """Have rows go on from states that were kept."""
        for layer, states in self._states.items():
            for key, state in states.items():
                for row, place in moves.begun:
                    state[row] = self._kept[layer][key][place]

    def call(
        self,
        module: Callable[..., torch.Tensor],
        layer: int,
        x: torch.Tensor,
        rows: Sequence[Sequence[int]],
        kept: Mapping[int, Sequence[Snapshot]] = NOTHING_KEPT,
    ) -> torch.Tensor:
        """Call a layer's module on each row with its state, and keep what that has become.

        Args:
            module: takes [rows, tokens, hidden] and a cache, and returns as much.
            x: [1, tokens, hidden].
            rows: as of `engine.attention.AttentionBatch`; those of one token come first.
            kept: by row what states are kept on the way, at which a row is computed in parts.
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
        # Those of the layer's other modules are elsewhere in the text.
        for _, place in snapshots:
            for key in keys:
                self._kept[layer][key][place] = self._states[layer][key][row]

    def _zeros(self, count: int) -> dict[int, dict[StateKey, torch.Tensor]]:
        zeros: dict[int, dict[StateKey, torch.Tensor]] = {}
        for key, form in self._form_by_key.items():
            shape, dtype = (count, *form.shape), torch.float32 if form.is_wide else self._dtype
            if count and self._device.type == "cpu":
                # Of the host's memory only those take some that are used.
                state = lazy_zeros(prod(shape), dtype).view(shape)
            else:
                state = torch.zeros(shape, dtype=dtype, device=self._device)
            zeros.setdefault(key.layer, {})[key] = state
        return zeros

    def _call(
        self, module: Callable[..., torch.Tensor], layer: int, x: torch.Tensor, rows: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, Iterable[StateKey]]:
        """Return what a module brings, and of which states it has asked."""
        held, first, last = self._states[layer], rows[0][3], rows[-1][3]
        # Side by side, as they mostly are, their states are changed where they lie.
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
    """Return by which name a module of a layer is given a cache, None for one that is not."""
    if not hasattr(module, "layer_idx"):
        return None
    return next((name for name in CACHE_NAMES if name in inspect.signature(module.forward).parameters), None)
