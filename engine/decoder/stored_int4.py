"""How weights of 4 bits lie in a checkpoint, as its `quantization_config` says: AWQ's and GPTQ's layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import CheckpointError
from kernels.streamed_linear.reference import BLOCK, SHORT_GROUPS

WHOLE_COLUMN = -1
PACKED = 8
"""Numbers of 4 bits in one of the 32 that a tensor is made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredInt4:
    """The layout of all linear modules of a checkpoint's layers; `engine.loading.int4` reads it.

    Attributes:
        method: "awq" or "gptq".
        group_size: inputs that share a scale and a zero point, `WHOLE_COLUMN` for all of a module.
        zero_offset: what is added to a zero point as it is stored.
    """

    method: str
    group_size: int
    zero_offset: int = 0

    def group(self, depth: int) -> int:
        """Return how many inputs of a module of `depth` of them share a scale."""
        return depth if self.group_size == WHOLE_COLUMN else self.group_size

    def shapes(self, module: str, out: int, depth: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors that a module of `out` outputs and `depth` inputs must have."""
        packed = (depth, out // PACKED) if self.method == "awq" else (depth // PACKED, out)
        groups = depth // self.group(depth)
        return {
            f"{module}.qweight": packed,
            f"{module}.qzeros": (groups, out // PACKED),
            f"{module}.scales": (groups, out),
        }

    def check_sizes(self, sizes: Mapping[str, tuple[int, int]], where: str) -> None:
        """Refuse linear modules, given by (in, out) features, that are no whole number of blocks and groups.

        Raises:
            CheckpointError: naming one.
        """
        for module, (depth, out) in sizes.items():
            parts = sorted({BLOCK, self.group(depth)})
            if out % PACKED or any(depth % part for part in parts):
                raise CheckpointError(
                    f"{where}: {module} has {depth} inputs and {out} outputs; {' and '.join(map(str, parts))} must "
                    f"divide the inputs, {PACKED} the outputs."
                )


def parse_stored(fields: object, where: str) -> StoredInt4:
    """Read `quantization_config`.

    Raises:
        CheckpointError: it asks for what is not supported; the message names the field.
    """
    if not isinstance(fields, Mapping):
        raise CheckpointError(f"{where}: quantization_config is no JSON object.")
    method = fields.get("quant_method")
    wanted: dict[str, tuple[object, ...]]
    if method == "awq":
        wanted = {"version": ("gemm", "GEMM", None), "zero_point": (True,)}
    elif method == "gptq":
        fields = {"checkpoint_format": fields.get("format"), **fields}
        formats = ("gptq", "gptq_v2", None)
        wanted = {
            "desc_act": (False,),
            "checkpoint_format": formats,
            "pack_dtype": ("int32", None),
            "dynamic": (None, {}),
        }
    else:
        raise CheckpointError(
            f"{where}: quantization_config.quant_method is {method!r}; of quantized weights 'awq' and 'gptq' are read."
        )
    wanted |= {"bits": (4,), "lm_head": (False, None)}
    for name, known in wanted.items():
        if fields.get(name) not in known:
            raise CheckpointError(
                f"{where}: quantization_config.{name} is {fields.get(name)!r}; with {method!r} only "
                f"{' or '.join(repr(value) for value in known if value is not None)} is read."
            )
    group_size = fields.get("group_size")
    if type(group_size) is not int or not _is_group(group_size):
        raise CheckpointError(
            f"{where}: quantization_config.group_size is {group_size!r}; groups of "
            f"{', '.join(map(str, SHORT_GROUPS))}, of multiples of {BLOCK} and {WHOLE_COLUMN} (all inputs) are read."
        )
    # GPTQ's first format keeps a zero point less one.
    is_less_one = method == "gptq" and fields.get("checkpoint_format") != "gptq_v2"
    return StoredInt4(method=method, group_size=group_size, zero_offset=int(is_less_one))


def _is_group(size: int) -> bool:
    return size == WHOLE_COLUMN or size in SHORT_GROUPS or (size > 0 and size % BLOCK == 0)
