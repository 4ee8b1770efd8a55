"""The layout of quantized weights that are dequantized on load, because no kernel multiplies by them as stored.

    int8            weight int8 [out, in], one scale per tensor or per output: compressed-tensors' weight_scale, or
                    bitsandbytes' SCB, which is 127 times as large
    bitsandbytes    weight uint8 [out * in / 2, 1], two 4-bit codes per byte, and a code book; 64 consecutive values
                    share a weight.absmax, which may itself be 8-bit, with a scale for 256 of them
    nvfp4           two values (e2m1) per byte; 16 inputs of an output share a weight_scale (e4m3), and the tensor has
                    a scale of its own, which compressed-tensors divides by and ModelOpt multiplies by

The dtype or absence of a linear module's `weight` tells whether it is quantized; full-precision ones hold floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from engine.decoder.fields import check_fields
from engine.decoder.tensor_kinds import Shape, TensorKind, scale_shapes
from engine.errors import CheckpointError

BITSANDBYTES, MODELOPT = "bitsandbytes", "modelopt"
BLOCK, NESTED_BLOCK = 64, 256
"""In bitsandbytes: values that share a scale, and 8-bit scales that share a scale."""
NVFP4_GROUP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passing:
    """Base of the layouts that `engine.loading.numbers` dequantizes on load."""

    stays: ClassVar[bool] = False

    def num_bytes(self, out: int, depth: int, element_bytes: int) -> float:
        """Return a module's bytes once dequantized to `element_bytes` per element."""
        return out * depth * element_bytes

    def check_sizes(self, sizes: Mapping[str, tuple[int, int]], where: str) -> None:
        """Accept any size: dequantized weights have no groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredInt8(_Passing):
    """8-bit integers.

    Attributes:
        has_row_scales: scales are per output, not per tensor.
        scale: last name component of the scale tensor.
        unit: divisor of the scales.
    """

    title: ClassVar[str] = "8-bit"

    has_row_scales: bool = True
    scale: str = "weight_scale"
    unit: float = 1.0

    def tensors(self, module: str, shape: Shape, dtype: str | None) -> dict[str, TensorKind]:
        """Return the required tensors of an (out, in) module; `dtype` is that of its `weight`, None if it has none."""
        if dtype != "I8":
            return {f"{module}.weight": TensorKind((shape,))}
        return {
            f"{module}.weight": TensorKind((shape,), ("I8",)),
            f"{module}.{self.scale}": TensorKind(scale_shapes(shape[0], self.has_row_scales)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBnb4(_Passing):
    """4-bit codes of bitsandbytes.

    Attributes:
        kind: "nf4" or "fp4", the name of the code book, which is stored in the checkpoint.
        is_nested: the scales are 8-bit and have scales of their own (double quantization).
    """

    kind: str
    is_nested: bool

    @property
    def title(self) -> str:
        """Name of the format, for messages."""
        return f"4-bit ({self.kind})"

    @property
    def state(self) -> str:
        """Last name components of the tensor that holds the remaining settings as a JSON object."""
        return f"weight.quant_state.{BITSANDBYTES}__{self.kind}"

    def tensors(self, module: str, shape: Shape, dtype: str | None) -> dict[str, TensorKind]:
        """Return the required tensors of an (out, in) module; `dtype` is that of its `weight`, None if it has none."""
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
    """4-bit floats with 8-bit scales.

    Attributes:
        held: last name component of the tensor with the packed values.
        whole_scale: last name component of the per-tensor scale.
        divides: whether values are divided by the per-tensor scale, not multiplied.
    """

    title: ClassVar[str] = "4-bit (nvfp4)"

    held: str
    whole_scale: str
    divides: bool

    def tensors(self, module: str, shape: Shape, dtype: str | None) -> dict[str, TensorKind]:
        """Return the required tensors of an (out, in) module; `dtype` is that of its `weight`, None if it has none."""
        if dtype not in (None, "U8"):
            return {f"{module}.weight": TensorKind((shape,))}
        out, depth = shape
        return {
            f"{module}.{self.held}": TensorKind(((out, depth // 2),), ("U8",)),
            f"{module}.weight_scale": TensorKind(((out, depth // NVFP4_GROUP),), ("F8_E4M3",)),
            f"{module}.{self.whole_scale}": TensorKind(scale_shapes(out, False), ("F32",)),
        }

    def check_sizes(self, sizes: Mapping[str, tuple[int, int]], where: str) -> None:
        """Refuse modules whose inputs do not divide into whole groups.

        Raises:
            CheckpointError: names the first such module.
        """
        for module, (depth, _) in sizes.items():
            if depth % NVFP4_GROUP:
                raise CheckpointError(f"{where}: {module} has {depth} inputs; {NVFP4_GROUP} must divide them.")


NVFP4_OF_MODELOPT = StoredNvfp4(held="weight", whole_scale="weight_scale_2", divides=False)


def parse_bitsandbytes(fields: Mapping[str, object], within: str) -> StoredInt8 | StoredBnb4:
    """Parse the `quantization_config` of bitsandbytes; raises as `engine.decoder.stored.parse_stored`."""
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


def parse_int8_group(group: Mapping[str, object], weights: Mapping[str, object], within: str) -> StoredInt8:
    """Parse a group of compressed-tensors' 8-bit integers; raises as `parse_bitsandbytes`."""
    wanted = {"num_bits": (8,), "type": ("int",), "symmetric": (True, None), "strategy": ("channel", "tensor")}
    check_fields(weights, {**wanted, "dynamic": (False, None), "actorder": (None,)}, f"{within}.weights")
    return StoredInt8(has_row_scales=weights["strategy"] == "channel")


def parse_nvfp4_group(group: Mapping[str, object], weights: Mapping[str, object], within: str) -> StoredNvfp4:
    """Parse a group of compressed-tensors' 4-bit floats; raises as `parse_bitsandbytes`."""
    wanted = {"num_bits": (4,), "type": ("float",), "strategy": ("tensor_group",), "group_size": (NVFP4_GROUP,)}
    check_fields(weights, {**wanted, "symmetric": (True, None), "dynamic": (False, None)}, f"{within}.weights")
    return StoredNvfp4(held="weight_packed", whole_scale="weight_global_scale", divides=True)
