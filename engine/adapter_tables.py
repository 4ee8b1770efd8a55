"""Sizes of the tables of adapters' matrices that our kernels read, by model."""

from __future__ import annotations

from adapters.tensor_names import parse_module_name
from engine.decoder.model_spec import ModelSpec
from engine.decoder.spec import DecoderSpec
from engine.fallback.spec import FallbackSpec
from engine.lora import ENTRIES


def entries_of(spec: ModelSpec) -> tuple[str, ...]:
    """Return the entries of each layer, as `engine.lora.entry_of` takes them."""
    names = (parse_module_name(module) for module in spec.linear_shapes()) if isinstance(spec, FallbackSpec) else ()
    others = {at[1] for at in names if at is not None} - set(ENTRIES)
    return *ENTRIES, *sorted(others)


def num_experts_of(spec: ModelSpec) -> int:
    """Return how many experts of a layer adapters may change, 0 for none."""
    if isinstance(spec, FallbackSpec):
        return spec.mixed.num_experts if spec.mixed is not None and spec.expert_modules else 0
    return spec.experts.count if isinstance(spec, DecoderSpec) and spec.experts is not None else 0
