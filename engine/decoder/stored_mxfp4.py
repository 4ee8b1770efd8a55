"""How experts' weights of 4 bits lie in a checkpoint of gpt-oss, whose `quantization_config` names mxfp4.

    experts.gate_up_proj_blocks  [experts, out, in / 32, 16]    two numbers (e2m1) in a byte, the first one's bits lower
    experts.gate_up_proj_scales  [experts, out, in / 32]        a power of two for each 32 (e8m0)

What a checkpoint leaves as it was has a tensor without either ending.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.decoder.tensor_kinds import Shape, TensorKind
from engine.errors import CheckpointError

MXFP4 = "mxfp4"
GROUP = 32
"""Numbers that share a scale."""
UNIT_BYTES, UNIT_INPUTS = 4, 128
"""Of the scales on a GPU: those of so many inputs lie in so many bytes."""
BYTES = ("U8",)


@dataclass(frozen=True, slots=True)
class StoredMxfp4:
    """The layout of all experts of a checkpoint; `engine.loading.mxfp4` reads it."""

    @property
    def title(self) -> str:
        """What the weights are."""
        return "4-bit (mxfp4)"

    @property
    def stays(self) -> bool:
        """Whether a GPU multiplies by the weights as they are."""
        return True

    def tensors(self, module: str, shape: Shape, dtype: str | None) -> dict[str, TensorKind]:
        """Return the tensors that experts of (experts, in, out) must have; `dtype`: of their numbers, None for none."""
        if dtype is not None:
            return {module: TensorKind((shape,))}
        count, depth, out = shape
        scales = (count, out, depth // GROUP)
        return {
            f"{module}_blocks": TensorKind(((*scales, GROUP // 2),), BYTES),
            f"{module}_scales": TensorKind((scales,), BYTES),
        }

    def num_bytes(self, out: int, depth: int, element_bytes: int) -> float:
        """Return what one expert's module takes on a GPU, as `kernels.mxfp4` holds it."""
        return out * (depth / 2 + UNIT_BYTES * -(-depth // UNIT_INPUTS))

    def check_sizes(self, sizes: Mapping[str, tuple[int, int]], where: str) -> None:
        """Refuse what has no such experts, and experts whose inputs are no whole number of groups.

        Raises:
            CheckpointError: naming one.
        """
        if not sizes:
            raise CheckpointError(
                f"{where}: quantization_config.quant_method is {MXFP4!r}, supported for gpt-oss only."
            )
        for module, (depth, _) in sizes.items():
            if depth % GROUP:
                raise CheckpointError(f"{where}: {module} has {depth} inputs; {GROUP} must divide them.")
