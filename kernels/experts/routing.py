"""Which rows go to which experts, on a GPU: chosen from logits, or chosen by the model, and cut into tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import triton

from kernels.experts.routing_kernel import route_kernel
from kernels.overlap import overlap

ROWS_AT_ONCE = 4
"""Rows per program."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The routing of rows, made by `kernels.experts.routing_kernel`; the last three fields only if tiles are wanted."""

    experts: torch.Tensor
    weights: torch.Tensor
    slots: torch.Tensor | None = None
    tiles: torch.Tensor | None = None
    num_tiles: torch.Tensor | None = None


def counters(experts: int, device: torch.device) -> torch.Tensor:
    """Return the counters of the routing kernel: int32, zero again after each launch."""
    return torch.zeros(experts + 1, dtype=torch.int32, device=device)


def choose_experts(
    logits: torch.Tensor,
    chosen: int,
    counts: torch.Tensor,
    *,
    is_normed: bool,
    tile: int | None = None,
    decodes: torch.Tensor | None = None,
) -> Routing:
    """Choose the experts for each row of `logits` [rows, experts], contiguous, of any dtype that GPUs multiply.

    Args:
        chosen: experts per row; the largest number that fits into registers is in `loadtest.gpu.launches`.
        counts: `counters`, not shared with a concurrent launch.
        tile: rows per tile of each expert's rows; None for no tiles.
        decodes: the leading single-token rows, as in `kernels.paged_attention.launch`. Rows of no tokens, which are
            padding, are left out of the tiles.
    """
    names = torch.empty(len(logits), chosen, dtype=torch.int32, device=logits.device)
    found = Routing(names, torch.empty_like(names, dtype=torch.float32))
    return _route(found, logits, counts, tile, decodes, is_normed=is_normed)


def sort_by_expert(
    experts: torch.Tensor,
    weights: torch.Tensor,
    counts: torch.Tensor,
    *,
    tile: int | None = None,
    decodes: torch.Tensor | None = None,
) -> Routing:
    """Return the routing of a choice: `experts`, int32, and `weights`, float32, both [rows, chosen] and contiguous.

    `counts`, `tile` and `decodes` are those of `choose_experts`.
    """
    found = Routing(experts, weights)
    return found if tile is None else _route(found, None, counts, tile, decodes)


def max_tiles(pairs: int, experts: int, tile: int) -> int:
    """Return the maximum number of tiles for any routing of `pairs` pairs."""
    return (pairs + min(pairs, experts) * (tile - 1)) // tile


def _route(
    found: Routing,
    logits: torch.Tensor | None,
    counts: torch.Tensor,
    tile: int | None,
    decodes: torch.Tensor | None,
    *,
    is_normed: bool = False,
) -> Routing:
    """Return a routing, filled; without logits, its experts and weights are there already."""
    (rows, chosen), experts = found.experts.shape, len(counts) - 1
    if tile is not None:
        whole = partial(torch.empty, dtype=torch.int32, device=counts.device)
        tiles = whole((max_tiles(rows * chosen, experts, tile), 3))
        found = replace(found, slots=whole((experts, rows)), tiles=tiles, num_tiles=whole(1))
    parts = (logits, decodes, found.experts, found.weights, counts, found.slots, found.tiles, found.num_tiles)
    route_kernel[(triton.cdiv(rows, ROWS_AT_ONCE),)](
        # What the kernel does not touch can be any tensor.
        *(counts if part is None else part for part in parts),
        0 if decodes is None else len(decodes),
        rows,
        tile or 0,
        EXPERTS=experts,
        CHOSEN=chosen,
        IS_CHOSEN=logits is None,
        IS_NORMED=is_normed,
        HAS_TILES=tile is not None,
        BLOCK_R=ROWS_AT_ONCE,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_C=triton.next_power_of_2(chosen),
        num_warps=4,
        **overlap(),
    )
    return found
