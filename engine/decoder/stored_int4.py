"""How weights of 4 bits lie in a checkpoint, as its `quantization_config` says: in AWQ's and others' layouts.

Which linear modules are stored so their tensors say: what a checkpoint leaves as it was has a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.decoder.stored_fields import COMPRESSED, check_fields, parse_groups
from engine.decoder.tensor_kinds import Shape, TensorKind
from engine.errors import CheckpointError
from kernels.streamed_linear.layout import BLOCK, SHORT_GROUPS, UNIT_BYTES

AWQ, GPTQ = "awq", "gptq"
INT4_METHODS = (AWQ, GPTQ)
WHOLE_COLUMN = -1
PACKED = 8
"""Numbers of 4 bits in one of the 32 that a tensor is made of."""
PACKED_DTYPES = ("I32",)
LEFT_OUT = "-:"
"""What begins a pattern of modules that are left as they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredInt4:
    """The layout of all linear modules of a checkpoint's layers; `engine.loading.int4` reads it.

    Attributes:
        method: one of `INT4_METHODS`, or `COMPRESSED`.
        group_size: inputs that share a scale and a zero point, `WHOLE_COLUMN` for all of a module.
        zero_offset: what is added to a zero point as it is stored.
        has_zeros: zero points are stored; else each is in the middle.
        has_order: which group each input is of is stored; else they lie in the order of their groups.
    """

    method: str
    group_size: int
    zero_offset: int = 0
    has_zeros: bool = True
    has_order: bool = False

    @property
    def title(self) -> str:
        """What the weights are."""
        return f"4-bit ({self.method})"

    @property
    def stays(self) -> bool:
        """Whether the kernels multiply by the weights as they are: each group's inputs beside each other."""
        return not self.has_order

    @property
    def order(self) -> str:
        """The last name of the tensor that says which group each input is of."""
        return "weight_g_idx" if self.method == COMPRESSED else "g_idx"

    def group(self, depth: int) -> int:
        """Return how many inputs of a module of `depth` of them share a scale."""
        return depth if self.group_size == WHOLE_COLUMN else self.group_size

    def tensors(self, module: str, shape: Shape, dtype: str | None) -> dict[str, TensorKind]:
        """Return the tensors that a module of (out, in) features must have; `dtype`: of its weight, None for none."""
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
        """Return what a module takes on a GPU, where numbers take `element_bytes`."""
        if not self.stays:
            return out * depth * element_bytes
        return out * depth / 2 + UNIT_BYTES * out * (depth // self.group(depth))

    def check_sizes(self, sizes: Mapping[str, tuple[int, int]], where: str) -> None:
        """Refuse linear modules, given by (in, out) features, that are no whole number of blocks and groups.

        Raises:
            CheckpointError: naming one.
        """
        for module, (depth, out) in sizes.items():
            parts = sorted({BLOCK, self.group(depth)})
            if out % PACKED or any(depth % part for part in parts):
                raise CheckpointError(
                    f"{where}: {module} has {depth} inputs and {out} outputs; inputs must be multiples of "
                    f"{' and '.join(map(str, parts))}, outputs of {PACKED}."
                )


def parse_int4(fields: Mapping[str, object], where: str) -> StoredInt4:
    """Read the `quantization_config` of one of `INT4_METHODS`.

    Raises:
        CheckpointError: it asks for what is not supported; the message names the field.
    """
    wanted: dict[str, tuple[object, ...]]
    if fields["quant_method"] == AWQ:
        wanted = {"version": ("gemm", "GEMM", None), "zero_point": (True,)}
        is_less_one = False
    else:
        fields = {"checkpoint_format": fields.get("format"), **fields}
        formats = ("gptq", "gptq_v2", None)
        wanted = {
            "desc_act": (True, False),
            "checkpoint_format": formats,
            "pack_dtype": ("int32", None),
        }
        _check_dynamic(fields.get("dynamic"), f"{where}: quantization_config")
        # The first format keeps a zero point less one.
        is_less_one = fields["checkpoint_format"] != "gptq_v2"
    check_fields(fields, {**wanted, "bits": (4,), "lm_head": (False, None)}, f"{where}: quantization_config")
    group_size = _group_size(fields.get("group_size"), f"{where}: quantization_config")
    return StoredInt4(
        method=str(fields["quant_method"]),
        group_size=group_size,
        zero_offset=int(is_less_one),
        has_order=fields.get("desc_act") is True,
    )


def _check_dynamic(patterns: object, within: str) -> None:
    """Take what leaves modules as they were, and refuse what gives them other bits or groups."""
    if patterns and not (isinstance(patterns, Mapping) and all(str(name).startswith(LEFT_OUT) for name in patterns)):
        raise CheckpointError(
            f"{within}.dynamic is {patterns!r}; only names that begin with {LEFT_OUT!r} are supported."
        )


def parse_packed(fields: Mapping[str, object], where: str) -> StoredInt4:
    """Read the `quantization_config` of compressed-tensors' packed integers; errors as `parse_int4`."""
    return parse_groups(fields, f"{where}: quantization_config", _parse_group)


def _parse_group(group: Mapping[str, object], weights: Mapping[str, object], within: str) -> StoredInt4:
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
