"""Apply adapters to a step's batch: segments of tokens, each multiplied by its own adapter at its own rank.

    tokens   0 ...... 5 ...... 9 .......... 20
             [ base  )[ A     )[ B         )

Base tokens enter no product, a module that no adapter of the batch targets costs a dictionary lookup, and a batch
without adapters has no segments and no `LoraProducts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from adapters.experts import expert_module
from adapters.identity import AdapterDigest
from adapters.tensor_names import WHOLE_MODEL
from adapters.weights import AdapterWeights
from engine.adapter_tables import EXPERT_MODULES, HEAD_NORMS
from kernels.experts.reference import Part
from kernels.lora_expand.reference import lora_expand
from kernels.lora_experts.reference import lora_experts
from kernels.lora_gather.reference import lora_gather
from kernels.lora_logits.reference import lora_logits
from kernels.lora_shrink.reference import lora_shrink

Segment = tuple[AdapterDigest | None, int, int]
"""(adapter or None for the base model, start, end): a half-open range of the batch's tokens."""


WeightsOf = Callable[[AdapterDigest], AdapterWeights]
"""Returns the device weights of a pinned adapter, as `engine.adapter_pool.AdapterPool.weights` does."""


class HeadNorms(NamedTuple):
    """Norm weights of the query and key heads.

    Attributes:
        q, k: [head_dim], or [tokens, head_dim] if adapters of the step have their own.
        entry: index of the layer's head norms in an adapter's table, for kernels that read the table; else None.
    """

    q: torch.Tensor
    k: torch.Tensor
    entry: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSegment:
    """A run of tokens [start, end) of one adapter."""

    weights: AdapterWeights
    start: int
    end: int


def collect_segments(segments: Iterable[Segment], weights_of: WeightsOf) -> tuple[AdapterSegment, ...]:
    """Look up the adapters of a batch's segments; join adjacent segments of one adapter and omit those of the base.

    Segments must be in ascending order and must not overlap; they need not cover the batch.
    """
    joined: list[tuple[AdapterDigest, int, int]] = []
    for digest, start, end in segments:
        if digest is None or start == end:
            continue
        if joined and joined[-1][0] == digest and joined[-1][2] == start:
            joined[-1] = (digest, joined[-1][1], end)
        else:
            joined.append((digest, start, end))
    return tuple(AdapterSegment(weights=weights_of(d), start=s, end=e) for d, s, e in joined)


def cut_segments(segments: Iterable[AdapterSegment], start: int, end: int) -> list[AdapterSegment]:
    """Return the parts of segments among the tokens [start, end), counted from `start`."""
    inside = (segment for segment in segments if segment.start < end and start < segment.end)
    return [
        replace(segment, start=max(segment.start, start) - start, end=min(segment.end, end) - start)
        for segment in inside
    ]


class LinearProducts(Protocol):
    """Applies a step's adapters to linear modules, segment by segment."""

    def multiply(
        self,
        product: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        layer: int,
        modules: Sequence[str],
        splits: Sequence[int],
    ) -> torch.Tensor:
        """Return y * gain + shift + scaling * (x A^T) B^T, where y is the base's `product` of `x` [tokens, in].

        `modules` is a single module or one of `adapters.weights.FUSED_GROUPS`, which share the input; `splits` are the
        widths of their outputs, side by side. See `adapters.weights.Columns` for gain and shift.
        """
        ...


class LoraProducts(LinearProducts, Protocol):
    """Applies a step's adapters in place, segment by segment.

    Rows are tokens; in `head` and in the final norm they are samples.
    """

    def embed(self, token_ids: torch.Tensor, x: torch.Tensor) -> None:
        """Apply the adapters to the embedded tokens `x` [tokens, hidden]."""
        ...

    def norm(self, layer: int, module: str, h: torch.Tensor) -> None:
        """Multiply normalized states [rows, width] by the ratio of the adapters' norm weights to the base's.

        The rows of `h` need not be contiguous.
        """
        ...

    def head_norms(self, layer: int, norms: HeadNorms, num_tokens: int) -> HeadNorms:
        """Return the norm weights of a layer's heads, for each token those of its adapter."""
        ...

    def head(self, h: torch.Tensor, logits: torch.Tensor) -> None:
        """Apply the adapters to `logits` [samples, vocab] float32 of final hidden states `h` [samples, hidden]."""
        ...


@runtime_checkable
class PartedLora(LoraProducts, Protocol):
    """Also applies adapters to some tokens of a step, for modules that are called row by row."""

    def begin(self, num_tokens: int) -> None:
        """Prepare for a step's products, where `embed` is not called."""
        ...

    def of_tokens(self, start: int, end: int) -> LinearProducts | None:
        """Return what applies the adapters in products of the step's tokens [start, end) alone; None for nothing."""
        ...


class LoraBatch:
    """`LoraProducts` in torch operators. Valid until the step's forward pass ends; engine's thread only."""

    def __init__(self, segments: Sequence[AdapterSegment], samples: Sequence[AdapterSegment] = ()) -> None:
        self._segments = tuple(segments)
        self._samples = tuple(samples)
        self._whole = tuple(segment for segment in self._segments if segment.weights.changes_whole_model)
        self._experts = tuple(segment for segment in self._segments if segment.weights.has_experts)

    @property
    def has_experts(self) -> bool:
        """Whether any of the adapters changes experts."""
        return bool(self._experts)

    def multiply(
        self,
        product: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        layer: int,
        modules: Sequence[str],
        splits: Sequence[int],
    ) -> torch.Tensor:
        """Shrink and expand each module of each segment."""
        y = product(x)
        for module, part in zip(modules, y.split(list(splits), dim=1), strict=True):
            _change_columns(self._segments, layer, module, part)
            for segment in self._segments:
                projection = segment.weights.projection(layer, module)
                if projection is not None:
                    spans = [(segment.start, segment.end)]
                    shrunk = lora_shrink(x=x, weights=[projection.a], segments=spans)
                    lora_expand(y=part, shrunk=shrunk, weights=[projection.b], segments=spans)
        return y

    def begin(self, num_tokens: int) -> None:
        """Nothing has to be prepared."""

    def of_tokens(self, start: int, end: int) -> LoraBatch:
        """Cut the segments."""
        return LoraBatch(cut_segments(self._segments, start, end))

    def change_expert(
        self, layer: int, part: Part, expert: int, rows: torch.Tensor, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        """Apply the adapters to a product of one expert, as the `change` of `multiply_by_experts` does."""
        found = []
        for segment in self._experts:
            matrices = []
            for module in EXPERT_MODULES[part]:
                projection = segment.weights.projection(layer, expert_module(expert, module))
                if projection is not None:
                    matrices.append((projection.a, projection.b, y.shape[1] // 2 if module == "up_proj" else 0))
            if matrices:
                found.append(((segment.start, segment.end), matrices))
        lora_experts(x=x, y=y, rows=rows, segments=[span for span, _ in found], weights=[own for _, own in found])

    def embed(self, token_ids: torch.Tensor, x: torch.Tensor) -> None:
        """Gather rows of the adapters' matrices."""
        for segment in self._whole:
            span = (segment.start, segment.end)
            own = segment.weights.extras.matrices.get("embed_tokens")
            if own is not None:
                x[segment.start : segment.end] = lora_gather(token_ids=token_ids, weights=[own], segments=[span])[0]
            _change_columns((segment,), WHOLE_MODEL, "embed_tokens", x)
            projection = segment.weights.projection(WHOLE_MODEL, "embed_tokens")
            if projection is not None:
                shrunk = lora_gather(token_ids=token_ids, weights=[projection.a.T], segments=[span])
                lora_expand(y=x, shrunk=shrunk, weights=[projection.b], segments=[span])

    def norm(self, layer: int, module: str, h: torch.Tensor) -> None:
        """Scale the columns of each segment whose adapter has the norm."""
        _change_columns(self._samples if layer == WHOLE_MODEL else self._whole, layer, module, h)

    def head_norms(self, layer: int, norms: HeadNorms, num_tokens: int) -> HeadNorms:
        """Repeat the norms per token if an adapter has its own."""
        if not any((layer, name) in s.weights.extras.columns for s in self._whole for name in HEAD_NORMS):
            return norms
        q, k = norms.q.repeat(num_tokens, 1), norms.k.repeat(num_tokens, 1)
        for name, weights in zip(HEAD_NORMS, (q, k), strict=True):
            _change_columns(self._whole, layer, name, weights)
        return HeadNorms(q, k)

    def head(self, h: torch.Tensor, logits: torch.Tensor) -> None:
        """Multiply by the adapters' own matrices, then add their low-rank products."""
        for segment in self._samples:
            states, part = h[segment.start : segment.end], logits[segment.start : segment.end]
            own = segment.weights.extras.matrices.get("lm_head")
            if own is not None:
                lora_logits(x=h, logits=logits, weights=[own], segments=[(segment.start, segment.end)])
            _change_columns((segment,), WHOLE_MODEL, "lm_head", logits)
            projection = segment.weights.projection(WHOLE_MODEL, "lm_head")
            if projection is not None:
                part += (states @ projection.a.T) @ projection.b.T


def change_norms(
    adapters: Sequence[AdapterSegment], ranges: Sequence[tuple[int, int]], states: Sequence[torch.Tensor]
) -> None:
    """Change final hidden states [tokens of the range, hidden] in place to those of the adapters' final norms."""
    for (start, end), h in zip(ranges, states, strict=True):
        own = (segment for segment in adapters if segment.start <= start and end <= segment.end)
        _change_columns((replace(segment, start=0, end=len(h)) for segment in own), WHOLE_MODEL, "norm", h)


def _change_columns(segments: Iterable[AdapterSegment], layer: int, module: str, y: torch.Tensor) -> None:
    """Multiply by the gains and add the shifts of the segments' adapters for a module, if any; in float32."""
    for segment in segments:
        columns = segment.weights.extras.columns.get((layer, module))
        if columns is not None:
            part = y[segment.start : segment.end]
            part.copy_(part.float() * columns.gain + columns.shift)
