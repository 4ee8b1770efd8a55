"""Which rows go to which experts, on a GPU: chosen from logits, or chosen by the model, and cut into tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton

from kernels.experts.routing_kernel import choose_experts_kernel, sort_by_expert_kernel
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
        chosen: experts per row; the largest number that fits into registers is in `loadtest.gpu.expert_launches`.
        counts: `counters`, not shared with a concurrent launch.
        tile: rows per tile of each expert's rows; None for no tiles.
        decodes: the leading single-token rows, as in `kernels.paged_attention.launch`. Rows of no tokens, which are
            padding, are left out of the tiles.
    """
    rows, experts = logits.shape
    names = torch.empty(rows, chosen, dtype=torch.int32, device=logits.device)
    found = Routing(names, torch.empty_like(names, dtype=torch.float32))
    if tile is not None:
        found = _with_room(found, experts, tile)
    choose_experts_kernel[(triton.cdiv(rows, ROWS_AT_ONCE),)](
        logits,
        counts if decodes is None else decodes,
        found.experts,
        found.weights,
        counts,
        *(counts if part is None else part for part in (found.slots, found.tiles, found.num_tiles)),
        0 if decodes is None else len(decodes),
        rows,
        tile or 0,
        IS_NORMED=is_normed,
        HAS_TILES=tile is not None,
        **_options(experts, chosen),
    )
    return found


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
    if tile is None:
        return found
    (rows, chosen), num_experts = experts.shape, len(counts) - 1
    found = _with_room(found, num_experts, tile)
    sort_by_expert_kernel[(triton.cdiv(rows, ROWS_AT_ONCE),)](
        experts,
        counts if decodes is None else decodes,
        counts,
        found.slots,
        found.tiles,
        found.num_tiles,
        0 if decodes is None else len(decodes),
        rows,
        tile,
        **_options(num_experts, chosen),
    )
    return found


def max_tiles(pairs: int, experts: int, tile: int) -> int:
    """Return the maximum number of tiles for any routing of `pairs` pairs."""
    return (pairs + min(pairs, experts) * (tile - 1)) // tile


def _options(experts: int, chosen: int) -> dict[str, Any]:
    blocks = {"BLOCK_E": triton.next_power_of_2(experts), "BLOCK_C": triton.next_power_of_2(chosen)}
    return {"EXPERTS": experts, "CHOSEN": chosen, "BLOCK_R": ROWS_AT_ONCE, **blocks, "num_warps": 4, **overlap()}


def _with_room(routing: Routing, experts: int, tile: int) -> Routing:
    """Return the routing with room for the slots of each of `experts`, and for tiles."""
    (rows, chosen), whole = routing.experts.shape, partial(routing.experts.new_empty, dtype=torch.int32)
    tiles = whole((max_tiles(rows * chosen, experts, tile), 3))
    return replace(routing, slots=whole((experts, rows)), tiles=tiles, num_tiles=whole(1))
