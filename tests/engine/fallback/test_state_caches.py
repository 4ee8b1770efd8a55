"""What modules get of the states that are held, and what is held after they have changed it."""

from __future__ import annotations

import torch

from engine.fallback.spec import StateForm, StateKey
from engine.fallback.state_caches import HeldStates, NotedStates, StatesOfSingles
from kernels.state_rows import StateRows

CONV, SUM = StateKey(3, "conv", 0), StateKey(3, "recurrent", 0)
ROWS = StateRows(torch.tensor([2, 0]), torch.tensor([False, True]))


def held() -> dict[StateKey, torch.Tensor]:
    return {CONV: torch.ones(4, 2, 3), SUM: torch.ones(4, 2)}


def test_shapes_and_types_are_noted_with_the_modules_that_keep_them() -> None:
    noted = NotedStates(torch.bfloat16)
    noted.module = "layers.3.mixer"
    x = torch.empty(1, 2, 8, dtype=torch.bfloat16, device="meta")
    assert noted.update_conv_state(x, 3, conv_kernel_size=3) is x
    noted.update_recurrent_state(torch.empty(1, 2, device="meta"), layer_idx=3)
    noted.module = "layers.4.conv"
    noted.update_conv_state(x, 4)
    forms = {CONV: StateForm((2, 3), is_wide=False), SUM: StateForm((2,), is_wide=True)}
    assert noted.form_by_key == forms | {StateKey(4, "conv", 0): StateForm((2, 8), is_wide=False)}
    assert noted.modules == ["layers.3.mixer", "layers.4.conv"]
    assert noted.get_conv_state(3) is None
    assert noted.get_recurrent_state(3) is None


def test_a_copy_is_written_back_and_begins_with_zeros() -> None:
    states = held()
    cache = StatesOfSingles(states, ROWS)
    state = cache.get_recurrent_state(3)
    assert torch.equal(state, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    cache.update_recurrent_state(state + 5, 3)
    cache.put_back()
    assert torch.equal(states[SUM], torch.tensor([[5.0, 5.0], [1.0, 1.0], [6.0, 6.0], [1.0, 1.0]]))
    # Nobody has asked for it.
    assert torch.equal(states[CONV], held()[CONV])


def test_what_is_only_passed_on_is_given_as_it_is_held() -> None:
    states = held()
    cache = StatesOfSingles(states, ROWS, {"recurrent"})
    state = cache.get_recurrent_state(3)
    assert isinstance(state, HeldStates)
    assert state.states is states[SUM]
    assert cache.update_recurrent_state(state, 3) is state
    assert isinstance(cache.get_conv_state(3), torch.Tensor)
    cache.put_back()
    assert torch.equal(states[SUM], held()[SUM])


def test_what_transformers_computed_after_all_is_written_back_too() -> None:
    states = held()
    cache = StatesOfSingles(states, ROWS, {"recurrent"})
    state = cache.get_recurrent_state(3)
    cache.update_recurrent_state(state.gathered() + 5, 3)
    cache.put_back()
    assert torch.equal(states[SUM][[2, 0]], torch.tensor([[6.0, 6.0], [5.0, 5.0]]))
