"""Recognizes the experts of transformers that `engine.backend.Backend.routed_experts` computes.

Its modules describe their experts by attributes, for implementations to choose from (`use_experts_implementation`), and
get the router's choice as arguments. So routers, which differ from family to family, stay as they are.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from transformers.integrations import moe

from kernels.gated_activation.reference import Activation, activate_and_multiply

_PLAIN = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_concatenated": True,
    "is_transposed": False,
}


def activation_of(module: Any) -> Activation | None:
    """Return the activation of a module of plain gated experts; None for any other module.

    The former has parameters `gate_up_proj` [experts, 2 * inner, hidden] and `down_proj` [experts, hidden, inner].
    """
    if any(getattr(module, name, None) is not value for name, value in _PLAIN.items()):
        return None
    if getattr(type(module), "_apply_gate", None) is not getattr(moe, "_default_apply_gate", moe):
        return None
    (count, joint, hidden), (*_, inner) = module.gate_up_proj.shape, module.down_proj.shape
    if module.down_proj.shape != (count, hidden, inner) or joint != 2 * inner or module.num_experts != count:
        return None
    # By what it computes, because an activation has several names.
    gate = torch.linspace(-8, 8, 64)
    return next((name for name in get_args(Activation) if _is_same(module.act_fn, name, gate)), None)


def _is_same(theirs: torch.nn.Module, name: Activation, gate: torch.Tensor) -> bool:
    ours = activate_and_multiply(torch.cat([gate, torch.ones_like(gate)]), name)
    return torch.allclose(theirs(gate), ours, rtol=1e-5, atol=1e-6)
