"""The layout of 4-bit weights in a checkpoint (AWQ, GPTQ, compressed-tensors), as its `quantization_config` says.

The tensors of a linear module tell whether it is quantized: only modules left in full precision have a `weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.decoder.fields import check_fields
from engine.decoder.tensor_kinds import Shape, TensorKind
from engine.errors import CheckpointError
from kernels.streamed_linear.layout import BLOCK, SHORT_GROUPS, UNIT_BYTES

AWQ, GPTQ, COMPRESSED = "awq", "gptq", "compressed-tensors"
INT4_METHODS = (AWQ, GPTQ)
WHOLE_COLUMN = -1
PACKED = 8
"""4-bit values in one int32 of a packed tensor."""
PACKED_DTYPES = ("I32",)
LEFT_OUT = "-:"
"""Prefix of a pattern that names modules left in full precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredInt4:
    """The layout of the linear modules of a checkpoint's layers; `engine.loading.int4` reads it.

    Attributes:
        method: one of `INT4_METHODS`, or `COMPRESSED`.
        group_size: inputs that share a scale and a zero point, `WHOLE_COLUMN` for all inputs of a module.
        zero_offset: added to each stored zero point, with carries between those in one int32.
        has_zeros: zero points are stored; otherwise quantization is symmetric, around the middle level.
        has_order: the group index of each input is stored; otherwise inputs lie in the order of their groups.
    """

    method: str
    group_size: int
    zero_offset: int = 0
    has_zeros: bool = True
    has_order: bool = False

    @property
    def title(self) -> str:
        """Name of the format, for messages."""
        return f"4-bit ({self.method})"

    @property
    def stays(self) -> bool:
        """Whether the kernels multiply by the weights as stored, which needs contiguous groups of inputs."""
        return not self.has_order

    @property
    def order(self) -> str:
        """Last name component of the tensor with the group index of each input."""
        return "weight_g_idx" if self.method == COMPRESSED else "g_idx"

    def group(self, depth: int) -> int:
        """Return how many inputs share a scale in a module with `depth` inputs."""
        return depth if self.group_size == WHOLE_COLUMN else self.group_size

    def tensors(self, module: str, shape: Shape, dtype: str | None) -> dict[str, TensorKind]:
        """Return the required tensors of an (out, in) module; `dtype` is that of its `weight`, None if it has none."""
        if dtype is not None:
            return {f"{module}.weight": TensorKind((shape,))}
        out, depth = shape
        groups = depth // self.group(depth)
        order = {f"{module}.{self.order}": TensorKind(((depth,),), PACKED_DTYPES)} if self.has_order else {}
        if self.method == COMPRESSED:
            zeros = {f"{module}.weight_zero_point": TensorKind(((out // PACKED, groups),), PACKED_DTYPES)}
            return {
                f"{module}.weight_packed": TensorKind(((out, depth // PACKED),), PACKED_DTYPES),
                f"{module}.weight_scale": TensorKind(((out, groups),)),
                **(zeros if self.has_zeros else {}),
                **order,
            }
        packed = (depth, out // PACKED) if self.method == AWQ else (depth // PACKED, out)
        return {
            f"{module}.qweight": TensorKind((packed,), PACKED_DTYPES),
            f"{module}.qzeros": TensorKind(((groups, out // PACKED),), PACKED_DTYPES),
            f"{module}.scales": TensorKind(((groups, out),)),
            **order,
        }

    def num_bytes(self, out: int, depth: int, element_bytes: int) -> float:
        """Return a module's bytes on a GPU; a dequantized weight takes `element_bytes` per element."""
        if not self.stays:
            return out * depth * element_bytes
        return out * depth / 2 + UNIT_BYTES * out * (depth // self.group(depth))

    def check_sizes(self, sizes: Mapping[str, tuple[int, int]], where: str) -> None:
        """Refuse linear modules, given as (in, out) features, that do not divide into whole blocks and groups.

        Raises:
            CheckpointError: names the first such module.
        """
        for module, (depth, out) in sizes.items():
            parts = sorted({BLOCK, self.group(depth)})
            if out % PACKED or any(depth % part for part in parts):
                raise CheckpointError(
                    f"{where}: {module} has {depth} inputs and {out} outputs; inputs must be multiples of "
                    f"{' and '.join(map(str, parts))}, outputs of {PACKED}."
                )


def parse_int4(fields: Mapping[str, object], within: str) -> StoredInt4:
    """Parse the `quantization_config` of one of `INT4_METHODS`; raises as `engine.decoder.stored.parse_stored`."""
    wanted: dict[str, tuple[object, ...]]
    if fields["quant_method"] == AWQ:
        wanted = {"version": ("gemm", "GEMM", None), "zero_point": (True,)}
        is_less_one = False
    else:
        fields = {"checkpoint_format": fields.get("format"), **fields}
        formats = ("gptq", "gptq_v2", None)
        wanted = {"desc_act": (True, False), "checkpoint_format": formats, "pack_dtype": ("int32", None)}
        _check_dynamic(fields.get("dynamic"), within)
        # The original format stores each zero point minus one.
        is_less_one = fields["checkpoint_format"] != "gptq_v2"
    check_fields(fields, {**wanted, "bits": (4,), "lm_head": (False, None)}, within)
    return StoredInt4(
        method=str(fields["quant_method"]),
        group_size=_group_size(fields.get("group_size"), within),
        zero_offset=int(is_less_one),
        has_order=fields.get("desc_act") is True,
    )


def _check_dynamic(patterns: object, within: str) -> None:
    """Accept patterns that leave modules in full precision; refuse those that change a module's bits or groups."""
    if patterns and not (isinstance(patterns, Mapping) and all(str(name).startswith(LEFT_OUT) for name in patterns)):
        raise CheckpointError(
            f"{within}.dynamic is {patterns!r}; only names that begin with {LEFT_OUT!r} are supported."
        )


def parse_int4_group(group: Mapping[str, object], weights: Mapping[str, object], within: str) -> StoredInt4:
    """Parse a group of compressed-tensors' packed integers; raises as `parse_int4`."""
    check_fields(group, {"input_activations": (None,)}, within)
    wanted = {"num_bits": (4,), "type": ("int",), "strategy": ("group", "channel"), "symmetric": (True, False, None)}
    wanted |= {"dynamic": (False, None), "actorder": (None, "weight", "static", "group", "dynamic")}
    check_fields(weights, wanted, f"{within}.weights")
    size = weights.get("group_size") if weights.get("strategy") == "group" else WHOLE_COLUMN
    return StoredInt4(
        method=COMPRESSED,
        group_size=_group_size(size, f"{within}.weights"),
        has_zeros=weights.get("symmetric") is False,
        has_order=weights.get("actorder") in ("group", "dynamic"),
    )


def _group_size(size: object, within: str) -> int:
    if type(size) is not int or not _is_group(size):
        raise CheckpointError(
            f"{within}.group_size is {size!r}; supported are {', '.join(map(str, SHORT_GROUPS))}, multiples of {BLOCK} "
            f"and {WHOLE_COLUMN} (all inputs)."
        )
    return size


def _is_group(size: int) -> bool:
    return size == WHOLE_COLUMN or size in SHORT_GROUPS or (size > 0 and size % BLOCK == 0)
