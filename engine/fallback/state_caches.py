"""Caches, by the methods of transformers' own, that note or hand out the states of layers.

A state has a fixed size for any sequence length: the last inputs of a convolution, and a matrix or vector per head
(Gu and Dao, 2023, Mamba, arXiv 2312.00752; Yang et al., 2024, gated delta networks, arXiv 2412.06464).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from engine.fallback.spec import StateForm, StateKey, StateKind
from kernels.state_rows import StateRows


class HeldStates(NamedTuple):
    """One state of all sequences, [any, ...], of which a step's rows have some: for kernels that find them."""

    states: torch.Tensor
    rows: StateRows

    def gathered(self) -> torch.Tensor:
        """Return a copy of the rows' states, zeros for those whose sequence begins."""
        found = self.states.index_select(0, self.rows.places)
        return found.masked_fill_(self.rows.are_new.view(-1, *[1] * (found.dim() - 1)), 0)

    def put(self, new: torch.Tensor) -> None:
        """Replace the rows' states."""
        self.states.index_copy_(0, self.rows.places, new.to(self.states.dtype))


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


class _Handed(_Cache, ABC):
    """A cache that hands out states of rows, which one module updates in place."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | HeldStates:
        return self._given(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | HeldStates:
        return self._given(StateKey(layer_idx, "recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        # Zeros at the start of a sequence.
        return True

    def update_conv_state(self, x: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        state = self._state(StateKey(layer_idx, "conv", state_idx))
        # Token-major, as the linear product returns it: transposing takes longer than the convolution.
        whole = torch.cat([state.transpose(1, 2), x.transpose(1, 2)], dim=1).transpose(1, 2)
        state.copy_(whole[..., -state.shape[-1] :])
        return whole

    def update_recurrent_state(
        self, new: torch.Tensor | HeldStates, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor | HeldStates:
        if isinstance(new, HeldStates):
            # A kernel has updated it.
            return new
        return self._state(StateKey(layer_idx, "recurrent", state_idx)).copy_(new)

    def _given(self, key: StateKey) -> torch.Tensor | HeldStates:
        return self._state(key)

    @abstractmethod
    def _state(self, key: StateKey) -> torch.Tensor:
        """Return a state of the rows, which may be changed."""


class StatesOfPart(_Handed):
    """The states of some rows that the host has found, by key [rows, ...].

    Attributes:
        asked_for: keys that the module has accessed; the layer may have states of other modules.
    """

    def __init__(self, states: Mapping[StateKey, torch.Tensor]) -> None:
        self._states = states
        self.asked_for: set[StateKey] = set()

    def _state(self, key: StateKey) -> torch.Tensor:
        self.asked_for.add(key)
        return self._states[key]


class StatesOfSingles(_Handed):
    """The states of a step's rows of one token each, which the device finds.

    The module gets a copy of a state, [rows, ...], and `put_back` writes it to its place.

    Args:
        states: of all sequences, by key [any, ...].
        direct: kinds of states that the module only passes on to our kernels; of these it gets `HeldStates`.
    """

    def __init__(
        self, states: Mapping[StateKey, torch.Tensor], rows: StateRows, direct: Collection[StateKind] = ()
    ) -> None:
        self._held_by_key = {key: HeldStates(state, rows) for key, state in states.items()}
        self._direct = direct
        self._copy_by_key: dict[StateKey, torch.Tensor] = {}

    def put_back(self) -> None:
        """Write what the module may have changed."""
        for key, state in self._copy_by_key.items():
            self._held_by_key[key].put(state)

    def _given(self, key: StateKey) -> torch.Tensor | HeldStates:
        return self._held_by_key[key] if key.kind in self._direct else self._state(key)

    def _state(self, key: StateKey) -> torch.Tensor:
        if key not in self._copy_by_key:
            self._copy_by_key[key] = self._held_by_key[key].gathered()
        return self._copy_by_key[key]
