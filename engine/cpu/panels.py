"""Weights laid out in panels for the CPU's products: one matrix, or those of all experts of a layer in sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from engine.decoder.model_spec import ModelSpec
from engine.loading.int4 import Int4Weight
from engine.loading.mxfp4 import Mxfp4Weight
from engine.loading.weight import Weight, dense
from kernels.packed_linear.reference import LANES, as_panels
from kernels.packed_linear_int4.reference import GROUPS, STEP, beside_panels, group_of, to_int4_panels
from kernels.packed_linear_int8.reference import quantize_rows, to_int8_panels
from kernels.packed_logits_int8.reference import STEP as BYTES_PER_WORD
from kernels.program import Pool

Empty = Callable[[int, torch.dtype], torch.Tensor]
"""An allocator like `kernels.arena.Arena.empty`."""
INT8_KERNEL, INT4_KERNEL, MXFP4_KERNEL = "packed_linear_int8", "packed_linear_int4", "packed_linear_mxfp4"
LOGITS_KERNEL, INT8_LOGITS_KERNEL = "packed_logits", "packed_logits_int8"
EMBED_BY_LOGITS = {LOGITS_KERNEL: "embed", INT8_LOGITS_KERNEL: "embed_int8"}
"""Kernel of logits -> the one that reads rows of the same panels; its sizes are the first of theirs, and the group."""
GROUPED_TENSORS, GROUPED_SIZES = 6, 6
"""Arguments of a grouped product (one matrix per expert) that precede the groups (`kernels/experts/cpu.cpp`)."""


def can_attend(spec: ModelSpec, block_tokens: int) -> bool:
    """Return whether heads and blocks fill whole panels, in which the kernels keep keys and values."""
    return not block_tokens % LANES and not any(shape.dim % LANES for shape in spec.kv_shapes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """Matrices [out, in] of one shape, in the format of a kernel.

    Attributes:
        kernel: its name.
        tensors: its tensor arguments between inputs and bias, [matrices, ...] each.
        sizes: its size arguments.
        depth, out: columns (inputs) and rows (outputs) of a matrix.
    """

    kernel: str
    tensors: tuple[torch.Tensor, ...]
    sizes: tuple[int, ...]
    depth: int
    out: int


def lay_out(matrices: Iterable[Weight], count: int, quantization: str | None, empty: Empty, pool: Pool) -> Panels:
    """Lay out `count` matrices of one shape, one per thread at a time, so that only those exist twice.

    Args:
        quantization: "int8" or "int4" to quantize them, the latter if it has groups that fit; None to keep their
            format, 4-bit ones too.
    """
    each = iter(matrices)
    first = next(each)
    kernel, parts, sizes = _in_panels(first, quantization, pool)
    tensors = tuple(empty(count * part.numel(), part.dtype).view(count, *part.shape) for part in parts)

    def put(index: int, parts: Iterable[torch.Tensor]) -> None:
        for tensor, part in zip(tensors, parts, strict=True):
            tensor[index] = part

    def put_another(index: int, matrix: Weight) -> None:
        put(index, _in_panels(matrix, quantization, pool)[1])

    put(0, parts)
    if count > 1:
        with ThreadPoolExecutor(pool.num_threads) as threads:
            assert sum(1 for _ in threads.map(put_another, range(1, count), each)) == count - 1
    out, depth = first.shape
    return Panels(kernel=kernel, tensors=tensors, sizes=sizes, depth=depth, out=out)


def lay_out_vocabulary(matrix: torch.Tensor, quantization: str | None, empty: Empty, pool: Pool) -> Panels:
    """Lay out the output matrix [vocab, hidden], for the kernel of logits and that of embeddings in `EMBED_BY_LOGITS`.

    Whatever the quantization of layers, it has 8 bits, in groups: every token depends on it, and 4 would be felt. Its
    inputs are not quantized.
    """
    vocab, hidden = matrix.shape
    if quantization is None or hidden % min(GROUPS):
        return replace(lay_out([matrix], 1, None, empty, pool), kernel=LOGITS_KERNEL)
    group, num_panels = group_of(hidden), -(-vocab // LANES)
    words = empty(num_panels * hidden // BYTES_PER_WORD * LANES, torch.int32)
    scales = empty(num_panels * hidden // group * LANES, torch.float32)
    pool.call("lay_out_logits_int8", matrix.dtype, vocab, (matrix.contiguous(), words, scales), (hidden, group))
    return Panels(
        kernel=INT8_LOGITS_KERNEL, tensors=(words, scales), sizes=(hidden, vocab, group), depth=hidden, out=vocab
    )


def grouped_arguments(
    panels: Panels,
    inputs: Sequence[torch.Tensor],
    biases: torch.Tensor | None,
    y: torch.Tensor,
    groups: torch.Tensor,
    num_experts: int,
) -> tuple[tuple[torch.Tensor | None, ...], tuple[int, ...]]:
    """Return the tensor and size arguments of the kernel `grouped_{panels.kernel}`: each expert's product of its rows.

    Args:
        inputs: the tensor arguments of `panels.kernel` before its weights, with one row per (row, expert) pair.
        biases: [experts, out]; None for none.
        y: the result, [pairs, out].
        groups: as `kernels.experts.reference.sort_by_expert` returns them.
    """
    own = (*inputs, *panels.tensors, biases, y)
    beside = [None] * (GROUPED_TENSORS - len(own))
    strides = [0 if tensor is None else tensor.stride(0) * tensor.element_size() for tensor in (*own, *beside)]
    # In bytes, between rows (of inputs and result) and between experts (of weights and biases).
    of_experts = range(len(inputs), len(own) - 1)
    told = torch.tensor([(0, stride) if at in of_experts else (stride, 0) for at, stride in enumerate(strides)])
    sizes = (*panels.sizes, *[0] * (GROUPED_SIZES - len(panels.sizes)), num_experts)
    return (*own, *beside, groups, told), sizes


def _in_panels(
    weight: Weight, quantization: str | None, pool: Pool
) -> tuple[str, tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Return the kernel for a weight, the kernel's tensors of the weight, and its sizes."""
    out, depth = weight.shape
    if quantization == "int8":
        int8, column_scales = quantize_rows(dense(weight))
        panels = to_int8_panels(int8)
        return INT8_KERNEL, (panels, column_scales), (panels.shape[1] * panels.shape[3], out)
    if isinstance(weight, Int4Weight):
        levels, scales, zeros = weight.levels, weight.scales.t().float(), weight.zeros.t()
        laid = (to_int4_panels(levels), beside_panels(scales), beside_panels(zeros.to(torch.uint8)))
        return INT4_KERNEL, laid, (depth, out, depth // scales.shape[1])
    if isinstance(weight, Mxfp4Weight):
        held = (to_int4_panels(weight.levels), beside_panels(weight.scales))
        return MXFP4_KERNEL, held, (depth, out, depth // weight.exponents.shape[1])
    if quantization == "int4" and not depth % min(GROUPS):
        group = group_of(depth)
        return INT4_KERNEL, _in_int4_panels(dense(weight), group, pool), (depth, out, group)
    return "packed_linear", (as_panels(dense(weight)),), (depth, out)


def _in_int4_panels(weight: torch.Tensor, group: int, pool: Pool) -> tuple[torch.Tensor, ...]:
    """Quantize as `to_levels` does; return the result laid out in panels."""
    (out, depth), weight = weight.shape, weight.contiguous()
    num_panels = -(-out // LANES)
    panels = torch.empty(num_panels, depth // STEP, LANES, dtype=torch.int32)
    beside = [torch.empty(num_panels, depth // group, LANES, dtype=dtype) for dtype in (torch.float32, torch.uint8)]
    pool.call_here("lay_out_int4", weight.dtype, out, (weight, panels, *beside), (depth, group))
    return panels, *beside
