"""Recognizes parts of transformers' layers that an `engine.backend.Backend` computes in one go, by what they compute.

Most of the architectures have the same RMS norms and gated MLPs, each under names of its own. So modules are tried on a
few numbers and compared with what ours would return, to the bit where rounding tells two forms apart.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, get_args

import torch

from kernels.add_rms_norm.reference import add_rms_norm
from kernels.gated_activation.reference import Activation, activate_and_multiply

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
"""Attributes in which norms keep what is added to the mean square."""
INPUTS = (("gate_up_proj",), ("gate_proj", "up_proj"))
OUTPUT = "down_proj"
_NUM_ROWS = 3


class RmsNorm(NamedTuple):
    """An RMS norm as `kernels.add_rms_norm.reference` defines it: its weight, in the dtype that it has there."""

    weight: torch.Tensor
    eps: float


class GatedMlp(NamedTuple):
    """Linear modules that compute OUTPUT(a(gate(x)) * up(x)); `inputs` are gate and up, or one module with both."""

    activation: Activation
    inputs: tuple[str, ...]


def norm_of(module: torch.nn.Module, dtype: torch.dtype) -> RmsNorm | None:
    """Return the norm that a module of a model of `dtype` computes; None for any other module."""
    weight = next(iter(module.parameters(recurse=False)), None)
    eps = next((found for name in EPS_NAMES if type(found := getattr(module, name, None)) is float), None)
    is_candidate = len(module.state_dict()) == 1 and weight is not None and weight.dim() == 1
    if eps is None or not is_candidate or not _takes_one(module.forward):
        return None
    assert weight is not None
    # Small numbers show where the epsilon is added, others how the quotient is rounded.
    sizes = torch.tensor([eps**0.5 / 4, 1.0, 30.0]).unsqueeze(1)
    x = (torch.randn(_NUM_ROWS, len(weight), generator=torch.Generator().manual_seed(1)) * sizes).to(dtype)
    theirs = _tried(module.forward, x)
    wide = weight.data.float()
    for form in (wide.to(dtype), wide, 1.0 + wide):
        ours = add_rms_norm(x, None, form, eps)
        if theirs is not None and _are_equal(theirs, ours):
            return RmsNorm(form, eps)
    return None


def gated_mlp_of(module: torch.nn.Module, dtype: torch.dtype) -> GatedMlp | None:
    """Return the plain gated MLP that a module of a model of `dtype` computes; None for any other module."""
    linears = {
        name: part
        for name, part in module.named_children()
        if type(part) is torch.nn.Linear and part.weight.dtype is dtype
    }
    inputs = next((names for names in INPUTS if {*names, OUTPUT} <= linears.keys()), None)
    if inputs is None or not _takes_one(module.forward) or len({linears[name].bias is None for name in inputs}) > 1:
        return None
    # Close together where activations bend, and beyond any bound that a model may clamp them to.
    gate = torch.cat((torch.linspace(-40, 40, 257), torch.tensor([-3e3, 3e3])))
    up = gate.flip(0) + 0.5
    both = torch.cat((gate, up)).unsqueeze(0)
    results = both.split(both.shape[1] // len(inputs), dim=1)
    x = gate.unsqueeze(0)
    stand_ins = {name: partial(_answer, x, result) for name, result in zip(inputs, results, strict=True)}
    theirs = _tried(_with(module, {**stand_ins, OUTPUT: _same}).forward, x)
    for activation in get_args(Activation):
        ours = activate_and_multiply(both, activation)
        if theirs is not None and theirs.shape == ours.shape and torch.allclose(theirs, ours, rtol=1e-5, atol=1e-6):
            return GatedMlp(activation, inputs)
    return None


def _with(module: torch.nn.Module, stand_ins: Mapping[str, Callable[..., Any]]) -> torch.nn.Module:
    """Return a copy of a module that has functions in place of some of its children."""
    twin = copy.copy(module)
    children = {name: child for name, child in module.named_children() if name not in stand_ins}
    twin.__dict__.update(stand_ins, _modules=children)
    return twin


def _answer(asked: torch.Tensor, result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a result; raise `ValueError` if the module has changed what it was asked before it passes it on."""
    if not torch.equal(x, asked):
        raise ValueError("a linear module of a plain MLP gets what the MLP gets")
    return result


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _takes_one(forward: Callable[..., Any]) -> bool:
    """Tell whether a function can be called with hidden states alone, and with nothing else."""
    return len(inspect.signature(forward).parameters) == 1


def _tried(forward: Callable[..., Any], x: torch.Tensor) -> torch.Tensor | None:
    """Return what a function makes of `x`; None if it cannot take it, or returns something else than a tensor."""
    try:
        with torch.inference_mode():
            found = forward(x)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    return found if isinstance(found, torch.Tensor) else None


def _are_equal(theirs: torch.Tensor, ours: torch.Tensor) -> bool:
    """Compare to the bit in 16 bits; in float32 sums may be added up in another order."""
    if theirs.shape != ours.shape or theirs.dtype is not ours.dtype:
        return False
    return torch.allclose(theirs, ours, rtol=1e-5, atol=1e-6) if ours.dtype is torch.float32 else theirs.equal(ours)
