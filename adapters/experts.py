"""Layout of MoE expert adapters in a file: per expert module, or stacked over all experts of a layer.

    mlp.experts.3.up_proj.lora_A.weight          [rank, in]              a module of one expert; any may be left out
    mlp.experts.3.up_proj.lora_B.weight          [out, rank]

    mlp.experts.base_layer.lora_A.weight         [experts * rank, in]    gate and up of all (PEFT's `target_parameters`)
    mlp.experts.base_layer.lora_B.weight         [out, rank * experts]   expert index varies fastest
    mlp.experts.lora_A.weight, lora_B.weight                             down of all

PEFT wraps the experts module once per targeted parameter, in the order in which the module holds them, so the outermost
(last) wrapper has no `base_layer` in its name, whichever parameter it is for. Before 0.19 PEFT read parameters stored
as [experts, out, in] as [experts, in, out]: there A is [experts * rank, out] and B is [in, rank * experts].

Standard library only. Source: `ParamWrapper` of huggingface/peft 0.18 and 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

from adapters.errors import AdapterError
from adapters.peft_format import STACKED_PARAMETERS, LoraConfig

_LAYER = r"model\.layers\.(?P<layer>0|[1-9]\d{0,5})"
_EXPERTS = rf"(?P<experts>{_LAYER}\.(?:mlp|block_sparse_moe)\.experts)"
EXPERTS = re.compile(_EXPERTS)
"""Names of modules of experts that adapters may change."""
_EXPERT = re.compile(rf"{_EXPERTS}\.(?P<expert>0|[1-9]\d{{0,4}})\.(?P<module>[a-z0-9_]+)")
_STACK = re.compile(rf"{_EXPERTS}(?P<wraps>(?:\.base_layer)*)")
_PROJECTION_BY_MODULE = {
    **{name: name for name in ("gate_proj", "up_proj", "down_proj")},
    **{"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
}
_SWAPPED_BEFORE = (0, 19)
"""The first PEFT version that distinguishes in from out correctly."""


class Stack(NamedTuple):
    """How the matrices of all experts are stacked in A and B of one low-rank product.

    Attributes:
        is_paired: the output rows of gate and up are interleaved.
        is_swapped: A has the outputs and B the inputs.
    """

    num_experts: int
    is_paired: bool
    is_swapped: bool


class ExpertPlace(NamedTuple):
    """A module or stacked parameter of an MoE layer that takes an adapter.

    Attributes:
        key: the engine's (layer, module): the name from `expert_module`, or `experts.` plus the parameter's name for
            all experts at once. A shared expert uses the names of a dense MLP.
        shape: as in `adapters.validate.ModuleShapes`.
        name: the full name, as a configuration refers to it.
        is_transposed: stacked and stored [experts, in, out]; no PEFT version misreads those.
    """

    key: tuple[int, str]
    shape: tuple[int, ...]
    name: str
    is_transposed: bool = False


def expert_module(expert: int, projection: str) -> str:
    """Return the name of one expert's module within its layer: `experts.3.up_proj`."""
    return f"experts.{expert}.{projection}"


def is_of_experts(module: str) -> bool:
    """Tell whether a module, named within its layer, is an expert's."""
    return module.startswith("experts.")


def place_of(name: str, module: str, config: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> ExpertPlace | None:
    """Return the place of a module from a tensor name in the base's MoE layers, or None if it is not part of one.

    Raises:
        AdapterError: it is nested in more PEFT wrappers than the configuration targets parameters.
    """
    if found := _EXPERT.fullmatch(module):
        each = shapes.get(f"{found['experts']}.{found['module']}")
        projection = _PROJECTION_BY_MODULE.get(found["module"])
        if each is None or projection is None or int(found["expert"]) >= each[0]:
            return None
        key = int(found["layer"]), expert_module(int(found["expert"]), projection)
        return ExpertPlace(key, each[1:], module)
    if found := _STACK.fullmatch(module):
        parameters = [f"{found['experts']}.{parameter}" for parameter in STACKED_PARAMETERS]
        if not all(parameter in shapes for parameter in parameters):
            return None
        targets = [parameter for parameter in parameters if config.has_target_parameter(parameter)]
        depth = found["wraps"].count(".")
        if depth >= len(targets):
            raise AdapterError(name, f"it has tensors for {module}, but target_parameters name {len(targets)} there")
        parameter = targets[-1 - depth]
        key = int(found["layer"]), f"experts.{parameter.rpartition('.')[2]}"
        return ExpertPlace(key, shapes[parameter], parameter, is_transposed=is_paired(shapes[parameters[0]]))
    return None


def are_swapped(name: str, config: LoraConfig, stacks: Iterable[tuple[tuple[int, ...], ExpertPlace]]) -> bool:
    """Tell whether PEFT mistook outputs for inputs in an adapter's stacked matrices.

    Args:
        stacks: for each, the shape of A and its place.

    Raises:
        AdapterError: the shapes cannot tell, and the PEFT version may have mistaken them.
    """
    is_open = False
    for a, place in stacks:
        inputs, out = place.shape[1], prod(place.shape[2:])
        if place.is_transposed or a[-1] not in (inputs, out):
            continue
        if inputs != out:
            return a[-1] == out
        is_open = True
    if is_open and config.peft_version is not None and config.peft_version < _SWAPPED_BEFORE:
        raise AdapterError(name, "PEFT before 0.19 may have taken out for in of its experts; save it with a later one")
    return False


def is_paired(shape: tuple[int, ...]) -> bool:
    """Tell whether a `ModuleShapes` shape has the output rows of gate and up interleaved."""
    return len(shape) == 4 and shape[-1] == 2


def halves_of(shape: tuple[int, ...], rank: int, *, swapped: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of the stacked A and B of all experts."""
    count, inputs, *outputs = shape
    a, b = (prod(outputs), inputs) if swapped else (inputs, prod(outputs))
    return (rank * count, a), (b, rank * count)


def refuse_twofold(name: str, keys: Iterable[tuple[int, str]]) -> None:
    """Refuse an adapter with both stacked and per-expert tensors for the same projection of a layer.

    Raises:
        AdapterError: it has both.
    """
    known = set(keys)
    stacked = {key for key in known if key[1] in ("experts.gate_up_proj", "experts.down_proj")}
    for layer, module in known - stacked if stacked else ():
        projection = module.rpartition(".")[2]
        both = "down_proj" if projection == "down_proj" else "gate_up_proj"
        if is_of_experts(module) and (layer, f"experts.{both}") in stacked:
            raise AdapterError(name, f"in layer {layer} it has {both} of all experts, and {module} besides")
