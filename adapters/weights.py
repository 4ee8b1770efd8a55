"""An adapter's tensors in the layout that the engine multiplies with: cast once, scaled once, in one buffer.

    flat   [ A of (layer 0, q|k|v) | B q | B k | B v | A of (layer 0, o) | B o | ... ]

With one buffer, a transfer to a device is one copy. The A's of modules that read the same input are stacked, so that
one matrix product serves all of them; each module keeps its own rank, and nothing is padded. An adapter's other changes
are in `Extras`, which is empty for most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter

import torch

from adapters.experts import is_of_experts
from adapters.peft_format import ROUTER, WHOLE_MODEL

FUSED_GROUPS: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that read the same input, in the order in which the decoder concatenates their outputs."""
_PLACE_BY_MODULE = {
    name: (group, place) for group, names in enumerate(FUSED_GROUPS) for place, name in enumerate(names)
}


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
    """

    columns: Mapping[tuple[int, str], Columns] = field(default_factory=dict)
    matrices: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors."""
        return [t for item in self.columns.values() for t in (item.gain, item.shift)] + list(self.matrices.values())


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

    def packed(self) -> AdapterWeights:
        """Cast, scale, stack and pack the modules into host memory.

        The scaling is multiplied into B in float32 before the cast: it then costs nothing at run time, and B is rounded
        once, whereas scaling the low-precision result would round it again for every token.
        """
        places: list[_Place] = []
        offset = 0
        modules_by_layer: dict[int, list[str]] = {}
        for layer, module in self.projections:
            modules_by_layer.setdefault(layer, []).append(module)
        for layer, present in sorted(modules_by_layer.items()):
            for names in _groups_of(present):
                members = [(name, self.projections[(layer, name)]) for name in names]
                place = _Place(
                    layer=layer,
                    offset=offset,
                    in_features=members[0][1].a.shape[1],
                    modules=tuple((name, item.a.shape[0], item.b.shape[0]) for name, item in members),
                )
                places.append(place)
                offset += sum(item.a.numel() + item.b.numel() for _, item in members)
        weights = AdapterWeights(torch.empty(offset, dtype=self.dtype), tuple(places), self.extras)
        for (layer, module), item in self.projections.items():
            projection = weights.projection(layer, module)
            assert projection is not None
            projection.a.copy_(item.a)
            scaled = item.b.to(torch.float32).mul(item.scaling)
            projection.b.copy_(scaled if item.gain is None else scaled.mul_(item.gain[:, None]))
        return weights


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
    """One module ready for use: y += (x a^T) b^T.

    Attributes:
        a: [rank, in], engine's dtype; a view of the group's stacked `a`.
        b: [out, rank], engine's dtype, with the adapter's scaling multiplied in.
        start, end: half-open range of rows in the group's `a`.
    """

    a: torch.Tensor
    b: torch.Tensor
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionGroup:
    """The modules of one layer that share an input: `a` [sum of ranks, in], and each targeted module by name."""

    a: torch.Tensor
    projection_by_module: Mapping[str, Projection]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Location of a group in the flat buffer, in elements."""

    layer: int
    offset: int
    in_features: int
    modules: tuple[tuple[str, int, int], ...]
    """(module, rank, out) of each."""


class AdapterWeights:
    """All tensors of one adapter on one device, views of `flat`. Immutable after construction; safe to share."""

    def __init__(self, flat: torch.Tensor, places: tuple[_Place, ...], extras: Extras | None = None) -> None:
        self.flat = flat
        self.extras = extras or Extras()
        self._places = places
        self.changes_whole_model = _changes_whole_model((place.layer for place in places), self.extras)
        """Whether it changes anything but linear modules of the layers: the embedding, norms, the output matrix."""
        names = (module for place in places for module, _, _ in place.modules)
        self.has_experts = any(is_of_experts(module) or module == ROUTER for module in names)
        """Whether MoE experts or their routers are changed; experts' modules are named as in `adapters.experts`."""
        self._group_by_key: dict[tuple[int, str], ProjectionGroup] = {}
        for place in places:
            group = _group_at(flat, place)
            for module in group.projection_by_module:
                self._group_by_key[(place.layer, module)] = group

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return self.flat.nbytes + sum(tensor.nbytes for tensor in self.extras.tensors())

    @property
    def num_pages(self) -> int:
        """Number of lent cache pages that it needs; 0 if it cannot be stored in lent pages."""
        return 0

    def is_finite(self) -> bool:
        """Tell whether all values are finite."""
        # Check the extremes, which are NaN if any value is: checking each value takes ten times as long.
        tensors = [tensor for tensor in (self.flat, *self.extras.tensors()) if tensor.numel()]
        return all(bool(extreme.isfinite()) for tensor in tensors for extreme in torch.aminmax(tensor))

    def projection(self, layer: int, module: str) -> Projection | None:
        """Return the module's matrices, or None if the adapter does not target it."""
        group = self._group_by_key.get((layer, module))
        return None if group is None else group.projection_by_module[module]

    def group(self, layer: int, modules: Iterable[str]) -> ProjectionGroup | None:
        """Return the group that the modules (members of one of `FUSED_GROUPS`) belong to; None if none is targeted."""
        for module in modules:
            group = self._group_by_key.get((layer, module))
            if group is not None:
                return group
        return None

    def to(self, device: torch.device, pages: Sequence[torch.Tensor] = ()) -> AdapterWeights:
        """Copy `flat` to a device in one transfer on the current stream; shares memory if it is already there.

        Args:
            pages: `num_pages` byte buffers on that device to copy into; empty to allocate memory.
        """
        if pages:
            raise AssertionError("this adapter does not lie in pages")
        return AdapterWeights(self.flat.to(device, non_blocking=True), self._places, self.extras)

    def keep_for(self, stream: torch.cuda.Stream) -> None:
        """Delay reuse of the memory, once freed, until the work queued on `stream` by then is done."""
        self.flat.record_stream(stream)

    def pinned(self) -> AdapterWeights:
        """Copy to page-locked host memory, from which a transfer to a GPU is asynchronous."""
        return AdapterWeights(self.flat.pin_memory(), self._places, self.extras)


def _changes_whole_model(layers: Iterable[int], extras: Extras) -> bool:
    return (
        WHOLE_MODEL in layers
        or bool(extras.matrices)
        or any(layer == WHOLE_MODEL or module.endswith("norm") for layer, module in extras.columns)
    )


def _groups_of(present: Iterable[str]) -> list[list[str]]:
    """Split a layer's modules into fused groups and single modules, per expert, in a fixed order."""
    placed = []
    for module in present:
        parent, _, name = module.rpartition(".")
        group, place = _PLACE_BY_MODULE.get(name, (len(FUSED_GROUPS), 0))
        placed.append(((parent, group, name if group == len(FUSED_GROUPS) else ""), place, module))
    return [[module for _, _, module in members] for _, members in groupby(sorted(placed), itemgetter(0))]


def _group_at(flat: torch.Tensor, place: _Place) -> ProjectionGroup:
    """View one group of the buffer."""
    total_rank = sum(rank for _, rank, _ in place.modules)
    end = place.offset + total_rank * place.in_features
    a = flat[place.offset : end].view(total_rank, place.in_features)
    projections: dict[str, Projection] = {}
    row = 0
    for module, rank, out_features in place.modules:
        b = flat[end : end + out_features * rank].view(out_features, rank)
        projections[module] = Projection(a=a[row : row + rank], b=b, start=row, end=row + rank)
        row += rank
        end += out_features * rank
    return ProjectionGroup(a=a, projection_by_module=projections)
