"""`kernels.experts.reference` on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton

from kernels.architecture import current, shared_bytes
from kernels.experts.kernel import expert_product_kernel, expert_sum_kernel
from kernels.experts.reference import Part
from kernels.experts.routing import Routing, choose_experts, sort_by_expert
from kernels.experts.row_kernel import expert_down_kernel, expert_gate_up_kernel
from kernels.gated_activation.launch import activate_and_multiply
from kernels.gated_activation.reference import Activation
from kernels.mxfp4.reference import BLOCK as MXFP4_BLOCK
from kernels.mxfp4.reference import GROUP as MXFP4_GROUP
from kernels.mxfp4.reference import Mxfp4Matrix
from kernels.mxfp4.row_kernel import mxfp4_down_kernel, mxfp4_gate_up_kernel
from kernels.overlap import overlap
from kernels.streamed_linear.layout import BLOCK
from kernels.streamed_linear.reference import Fp8Matrix, Int4Matrix, Matrix

MAX_ROWS = 2
"""Up to this many rows are multiplied separately. More rows share experts and would be compute-bound that way."""
ROW_OUTPUTS, ROW_DEPTH, ROW_NUMBERS = 2, 1024, 8192
"""For one or two rows: outputs and inputs of a tile, and elements of a tile over all experts of a row."""
ROW_GROUPS = 32
"""For one or two rows and MXFP4: maximum groups per tile, one for each thread of a warp."""
GATE_UP_OUTPUTS, DOWN_OUTPUTS = 2, 16
"""Of those tiles: gate outputs, and outputs over all experts of a row, so that a thread has four per input it reads."""
MAX_FP8_DEPTH = 8192
"""For one or two rows, up to this many inputs of FP8 weights are one tile, as in `kernels.streamed_linear.launch`."""
SUM_BLOCK = 1024
Biases = tuple[torch.Tensor, torch.Tensor]
ExpertMatrix = Matrix | Mxfp4Matrix
"""Weights of all experts, stacked along the outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCut:
    """The tiling of a product: rows, outputs and inputs of a tile, neighboring tiles, and Triton's options.

    A gated output counts as two: gate and up.
    """

    block_m: int
    block_n: int
    block_k: int
    neighbours: int
    num_warps: int
    num_stages: int


Change = Callable[[Part, Routing, int, torch.Tensor, torch.Tensor], None]
"""Changes a product of all pairs in place, given (which product, routing with tiles, pairs per tile, inputs, outputs):
inputs are per row or per pair, outputs are [pairs, out]."""


def multiply_by_experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    counts: torch.Tensor,
    *,
    chosen: int,
    is_normed: bool,
    activation: Activation,
    biases: Biases | None = None,
    decodes: torch.Tensor | None = None,
    change: Change | None = None,
) -> torch.Tensor:
    """Return the output of the mixture of experts: [rows, hidden] in the dtype of `x`.

    The host does not wait for the routing: it launches the maximum number of programs, and those without work exit.

    Args:
        x: [rows, hidden], contiguous.
        logits: [rows, experts], contiguous, of any float dtype.
        gate_up: [experts * 2 * inner, hidden], contiguous; each expert's gate rows before its up rows.
        down: [experts * hidden, inner], contiguous. Quantized weights are dequantized on the fly.
        biases: of the two products, [experts, 2 * inner] and [experts, hidden], contiguous; None for none.
        counts, chosen, is_normed, decodes: as in `choose_experts`. The output of padding rows is undefined.
        change: applied to the first product before the activation, and to the second before the sum; None for no
            change.
    """
    route = partial(choose_experts, logits, chosen, counts, is_normed=is_normed, decodes=decodes)
    return _multiply(x, route, len(counts) - 1, chosen, gate_up, down, activation, biases, change)


def multiply_by_chosen(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    counts: torch.Tensor,
    *,
    activation: Activation,
    decodes: torch.Tensor | None = None,
    change: Change | None = None,
) -> torch.Tensor:
    """Do what `multiply_by_experts` does, with the choice of `sort_by_expert` instead of logits."""
    route = partial(sort_by_expert, experts, weights, counts, decodes=decodes)
    return _multiply(x, route, len(counts) - 1, experts.shape[1], gate_up, down, activation, change=change)


def expert_product(
    x: torch.Tensor,
    weight: ExpertMatrix,
    routing: Routing,
    cut: ExpertCut,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """Multiply each row of `x` by its experts in `weight` [experts * out, in], or each pair's own row by its expert.

    Args:
        routing: with tiles of `cut.block_m`.
        bias: [experts, out]; None for none.
        activation: applied to outputs that are [gate | up]; None for plain outputs.

    Returns:
        [rows * chosen, out], or half as many columns with an activation.
    """
    assert routing.slots is not None
    assert routing.tiles is not None
    pairs, experts, parts = routing.experts.numel(), len(routing.slots), 1 if activation is None else 2
    (lines, depth), block_n = weight.shape, cut.block_n // parts
    width = lines // (experts * parts)
    group, is_mxfp4 = weight.group if isinstance(weight, Int4Matrix) else 0, isinstance(weight, Mxfp4Matrix)
    out = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    expert_product_kernel[(len(routing.tiles) * triton.cdiv(width, block_n),)](
        x,
        *_parts_of(weight),
        out if bias is None else bias,
        routing.slots,
        routing.tiles,
        routing.num_tiles,
        out,
        width,
        depth,
        experts,
        pairs // len(x),
        HAS_BIAS=bias is not None,
        ACTIVATION=activation or "",
        LIMIT=_limit_of(weight),
        GROUP=group,
        IS_MXFP4=is_mxfp4,
        SUMS_APART=is_mxfp4 and current() == "sm_90" and x.element_size() == 2,
        NEIGHBOURS=cut.neighbours,
        BLOCK_M=cut.block_m,
        BLOCK_N=block_n,
        BLOCK_K=_block_k(weight, cut),
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **overlap(),
    )
    return out


def add_up(parts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum `parts` [rows * chosen, width] over each row's experts, by `weights` [rows, chosen]: [rows, width]."""
    (rows, chosen), width = weights.shape, parts.shape[1]
    out = torch.empty(rows, width, dtype=parts.dtype, device=parts.device)
    expert_sum_kernel[(rows, triton.cdiv(width, SUM_BLOCK))](
        parts, weights, out, width, CHOSEN=chosen, BLOCK=SUM_BLOCK, num_warps=4, **overlap()
    )
    return out


def usual_cut(
    rows: int, chosen: int, experts: int, number_bytes: int, *, is_int4: bool = False, is_mxfp4: bool = False
) -> ExpertCut:
    """Return the tiling of products of `rows` rows. Derived by reasoning, not measured yet.

    A tile has as many rows as an expert gets under even load, up to what fits into registers. Few rows are
    bandwidth-bound: small tiles, loads of at least a cache line, as many in flight as a multiprocessor holds. Many rows
    are compute-bound: larger tiles load less per product, and 16 neighboring tiles share weights and rows in the cache.
    Products of few rows by 4-bit weights are bound by instructions, so more outputs share those beside dequantizing; it
    takes registers, so many rows have few outputs. The tiling is the same for all row counts up to a power of two.
    """
    pairs = triton.next_power_of_2(rows) * chosen
    block_m = int(min(128, max(16, triton.next_power_of_2(triton.cdiv(pairs, experts)))))
    has_room = number_bytes == 2 and not current().startswith("gfx")
    if number_bytes == 4:
        block_m, block_n, block_k = min(32, block_m), 64, 32
    elif is_int4:
        block_m, block_n, block_k = (16, 128, 64) if block_m == 16 else (64, 64, 64)
    elif block_m <= 32:
        block_n, block_k = 128 if is_mxfp4 else 64, 128 if has_room else 64
    else:
        block_n, block_k = 64 if is_mxfp4 else 128, 64
    most = shared_bytes() // ((block_m + block_n) * block_k * number_bytes)
    return ExpertCut(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        neighbours=16 if block_m > 32 else 1,
        num_warps=4 if block_n == 64 or is_int4 or is_mxfp4 else 8,
        num_stages=min(4 if block_m <= 32 else 3, most) if has_room else 2,
    )


def _multiply(
    x: torch.Tensor,
    route: Callable[..., Routing],
    experts: int,
    chosen: int,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    activation: Activation,
    biases: Biases | None = None,
    change: Change | None = None,
) -> torch.Tensor:
    """Multiply by the experts that `route` tells, called with the rows of a `tile` if tiles are wanted."""
    rows, (up_bias, down_bias) = len(x), biases or (None, None)
    if not rows:
        return torch.empty_like(x)
    if change is None and rows <= MAX_ROWS and _can_go_by_rows(gate_up, down):
        routing = route()
        return multiply_rows(x, routing.experts, routing.weights, gate_up, down, activation, biases)
    kinds = {type(gate_up), type(down)}
    cut = usual_cut(rows, chosen, experts, x.element_size(), is_int4=Int4Matrix in kinds, is_mxfp4=Mxfp4Matrix in kinds)
    routing = route(tile=cut.block_m)
    if change is None:
        inner = expert_product(x, gate_up, routing, cut, bias=up_bias, activation=activation)
    else:
        # The fused activation leaves no place to change the product before it.
        joint = expert_product(x, gate_up, routing, cut, bias=up_bias)
        change("gate_up", routing, cut.block_m, x, joint)
        inner = activate_and_multiply(joint, activation)
    parts = expert_product(inner, down, routing, cut, bias=down_bias)
    if change is not None:
        change("down", routing, cut.block_m, inner, parts)
    return add_up(parts, routing.weights)


def multiply_rows(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    activation: Activation,
    biases: Biases | None,
) -> torch.Tensor:
    """Multiply one or two rows, separately, by their `experts`, weighted by `weights`, both [rows, chosen].

    MXFP4 weights are not rounded to the dtype of `x`; that would only change those that float16 cannot represent.
    """
    (rows, hidden), chosen, width = x.shape, experts.shape[1], down.shape[1]
    if isinstance(gate_up, Mxfp4Matrix):
        gate_up_kernel, down_kernel, seen_as = mxfp4_gate_up_kernel, mxfp4_down_kernel, torch.int32
        up_cut, down_cut = _mxfp4_row_cuts(hidden, width, chosen)
    else:
        gate_up_kernel, down_kernel, seen_as = expert_gate_up_kernel, expert_down_kernel, x.dtype
        up_cut, down_cut = _row_cuts(gate_up, down, hidden, width, chosen)
    up_bias, down_bias = biases or (x, x)
    options = {"CHOSEN": chosen, "HAS_BIAS": biases is not None, **overlap()}
    inner, out = torch.empty(rows * chosen, width, dtype=x.dtype, device=x.device), torch.empty_like(x)
    gate_up_kernel[(rows * chosen, triton.cdiv(width, up_cut["BLOCK_N"]))](
        *(x.view(seen_as), experts, *_parts_of(gate_up), up_bias, inner, width),
        ACTIVATION=activation,
        **up_cut,
        **options,
    )
    down_kernel[(rows, triton.cdiv(hidden, down_cut["BLOCK_N"]))](
        *(inner.view(seen_as), experts, weights, *_parts_of(down), down_bias, out, hidden), **down_cut, **options
    )
    return out


def _row_cuts(
    gate_up: ExpertMatrix, down: ExpertMatrix, hidden: int, width: int, chosen: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the constants of the two products of one or two rows."""
    is_whole = isinstance(gate_up, Fp8Matrix) and hidden <= MAX_FP8_DEPTH
    block_k = triton.next_power_of_2(hidden) if is_whole else min(ROW_DEPTH, triton.next_power_of_2(hidden))
    block_c = triton.next_power_of_2(chosen)
    # More inputs of more outputs would not fit into registers. With more experts and outputs, a thread's operands would
    # not all lie in that thread.
    up_n, down_n = ROW_OUTPUTS if block_k < MAX_FP8_DEPTH else 1, ROW_OUTPUTS if block_c <= 4 else 1
    down_k = min(ROW_NUMBERS // (down_n * block_c), triton.next_power_of_2(width))
    up = {"DEPTH": hidden, "LIMIT": _limit_of(gate_up), "BLOCK_N": up_n, "BLOCK_K": block_k, "num_warps": 4}
    low = {"DEPTH": width, "LIMIT": _limit_of(down), "BLOCK_C": block_c, "BLOCK_N": down_n, "BLOCK_K": down_k}
    return up, {**low, "num_warps": 4}


def _mxfp4_row_cuts(hidden: int, width: int, chosen: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `_row_cuts` for MXFP4 weights."""
    up_groups, down_groups, block_c = hidden // MXFP4_GROUP, width // MXFP4_GROUP, triton.next_power_of_2(chosen)
    up_g, down_g = (int(min(ROW_GROUPS, triton.next_power_of_2(groups))) for groups in (up_groups, down_groups))
    down_n = max(1, DOWN_OUTPUTS // max(4, block_c))
    low = {"GROUPS": down_groups, "BLOCK_C": block_c, "BLOCK_N": down_n, "BLOCK_G": down_g, "num_warps": 4}
    return {"GROUPS": up_groups, "BLOCK_N": GATE_UP_OUTPUTS, "BLOCK_G": up_g, "num_warps": 1}, low


def _can_go_by_rows(gate_up: ExpertMatrix, down: ExpertMatrix) -> bool:
    """Return whether the kernels for one or two rows support these weights."""
    are_mxfp4 = [isinstance(weight, Mxfp4Matrix) for weight in (gate_up, down)]
    return all(are_mxfp4) or not (any(are_mxfp4) or isinstance(gate_up, Int4Matrix) or isinstance(down, Int4Matrix))


def _block_k(weight: ExpertMatrix, cut: ExpertCut) -> int:
    """Return the inputs of a tile: those of one block for 4-bit weights."""
    if isinstance(weight, Mxfp4Matrix):
        return MXFP4_BLOCK
    return BLOCK if isinstance(weight, Int4Matrix) else cut.block_k


def _parts_of(weight: ExpertMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    return (weight, weight) if isinstance(weight, torch.Tensor) else (weight.held, weight.units)


def _limit_of(weight: ExpertMatrix) -> float:
    return weight.limit if isinstance(weight, Fp8Matrix) else 0
