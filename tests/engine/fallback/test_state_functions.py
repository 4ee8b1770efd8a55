"""Our kernels in the place of transformers' functions: the same numbers, and theirs for what ours do not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from engine.cpu.called_backend import CalledBackend
from engine.fallback.state_caches import HeldStates
from engine.fallback.state_functions import state_functions
from kernels.program import Pool
from kernels.state_rows import StateRows
from tests.kernels.conftest import assert_near, pool

__all__ = ["pool"]

RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")

pytestmark = pytest.mark.skipif(
    not all(hasattr(theirs, name) for name in (*RULES, *CONVOLUTIONS)),
    reason="this transformers has other names for it",
)


def functions(pool: Pool) -> dict[str, Callable[..., Any]]:
    """Ours, by the names of those of transformers."""
    return state_functions(CalledBackend(pool, torch.float32).state_kernels())


def refused(*_: Any, **__: Any) -> None:
    raise AssertionError("the function of transformers is called")


def rule_inputs(dtype: torch.dtype, tokens: int, rows: int = 1, key_dim: int = 32) -> dict[str, Any]:
    torch.manual_seed(5)
    # As a convolution leaves them: of each channel all tokens together.
    mixed = torch.randn(rows, 2 * 2 * key_dim + 4 * 16, tokens).to(dtype).transpose(1, 2)
    query, key, value = mixed.split((2 * key_dim, 2 * key_dim, 64), dim=-1)
    return {
        "query": query.unflatten(-1, (2, key_dim)),
        "key": key.unflatten(-1, (2, key_dim)),
        "value": value.unflatten(-1, (4, 16)),
        "g": -torch.rand(rows, tokens, 4),
        "beta": torch.rand(rows, tokens, 4).to(dtype),
        "initial_state": torch.randn(rows, 4, key_dim, 16),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": None,
    }


def called(function: Callable[..., Any], told: dict[str, Any]) -> Any:
    told = {name: value.clone() if name == "initial_state" else value for name, value in told.items()}
    parts = [told.pop(name) for name in ("query", "key", "value")]
    return function(*parts, **told)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (1, 3), (70, 1), (5, 2)])
def test_the_rule_is_that_of_transformers(pool: Pool, name: str, tokens: int, rows: int) -> None:
    told = rule_inputs(torch.float32, tokens, rows)
    out, state = called(lambda *parts, **rest: functions(pool)[name](refused, *parts, **rest), told)
    expected, kept = called(getattr(theirs, name), told)
    assert_near(out, expected)
    assert_near(state, kept)


def test_the_state_that_is_given_is_changed(pool: Pool) -> None:
    told = rule_inputs(torch.bfloat16, 3)
    given = told["initial_state"]
    before = given.clone()
    rule, parts = functions(pool)[RULES[0]], [told.pop(name) for name in ("query", "key", "value")]
    out, state = rule(refused, *parts, **told)
    assert state is given
    assert not torch.equal(given, before)
    assert out.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "change",
    [
        {"initial_state": None},
        {"initial_state": torch.zeros(1, 4, 32, 16).double()},
        {"initial_state": torch.zeros(1, 4, 16, 32).transpose(2, 3)},
        {"output_final_state": False},
        {"use_qk_l2norm_in_kernel": False},
        {"cu_seqlens": torch.tensor([0, 7])},
        rule_inputs(torch.float64, 7),
        rule_inputs(torch.float32, 7, key_dim=24),
        rule_inputs(torch.float32, 7, key_dim=272),
    ],
)
def test_what_the_kernel_does_not_know_transformers_computes(pool: Pool, change: dict[str, Any]) -> None:
    told = rule_inputs(torch.float32, 7) | change
    seen: list[dict[str, Any]] = []

    def noted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **rest: Any) -> tuple[str, str]:
        seen.append({"query": query, "key": key, "value": value, **rest})
        return "their", "answer"

    rest = told.copy()
    parts = [rest.pop(name) for name in ("query", "key", "value")]
    assert functions(pool)[RULES[0]](noted, *parts, **rest) == ("their", "answer")
    assert all(seen[0][name] is value for name, value in told.items())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_convolutions_are_those_of_transformers(
    pool: Pool, rows: int, has_bias: bool, activation: str | None
) -> None:
    torch.manual_seed(5)
    text, state, weight = torch.randn(rows, 48, 9), torch.randn(rows, 48, 4), torch.randn(48, 4)
    bias = torch.randn(48) if has_bias else None
    whole, update = (functions(pool)[name] for name in CONVOLUTIONS)
    found = whole(refused, text, weight, bias, activation=activation)
    assert_near(found, theirs.causal_conv1d_fn(text, weight, bias, activation=activation))
    same, token = state.clone(), text[..., :1]
    expected = theirs.causal_conv1d_update(token, same, weight, bias, activation)
    assert_near(update(refused, token, state, weight, bias, activation), expected)
    assert torch.equal(state, same)


def test_other_convolutions_transformers_computes(pool: Pool) -> None:
    whole, update = (functions(pool)[name] for name in CONVOLUTIONS)
    text, state, weight = torch.randn(1, 48, 9), torch.randn(1, 48, 4), torch.randn(48, 4)

    def noted(*_: Any, **__: Any) -> str:
        return "theirs"

    assert whole(noted, text, weight, activation="gelu") == "theirs"
    assert whole(noted, text, weight, activation="silu", seq_idx=torch.zeros(1, 9)) == "theirs"
    assert whole(noted, text.double(), weight, activation="silu") == "theirs"
    assert whole(noted, text[:, :40], weight[:40], activation="silu") == "theirs"
    assert whole(noted, text, torch.randn(48, 9), activation="silu") == "theirs"
    assert update(noted, text[..., :1], state, weight, activation="gelu") == "theirs"
    assert update(noted, text[..., :1], state[..., :3], weight, activation="silu") == "theirs"
    assert update(noted, text[..., :1], state.double(), weight, activation="silu") == "theirs"


HELD = StateRows(torch.tensor([2, 0]), torch.tensor([False, True]))


def test_of_states_that_are_held_transformers_gets_copies(pool: Pool) -> None:
    """For what the kernel does not know; what has become of them is held then."""
    told = rule_inputs(torch.float32, 1, rows=2, key_dim=24)
    held = HeldStates(torch.randn(4, 4, 24, 16), HELD)
    expected, kept = called(getattr(theirs, RULES[1]), told | {"initial_state": held.gathered()})
    parts = [told.pop(name) for name in ("query", "key", "value")]
    rule = functions(pool)[RULES[1]]
    out, state = rule(getattr(theirs, RULES[1]), *parts, **told | {"initial_state": held})
    assert torch.equal(out, expected)
    assert torch.equal(state, kept)


def test_so_does_its_convolution(pool: Pool) -> None:
    held, weight, x = HeldStates(torch.randn(4, 48, 4), HELD), torch.randn(48, 4), torch.randn(2, 48, 1)
    before, same = held.states.clone(), held.gathered()
    update = functions(pool)[CONVOLUTIONS[1]]
    expected = theirs.causal_conv1d_update(x, same, weight, activation="gelu")
    assert torch.equal(update(theirs.causal_conv1d_update, x, held, weight, activation="gelu"), expected)
    assert torch.equal(held.states[[2, 0]], same)
    assert torch.equal(held.states[[1, 3]], before[[1, 3]])


def scan_inputs(dtype: torch.dtype, tokens: int, rows: int = 2, state_dim: int = 32) -> dict[str, Any]:
    torch.manual_seed(5)
    mixed = torch.randn(rows, tokens, 4 * 16 + 2 * 2 * state_dim).to(dtype)
    x, b, c = mixed.split((64, 2 * state_dim, 2 * state_dim), dim=-1)
    return {
        "hidden_states": x.unflatten(-1, (4, 16)),
        "dt": torch.randn(rows, tokens, 4).to(dtype),
        "A": -torch.rand(4),
        "B": b.unflatten(-1, (2, state_dim)),
        "C": c.unflatten(-1, (2, state_dim)),
        "D": torch.randn(4).to(dtype),
        "dt_bias": torch.randn(4).to(dtype),
        "dt_softplus": True,
        "z": None,
    }


def update_inputs(told: dict[str, Any]) -> dict[str, Any]:
    """The first token of `scan_inputs`, as a module tells it."""
    state_dim = told["B"].shape[-1]
    changed = {name: told[name][:, 0] for name in ("hidden_states", "B", "C")}
    changed["dt"] = told["dt"][:, :1].transpose(1, 2).expand(-1, -1, 16)
    changed["A"] = told["A"][:, None, None].expand(-1, 16, state_dim)
    changed |= {name: told[name][:, None].expand(-1, 16) for name in ("D", "dt_bias")}
    return told | changed


@pytest.mark.parametrize("dt_limit", [(0.0, float("inf")), (0.5, 1.0)])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_the_scan_is_that_of_transformers(pool: Pool, tokens: int, dt_limit: tuple[float, float]) -> None:
    told = scan_inputs(torch.float32, tokens) | {"dt_limit": dt_limit, "chunk_size": 16, "return_final_states": True}
    state = torch.randn(2, 4, 16, 32)
    expected, kept = modeling_mamba2.mamba2_chunk_scan(**told, initial_states=state)
    given = [told.pop(name) for name in ("hidden_states", "dt", "A", "B", "C")]
    out, found = functions(pool)["mamba2_chunk_scan"](refused, *given, **told, initial_states=state)
    assert found is state
    assert_near(out, expected)
    assert_near(state, kept)


@pytest.mark.parametrize("has_gate", [False, True])
def test_so_are_its_steps(pool: Pool, has_gate: bool) -> None:
    told, state = update_inputs(scan_inputs(torch.float32, 1)), torch.randn(2, 4, 16, 32)
    told["z"] = torch.randn(2, 4, 16) if has_gate else None
    same = state.clone()
    expected = modeling_mamba2.mamba2_selective_state_update(same, **told)
    given = [told.pop(name) for name in ("hidden_states", "dt", "A", "B", "C", "D")]
    update = functions(pool)["mamba2_selective_state_update"]
    assert_near(update(refused, state, *given, **told), expected)
    assert_near(state, same)


@pytest.mark.parametrize(
    "change", [{"initial_states": None}, {"return_final_states": False}, {"z": torch.ones(1)}, {"seq_idx": 0}]
)
def test_other_scans_transformers_computes(pool: Pool, change: dict[str, Any]) -> None:
    told = scan_inputs(torch.float32, 3) | {"chunk_size": 16, "return_final_states": True}
    told |= {"initial_states": torch.randn(2, 4, 16, 32)} | change
    seen: list[dict[str, Any]] = []

    def noted(*given: torch.Tensor, **rest: Any) -> str:
        seen.append(dict(zip(("hidden_states", "dt", "A", "B", "C", "chunk_size"), given, strict=True)) | rest)
        return "theirs"

    rest = told.copy()
    given = [rest.pop(name) for name in ("hidden_states", "dt", "A", "B", "C")]
    assert functions(pool)["mamba2_chunk_scan"](noted, *given, **rest) == "theirs"
    assert all(seen[0][name] is value for name, value in told.items())


def test_of_states_that_are_held_a_step_of_theirs_changes_a_copy(pool: Pool) -> None:
    told = update_inputs(scan_inputs(torch.float32, 1, state_dim=24))
    held = HeldStates(torch.randn(4, 4, 16, 24), HELD)
    same = held.gathered()
    expected = modeling_mamba2.mamba2_selective_state_update(same, **told)
    given = [told.pop(name) for name in ("hidden_states", "dt", "A", "B", "C", "D")]
    update = functions(pool)["mamba2_selective_state_update"]
    assert torch.equal(update(modeling_mamba2.mamba2_selective_state_update, held, *given, **told), expected)
    assert torch.equal(held.states[[2, 0]], same)
