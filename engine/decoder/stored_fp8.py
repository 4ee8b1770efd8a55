"""The layout of FP8 (e4m3) weights in a checkpoint, as described by its `quantization_config`.

    compressed-tensors   weight [out, in], weight_scale per tensor, per output, or per block
    fp8                  weight [out, in], weight_scale per tensor, or weight_scale_inv per block; transformers writes
                         `weight_block_size: null` and weight_scale_inv for one per tensor

The dtype of a linear module's weight tells whether it is quantized; modules left in full precision have no scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from engine.decoder.fields import check_fields
from engine.decoder.tensor_kinds import Shape, TensorKind, scale_shapes
from engine.errors import CheckpointError

FP8 = "fp8"
FP8_DTYPE = "F8_E4M3"
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFp8:
    """The layout of the linear modules of a checkpoint's layers; `engine.loading.fp8` reads it.

    Attributes:
        has_row_scales: scales are per output, not per tensor or block.
        block: (outputs, inputs) that share a scale, None without blocks.
        rounds_inputs: whether the weights are meant to be multiplied by 8-bit activations.
        scale: last name component of the scale tensor.
    """

    title: ClassVar[str] = "fp8"

    has_row_scales: bool = False
    block: tuple[int, int] | None = None
    rounds_inputs: bool = True
    scale: str = "weight_scale"

    @property
    def stays(self) -> bool:
        """Whether a GPU multiplies by the weights as stored: 8-bit on both sides, one scale per row of each."""
        return self.block is None and self.rounds_inputs

    def tensors(self, module: str, shape: Shape, dtype: str | None) -> dict[str, TensorKind]:
        """Return the required tensors of an (out, in) module; `dtype` is that of its `weight`, None if it has none."""
        if dtype != FP8_DTYPE:
            return {f"{module}.weight": TensorKind((shape,))}
        return {
            f"{module}.weight": TensorKind((shape,), (FP8_DTYPE,)),
            f"{module}.{self.scale}": TensorKind(self._scale_shapes(shape)),
        }

    def num_bytes(self, out: int, depth: int, element_bytes: int) -> float:
        """Return a module's bytes on a GPU with FP8 matmuls; a dequantized weight takes `element_bytes` per element."""
        return out * depth + SCALE_BYTES * out if self.stays else out * depth * element_bytes

    def check_sizes(self, sizes: Mapping[str, tuple[int, int]], where: str) -> None:
        """Accept any size; `engine.resolve` knows which ones FP8 matmuls support."""

    def _scale_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        out, depth = shape
        if self.block is not None:
            rows, columns = self.block
            return ((-(-out // rows), -(-depth // columns)),)
        return scale_shapes(out, self.has_row_scales)


def parse_fp8(fields: Mapping[str, object], within: str) -> StoredFp8:
    """Parse the `quantization_config` of "fp8"; raises as `engine.decoder.stored.parse_stored`."""
    check_fields(fields, {"activation_scheme": ("dynamic", "static"), "fmt": ("e4m3", None)}, within)
    size = fields.get("weight_block_size")
    if size is None:
        return StoredFp8(scale="weight_scale_inv" if "weight_block_size" in fields else "weight_scale")
    return StoredFp8(block=_block(size, f"{within}.weight_block_size"), scale="weight_scale_inv")


def parse_fp8_group(group: Mapping[str, object], weights: Mapping[str, object], within: str) -> StoredFp8:
    """Parse a group of compressed-tensors' FP8 format; raises as `engine.decoder.stored.parse_stored`."""
    number = {"num_bits": (8,), "type": ("float",), "symmetric": (True, None)}
    wanted = {**number, "strategy": ("tensor", "channel", "block"), "dynamic": (False, None), "actorder": (None,)}
    check_fields(weights, wanted, f"{within}.weights")
    inputs = group.get("input_activations")
    if isinstance(inputs, Mapping):
        check_fields(inputs, number, f"{within}.input_activations")
    elif inputs is not None:
        raise CheckpointError(f"{within}.input_activations is not a JSON object.")
    block = None
    if weights.get("strategy") == "block":
        block = _block(weights.get("block_structure"), f"{within}.weights.block_structure")
    return StoredFp8(has_row_scales=weights.get("strategy") == "channel", block=block, rounds_inputs=inputs is not None)


def _block(size: object, field: str) -> tuple[int, int]:
    if isinstance(size, list) and len(size) == 2 and all(type(part) is int and part > 0 for part in size):
        return size[0], size[1]
    raise CheckpointError(f"{field} is {size!r}; two positive integers are required.")
