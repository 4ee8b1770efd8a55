"""The tables of adapters' matrices that our kernels read: which entry each module has, and sizes by model."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.experts import expert_module
from adapters.tensor_names import ROUTER, WHOLE_MODEL, parse_module_name
from engine.decoder.model_spec import ModelSpec
from engine.decoder.spec import DecoderSpec
from engine.fallback.spec import FallbackSpec
from kernels.experts.reference import Part

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Order of modules in an adapter's table of matrices; modules that share an input are adjacent."""

EXPERT_MODULES: dict[Part, tuple[str, ...]] = {
    "gate_up": ("gate_up_proj", "gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Modules that an adapter may have for each product of an expert; `up_proj` is the second half of its outputs."""
EXPERT_ENTRIES = {"gate_up_proj": 0, "gate_proj": 0, "up_proj": 1, "down_proj": 2}
"""Entry of each module among those of its expert; a fused gate and up takes the entry of the gate."""
ENTRIES_OF_EXPERT = 3

HEAD_NORMS = ("q_norm", "k_norm")
ENTRIES = (
    *MODULES,
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    *HEAD_NORMS,
    ROUTER,
)
WHOLE_ENTRIES = ("own embed_tokens", "embed_tokens", "norm", "own lm_head", "lm_head")
"""Entries of the whole model; matrices that replace the base's ("own") have entries apart from low-rank products."""


def entry_of(layer: int, module: str, entries: Sequence[str] = ENTRIES) -> int:
    """Return the index of a module in an adapter's table; entries of the whole model precede those of layer 0.

    Args:
        entries: of each layer: `ENTRIES`, and others behind them.
    """
    names = WHOLE_ENTRIES if layer == WHOLE_MODEL else entries
    return (layer - WHOLE_MODEL) * len(entries) + names.index(module)


def expert_entry(layer: int, module: str, num_experts: int) -> int:
    """Return the index of an expert's module, named as in `adapters.experts`, in an adapter's table of experts."""
    _, expert, projection = module.split(".")
    return (layer * num_experts + int(expert)) * ENTRIES_OF_EXPERT + EXPERT_ENTRIES[projection]


def product_entry(layer: int, part: Part, num_experts: int) -> int:
    """Return the first index of a product of a layer's first expert in a table of experts."""
    return expert_entry(layer, expert_module(0, EXPERT_MODULES[part][0]), num_experts)


def num_entries(part: Part) -> int:
    """Return how many entries of an expert belong to a product."""
    return len({EXPERT_ENTRIES[module] for module in EXPERT_MODULES[part]})


def entries_of(spec: ModelSpec) -> tuple[str, ...]:
    """Return the entries of each layer, as `entry_of` takes them."""
    names = (parse_module_name(module) for module in spec.linear_shapes()) if isinstance(spec, FallbackSpec) else ()
    others = {at[1] for at in names if at is not None} - set(ENTRIES)
    return *ENTRIES, *sorted(others)


def num_experts_of(spec: ModelSpec) -> int:
    """Return how many experts of a layer adapters may change, 0 for none."""
    if isinstance(spec, FallbackSpec):
        return spec.mixed.num_experts if spec.mixed is not None and spec.expert_modules else 0
    return spec.experts.count if isinstance(spec, DecoderSpec) and spec.experts is not None else 0
