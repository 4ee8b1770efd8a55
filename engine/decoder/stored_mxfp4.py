"""The layout of MXFP4 expert weights in a gpt-oss checkpoint, whose `quantization_config` names mxfp4.

    experts.gate_up_proj_blocks  [experts, out, in / 32, 16]    two values (e2m1) per byte, the first in the low bits
    experts.gate_up_proj_scales  [experts, out, in / 32]        one power of two (e8m0) per 32 values

Experts left in full precision have one tensor without either suffix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from engine.decoder.tensor_kinds import Shape, TensorKind
from engine.errors import CheckpointError

MXFP4 = "mxfp4"
GROUP = 32
"""Values that share a scale."""
UNIT_BYTES, UNIT_INPUTS = 4, 128
"""Layout of scales on a GPU: `UNIT_BYTES` hold those of `UNIT_INPUTS` inputs."""
BYTES = ("U8",)


@dataclass(frozen=True, slots=True)
class StoredMxfp4:
    """The layout of a checkpoint's experts; `engine.loading.mxfp4` reads it."""

    title: ClassVar[str] = "4-bit (mxfp4)"
    stays: ClassVar[bool] = True

    def tensors(self, module: str, shape: Shape, dtype: str | None) -> dict[str, TensorKind]:
        """Return the required tensors of (experts, in, out); `dtype` is that of a dense tensor, None if quantized."""
        if dtype is not None:
            return {module: TensorKind((shape,))}
        count, depth, out = shape
        scales = (count, out, depth // GROUP)
        return {
            f"{module}_blocks": TensorKind(((*scales, GROUP // 2),), BYTES),
            f"{module}_scales": TensorKind((scales,), BYTES),
        }

    def num_bytes(self, out: int, depth: int, element_bytes: int) -> float:
        """Return the bytes of one expert's module on a GPU, in the layout of `kernels.mxfp4`."""
        return out * (depth / 2 + UNIT_BYTES * -(-depth // UNIT_INPUTS))

    def check_sizes(self, sizes: Mapping[str, tuple[int, int]], where: str) -> None:
        """Refuse models without such experts, and experts whose inputs do not divide into whole groups.

        Raises:
            CheckpointError: names the first such module, if there is one.
        """
        if not sizes:
            raise CheckpointError(
                f"{where}: quantization_config.quant_method is {MXFP4!r}, supported for gpt-oss only."
            )
        for module, (depth, _) in sizes.items():
            if depth % GROUP:
                raise CheckpointError(f"{where}: {module} has {depth} inputs; {GROUP} must divide them.")
