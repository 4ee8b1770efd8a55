"""An adapter's tensors as the engine multiplies with them: cast once, scaled once, each module at its own rank.

Devices with kernels of their own lay them out anew, in one buffer (`engine.cpu.native_lora`,
`engine.gpu.tabled_adapter`). Changes other than low-rank products are in `Extras`, which is empty for most adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from adapters.experts import is_of_experts
from adapters.tensor_names import ROUTER, WHOLE_MODEL

FUSED_GROUPS: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that read the same input, in the order in which the decoder concatenates their outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawProjection:
    """One module as read from the file: `a` [rank, in] and `b` [out, rank] in the file's dtype, and their scaling.

    Attributes:
        gain: [out] float32, multiplies each column of the product in addition to `scaling`; None for 1.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    gain: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Affine change of a module's output y before the product is added: y * gain + shift, both [out] float32."""

    gain: torch.Tensor
    shift: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Changes of an adapter other than low-rank products of the layers' linear modules.

    Attributes:
        columns: by (layer, module), of linear modules and norms: from biases, DoRA magnitudes and norm weights.
        matrices: "embed_tokens" or "lm_head" [vocab, hidden] in the engine's dtype; each replaces the base's.
        head: [labels, hidden] float32, the classifier of the adapter; None for none. Always in host memory.
    """

    columns: Mapping[tuple[int, str], Columns] = field(default_factory=dict)
    matrices: Mapping[str, torch.Tensor] = field(default_factory=dict)
    head: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors."""
        columns = [t for item in self.columns.values() for t in (item.gain, item.shift)]
        return [*columns, *self.matrices.values(), *([] if self.head is None else [self.head])]


@dataclass(frozen=True, slots=True, kw_only=True)
class RawAdapter:
    """An adapter as read from its file: modules by (layer, module), the dtype to cast them to, and its extras."""

    projections: Mapping[tuple[int, str], RawProjection]
    dtype: torch.dtype
    extras: Extras = field(default_factory=Extras)

    @property
    def changes_whole_model(self) -> bool:
        """Whether it changes anything but linear modules of the layers: the embedding, norms, the output matrix."""
        return _changes_whole_model((layer for layer, _ in self.projections), self.extras)

    def scaled(self) -> AdapterWeights:
        """Cast and scale the modules.

        The scaling is multiplied into B in float32 before the cast: it then costs nothing at run time, and B is rounded
        once, whereas scaling the low-precision result would round it again for every token.
        """
        projections = {}
        for key, item in self.projections.items():
            b = item.b.to(torch.float32).mul(item.scaling)
            b = b if item.gain is None else b.mul_(item.gain[:, None])
            # A copy, or the whole file would stay in memory.
            projections[key] = Projection(a=item.a.to(self.dtype, copy=True), b=b.to(self.dtype))
        return AdapterWeights(projections, self.dtype, self.extras)


def split_modules(raw: RawAdapter, widths: Mapping[str, Mapping[str, int]]) -> RawAdapter:
    """Return the adapter with fused modules split into their parts, which share the fused A.

    Args:
        widths: fused module -> output width of each part, in order.
    """
    projections: dict[tuple[int, str], RawProjection] = {}
    for (layer, module), item in raw.projections.items():
        for name, at in _parts_of(module, item.b.shape[0], widths):
            gain = None if item.gain is None else item.gain[at]
            projections[layer, name] = RawProjection(a=item.a, b=item.b[at], scaling=item.scaling, gain=gain)
    columns: dict[tuple[int, str], Columns] = {}
    for (layer, module), both in raw.extras.columns.items():
        for name, at in _parts_of(module, len(both.gain), widths):
            columns[layer, name] = Columns(gain=both.gain[at], shift=both.shift[at])
    return replace(raw, projections=projections, extras=replace(raw.extras, columns=columns))


def _parts_of(module: str, width: int, widths: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, slice]]:
    start = 0
    for name, part_width in widths.get(module, {module: width}).items():
        yield name, slice(start, start + part_width)
        start += part_width


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """One module ready for use: y += (x a^T) b^T, with `a` [rank, in] and `b` [out, rank] in the engine's dtype."""

    a: torch.Tensor
    b: torch.Tensor


class AdapterWeights:
    """All tensors of one adapter on one device. Immutable after construction; safe to share."""

    def __init__(
        self, projections: Mapping[tuple[int, str], Projection], dtype: torch.dtype, extras: Extras | None = None
    ) -> None:
        self.dtype = dtype
        self.extras = extras or Extras()
        self._projections = projections
        self.changes_whole_model = _changes_whole_model((layer for layer, _ in projections), self.extras)
        """Whether it changes anything but linear modules of the layers: the embedding, norms, the output matrix."""
        self.has_experts = any(is_of_experts(module) or module == ROUTER for _, module in projections)
        """Whether MoE experts or their routers are changed; experts' modules are named as in `adapters.experts`."""

    def _tensors(self) -> list[torch.Tensor]:
        """Return all that it holds."""
        return [part for item in self._projections.values() for part in (item.a, item.b)] + self.extras.tensors()

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors())

    @property
    def host_bytes(self) -> int:
        """Memory in bytes that it takes in host memory, if it is there."""
        return self.num_bytes

    @property
    def num_pages(self) -> int:
        """Number of lent cache pages that it needs; 0 if it cannot be stored in lent pages."""
        return 0

    def is_finite(self) -> bool:
        """Tell whether all values are finite."""
        # Check the extremes, which are NaN if any value is: checking each value takes ten times as long.
        tensors = [tensor for tensor in self._tensors() if tensor.numel()]
        return all(bool(extreme.isfinite()) for tensor in tensors for extreme in torch.aminmax(tensor))

    def projection(self, layer: int, module: str) -> Projection | None:
        """Return the module's matrices, or None if the adapter does not target it."""
        return self._projections.get((layer, module))


def _changes_whole_model(layers: Iterable[int], extras: Extras) -> bool:
    return (
        WHOLE_MODEL in layers
        or bool(extras.matrices)
        or any(layer == WHOLE_MODEL or module.endswith("norm") for layer, module in extras.columns)
    )
