"""CPU operations by our own compiled kernels, recorded at the first call and replayed at every step.

Most of a small model's decode step is operator dispatch. Here the decoder runs once, over the runner's whole buffers,
and each operation appends itself to a `Program`; a step is then one call into C++. See `engine.cpu.recorded`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch

from adapters.tensor_names import ROUTER
from engine.backend import ExpertWeights, MixtureProduct, Product
from engine.cpu.called_backend import CalledBackend, SortedPairs, is_wide
from engine.cpu.native_lora import NativeLora
from engine.cpu.panels import can_attend, lay_out
from engine.decoder.decoder import DecoderBatch
from engine.decoder.experts import ExpertSpec
from engine.decoder.spec import DecoderSpec
from engine.loading.weight import split
from engine.lora import AdapterSegment, LoraProducts
from kernels.experts.reference import max_groups
from kernels.gated_activation.reference import Activation
from kernels.program import Pool, Program


def can_run(spec: DecoderSpec, block_tokens: int) -> bool:
    """Return whether the kernels support this geometry: the cache fills its panels, and all matrix sizes are even."""
    sizes = {spec.hidden_size, spec.q_size, *(size for shape in spec.linear_sizes() for size in shape)}
    return can_attend(spec, block_tokens) and all(size % 2 == 0 for size in sizes)


class NativeBackend(CalledBackend):
    """A `CalledBackend` that records its calls. The tensors that it returns hold no data until the program has run.

    Every result has its own buffer, which the same operation of the next layer reuses, so memory does not grow with
    depth. The decoder reads each result before it makes the next one of its kind.

    Args:
        dtype: of weights, activations and cache.
        max_rank: the highest rank of an adapter.
        quantization: as in `CalledBackend`.
    """

    def __init__(self, pool: Pool, dtype: torch.dtype, max_rank: int, *, quantization: str | None = None) -> None:
        super().__init__(pool, dtype, quantization)
        self.program = Program(pool)
        self.counts = torch.zeros(8, dtype=torch.int64)
        """Counts of the current step: tokens, rows, samples, the four segment counts of `NativeLora`, (token, expert)
        pairs."""
        self.carried: dict[int, torch.Tensor] = {}
        """Tensors that stay live across a pause, by address, with one row per token each."""
        self._tokens, self._rows, self._samples, self._pairs = (self.counts[i : i + 1] for i in (0, 1, 2, 7))
        self.adapters = NativeLora(self.program, dtype, max_rank, self.counts[3:7])
        self.num_chosen = 0
        """How many experts the router chooses for each token, 0 for a model without experts."""
        self._count_by_address: dict[int, torch.Tensor] = {}
        self._place_by_key: dict[tuple[object, ...], torch.Tensor] = {}

    def begin(self, whole: DecoderBatch) -> None:
        """Register which inputs have one row per token, per sample and per row of the batch."""
        self.know(whole.token_ids, whole.positions)
        self._count_by_address[whole.sampled.data_ptr()] = self._samples
        self._count_by_address[whole.attention[0].rows.data_ptr()] = self._rows
        self.adapters.begin(len(whole.attention[0].rows), len(whole.token_ids))
        self._segments = self.adapters.whole

    def know(self, *tensors: torch.Tensor) -> None:
        """Register inputs that have one row per token."""
        for tensor in tensors:
            self._count_by_address[tensor.data_ptr()] = self._tokens

    def vocabulary(self, embedding: torch.Tensor, head: torch.Tensor | None) -> tuple[Product, Product]:
        """Lay out in panels. The embedding reads its rows from panels too, so a tied matrix is stored once."""
        output = self._vocabulary(embedding if head is None else head, self._quantization)
        inputs = output if head is None else self._vocabulary(embedding, None)
        return partial(self._embed, inputs), partial(self._logits, output)

    def lora(self, segments: Sequence[AdapterSegment], samples: Sequence[AdapterSegment] = ()) -> LoraProducts | None:
        """Return products that read each step's adapters when the recording is replayed."""
        return self.adapters

    def take(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Record a copy of rows; each call has its own buffer."""
        out = self._like(indices, ("taken", len(self._place_by_key)), x.shape[1:])
        self._call("take_rows", indices, (x, indices, out), (out[0].numel(),))
        self._carry(out)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """Record the sum and the norm in one pass. A step may pause before it: all live state is then in `carried`."""
        # One buffer per input: a sub-layer's output may be normed too, and is still read when the next norm is written.
        h = x if weight is None else self._like(x, ("normed", x.data_ptr()), x.shape[1:])
        count, sizes = self._count_by_address[x.data_ptr()], (x.shape[1], is_wide(weight), x.shape[1])
        tensors, may_pause = (x, delta, weight, h), count is self._tokens
        self.program.add("add_rms_norm", self._dtype, count, tensors, sizes, (eps,), may_pause=may_pause)
        self._carry(x, delta)
        return h

    def norm_columns(self, x: torch.Tensor, start: int, weight: torch.Tensor, eps: float) -> None:
        """Record the in-place norm."""
        part, sizes = x[:, start:], (len(weight), is_wide(weight), x.shape[1])
        self._call("add_rms_norm", x, (part, None, weight, part), sizes, (eps,))

    def experts(self, weights: ExpertWeights, spec: ExpertSpec, activation: Activation) -> MixtureProduct:
        """Lay out in panels, one expert after another; record routing, products, activation and weighted sum."""
        router, gate_up, down, biases = weights
        self.num_chosen = spec.chosen
        to_logits = lay_out([router], 1, None, self._arena.empty, self._pool)
        router_bias, up_bias, down_bias = biases or (None, None, None)
        ups, downs = (self._lay_out(split(weight, spec.count), spec.count) for weight in (gate_up, down))

        def multiply(h: torch.Tensor, lora: LoraProducts | None = None, layer: int = 0) -> torch.Tensor:
            logits = partial(self._product, to_logits, "router", router_bias)
            pairs = self._route(self.adapters.multiply(logits, h, layer, (ROUTER,), (spec.count,)), spec)
            change = partial(
                self.adapters.change_experts,
                rows=pairs.rows,
                groups=pairs.groups,
                num_pairs=self._pairs,
                layer=layer,
                num_experts=spec.count,
            )
            return self._mixed(h, pairs, (ups, downs), (up_bias, down_bias), activation, change)

        return multiply

    def add_gated(self, y: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, delta: torch.Tensor) -> None:
        """Record the in-place sum."""
        self._call("add_gated", y, (y, x, gate, delta), (y.shape[1],))

    def rescale(self, x: torch.Tensor, factor: float, softcap: float = 0.0) -> None:
        """Record the in-place change."""
        count = self._count_by_address[x.data_ptr()]
        self.program.add("rescale", x.dtype, count, (x,), (x.shape[1],), (factor, softcap))

    def _route(self, logits: torch.Tensor, spec: ExpertSpec) -> SortedPairs:
        """Record the router's choice: one (row, expert) pair for each expert chosen by a row."""
        num_pairs = len(logits) * spec.chosen
        shares = self._like(logits, "shares", (spec.count,), torch.float32)
        weights = self._like(logits, "weights", (spec.chosen,), torch.float32)
        names, places = (self._like(logits, key, (spec.chosen,), torch.int32) for key in ("chosen", "places"))
        rows = self._place("rows of pairs", self._pairs, (num_pairs,), torch.int64)
        groups = self._place("groups", self._pairs, (max_groups(num_pairs, spec.count), 3), torch.int32)
        starts = self._place("starts", self._pairs, (spec.count,), torch.int32)
        sizes = (spec.count, spec.chosen)
        self._call("choose_experts", logits, (logits, shares, names, weights), (*sizes, spec.is_normed))
        self._call("sort_by_expert", logits, (names, rows, places, groups, starts), sizes)
        return SortedPairs(rows=rows, places=places, weights=weights, groups=groups, num_experts=spec.count)

    def _paired(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Record a copy of rows of any dtype as 4-byte words; a row's size in bytes is a multiple of 4."""
        out = self._like(rows, "paired", x.shape[1:], x.dtype)
        width = x.stride(0) * x.element_size() // 4
        self.program.add("take_rows", torch.float32, self._pairs, (x, rows, out), (width,))
        return out

    def _carry(self, *tensors: torch.Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None and self._count_by_address[tensor.data_ptr()] is self._tokens:
                self.carried[tensor.data_ptr()] = tensor

    def _like(
        self, x: torch.Tensor, key: object, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the buffer of a result with one row for each row of `x`."""
        return self._place(key, self._count_by_address[x.data_ptr()], (x.shape[0], *shape), dtype or self._dtype)

    def _place(self, key: object, count: torch.Tensor, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        full = (key, count.data_ptr(), dtype, *size)
        if full not in self._place_by_key:
            place = self._arena.empty(prod(size), dtype).view(size)
            if count is not self._samples:
                # Touch the pages now: faulting them in would take longer than the first prompt's arithmetic.
                # Not those of samples: a step mostly has few, and their logits are wider than all else.
                place.zero_()
            self._place_by_key[full] = place
            self._count_by_address[place.data_ptr()] = count
        return self._place_by_key[full]

    def _call(
        self,
        kernel: str,
        rows_of: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        sizes: Sequence[int],
        numbers: Sequence[float] = (),
    ) -> None:
        """Record the call."""
        self.program.add(kernel, self._dtype, self._count_by_address[rows_of.data_ptr()], tensors, sizes, numbers)
