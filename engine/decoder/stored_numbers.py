"""How weights of few bits lie in a checkpoint that become numbers as they are loaded: nothing here multiplies by them.

    int8            weight int8 [out, in], a scale of the tensor or of each output: compressed-tensors' weight_scale,
                    or SCB of bitsandbytes, which is 127 times as much
    bitsandbytes    weight uint8 [out * in / 2, 1], two levels in a byte, and what stands for them; 64 numbers in their
                    order share weight.absmax, which may lie in 8 bits itself, with what 256 of those share
    nvfp4           two numbers (e2m1) in a byte, 16 inputs of an output share weight_scale (e4m3), and the tensor a
                    scale of its own, which compressed-tensors divides by and ModelOpt multiplies by

Which linear modules of the layers are stored so their tensors say: what a checkpoint leaves as it was is of floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.decoder.stored_fields import check_fields, parse_groups, scale_shapes
from engine.decoder.tensor_kinds import Shape, TensorKind
from engine.errors import CheckpointError

BITSANDBYTES, MODELOPT = "bitsandbytes", "modelopt"
BLOCK, NESTED_BLOCK = 64, 256
"""Of bitsandbytes: numbers that share a scale, and scales of 8 bits that share one."""
NVFP4_GROUP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passing:
    """What all of them have in common; `engine.loading.numbers` reads them."""

    @property
    def stays(self) -> bool:
        """Whether anything multiplies by the weights as they are."""
        return False

    def num_bytes(self, out: int, depth: int, element_bytes: int) -> float:
        """Return what a module takes where numbers take `element_bytes`."""
        return out * depth * element_bytes

    def check_sizes(self, sizes: Mapping[str, tuple[int, int]], where: str) -> None:
        """Take all sizes: numbers have no groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredInt8(_Passing):
    """Integers of 8 bits.

    Attributes:
        has_row_scales: each output has a scale of its own, instead of the tensor.
        scale: the last name of the tensor with the scales.
        unit: what they are divided by.
    """

    has_row_scales: bool = True
    scale: str = "weight_scale"
    unit: float = 1.0

    @property
    def title(self) -> str:
        """What the weights are."""
        return "8-bit"

    def tensors(self, module: str, shape: Shape, dtype: str | None) -> dict[str, TensorKind]:
        """Return the tensors that a module of (out, in) features must have; `dtype`: of its weight, None for none."""
        if dtype != "I8":
            return {f"{module}.weight": TensorKind((shape,))}
        return {
            f"{module}.weight": TensorKind((shape,), ("I8",)),
            f"{module}.{self.scale}": TensorKind(scale_shapes(shape[0], self.has_row_scales)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBnb4(_Passing):
    """Levels of 4 bits as bitsandbytes has them.

    Attributes:
        kind: "nf4" or "fp4": how it names what the levels stand for, which lies beside them.
        is_nested: the scales have 8 bits, and scales.
    """

    kind: str
    is_nested: bool

    @property
    def title(self) -> str:
        """What the weights are."""
        return f"4-bit ({self.kind})"

    @property
    def state(self) -> str:
        """The last names of the tensor with the rest, a JSON object."""
        return f"weight.quant_state.{BITSANDBYTES}__{self.kind}"

    def tensors(self, module: str, shape: Shape, dtype: str | None) -> dict[str, TensorKind]:
        """Return the tensors that a module of (out, in) features must have; `dtype`: of its weight, None for none."""
        if dtype != "U8":
            return {f"{module}.weight": TensorKind((shape,))}
        count = shape[0] * shape[1]
        num_blocks = -(-count // BLOCK)
        found = {
            f"{module}.weight": TensorKind(((-(-count // 2), 1),), ("U8",)),
            f"{module}.weight.absmax": TensorKind(((num_blocks,),), ("U8",) if self.is_nested else ("F32",)),
            f"{module}.weight.quant_map": TensorKind(((16,),), ("F32",)),
            f"{module}.{self.state}": TensorKind(None, ("U8",)),
        }
        nested = {
            f"{module}.weight.nested_absmax": TensorKind(((-(-num_blocks // NESTED_BLOCK),),), ("F32",)),
            f"{module}.weight.nested_quant_map": TensorKind(((256,),), ("F32",)),
        }
        return found | (nested if self.is_nested else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNvfp4(_Passing):
    """Floats of 4 bits with scales of 8.

    Attributes:
        held: the last name of the tensor with the numbers.
        whole_scale: of that with the tensor's scale.
        divides: whether numbers are divided by that.
    """

    held: str
    whole_scale: str
    divides: bool

    @property
    def title(self) -> str:
        """What the weights are."""
        return "4-bit (nvfp4)"

    def tensors(self, module: str, shape: Shape, dtype: str | None) -> dict[str, TensorKind]:
        """Return the tensors that a module of (out, in) features must have; `dtype`: of its weight, None for none."""
        if dtype not in (None, "U8"):
            return {f"{module}.weight": TensorKind((shape,))}
        out, depth = shape
        return {
            f"{module}.{self.held}": TensorKind(((out, depth // 2),), ("U8",)),
            f"{module}.weight_scale": TensorKind(((out, depth // NVFP4_GROUP),), ("F8_E4M3",)),
            f"{module}.{self.whole_scale}": TensorKind(scale_shapes(out, False), ("F32",)),
        }

    def check_sizes(self, sizes: Mapping[str, tuple[int, int]], where: str) -> None:
        """Refuse inputs that are no whole number of groups.

        Raises:
            CheckpointError: naming a module.
        """
        for module, (depth, _) in sizes.items():
            if depth % NVFP4_GROUP:
                raise CheckpointError(f"{where}: {module} has {depth} inputs; {NVFP4_GROUP} must divide them.")


NVFP4_OF_MODELOPT = StoredNvfp4(held="weight", whole_scale="weight_scale_2", divides=False)


def parse_bitsandbytes(fields: Mapping[str, object], where: str) -> StoredInt8 | StoredBnb4:
    """Read the `quantization_config` of bitsandbytes.

    Raises:
        CheckpointError: it asks for what is not supported; the message names the field.
    """
    within = f"{where}: quantization_config"
    if fields.get("load_in_8bit"):
        return StoredInt8(scale="SCB", unit=127.0)
    wanted: dict[str, tuple[object, ...]] = {
        "load_in_4bit": (True,),
        "bnb_4bit_quant_type": ("nf4", "fp4"),
        "bnb_4bit_quant_storage": ("uint8", None),
    }
    check_fields(fields, wanted, within)
    is_nested = bool(fields.get("bnb_4bit_use_double_quant"))
    return StoredBnb4(kind=str(fields["bnb_4bit_quant_type"]), is_nested=is_nested)


def parse_integers(fields: Mapping[str, object], where: str) -> StoredInt8:
    """Read the `quantization_config` of compressed-tensors' integers of 8 bits; errors as `parse_bitsandbytes`."""
    return parse_groups(fields, f"{where}: quantization_config", _parse_integers)


def parse_nvfp4(fields: Mapping[str, object], where: str) -> StoredNvfp4:
    """Read the `quantization_config` of compressed-tensors' floats of 4 bits; errors as `parse_bitsandbytes`."""
    return parse_groups(fields, f"{where}: quantization_config", _parse_floats)


def _parse_integers(group: Mapping[str, object], weights: Mapping[str, object], within: str) -> StoredInt8:
    wanted = {"num_bits": (8,), "type": ("int",), "symmetric": (True, None), "strategy": ("channel", "tensor")}
    check_fields(weights, {**wanted, "dynamic": (False, None), "actorder": (None,)}, f"{within}.weights")
    return StoredInt8(has_row_scales=weights["strategy"] == "channel")


def _parse_floats(group: Mapping[str, object], weights: Mapping[str, object], within: str) -> StoredNvfp4:
    wanted = {"num_bits": (4,), "type": ("float",), "strategy": ("tensor_group",), "group_size": (NVFP4_GROUP,)}
    check_fields(weights, {**wanted, "symmetric": (True, None), "dynamic": (False, None)}, f"{within}.weights")
    return StoredNvfp4(held="weight_packed", whole_scale="weight_global_scale", divides=True)
