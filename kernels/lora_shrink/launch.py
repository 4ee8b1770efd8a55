"""`kernels.lora_shrink.reference` on a GPU, for whole batches of adapters that lie where a table on the device says."""

from __future__ import annotations

import torch
import triton
from torch.nn import functional

from kernels.architecture import PROGRAMS_WANTED
from kernels.lora_shrink.kernel import ROW_STEP, lora_shrink_kernel
from kernels.overlap import overlap

TILE = 16
"""Tokens of a tile at most."""
BLOCK_R, BLOCK_K = 16, 1024
STEP, PARTS = 256, 4


def lora_shrink(
    x: torch.Tensor,
    tiles: torch.Tensor,
    count: torch.Tensor,
    *,
    entry: int,
    num_modules: int,
    max_rank: int,
    max_tiles: int,
) -> torch.Tensor:
    """Multiply each tile of tokens by the A's of its adapter.

    Args:
        x: [tokens, in], contiguous.
        tiles: [any, 3] int64, as `cut` makes them: first token, end, address of the adapter's table [entries, 4] int64
            on the device: address of A [rank, in], address of B [out, rank] with rows as `whole_rows` lays them, both
            multiples of 16, the rank, 0 for no such module, and the address of float32 [2, out], 0 for none
            (`kernels.lora_expand.launch`). Disjoint.
        count: [1] int64 on the device, how many tiles there are.
        entry: the first module's place in the tables.
        num_modules: so many neighbours share the input.
        max_rank: of any adapter.
        max_tiles: at least `count`, and `tiles` has as many rows; programs are started for so many.

    Returns:
        [splits, tokens, num_modules, room] float32, the product being the sum over splits, `room` at least `max_rank`;
        what belongs to no tile, or lies past the last block of an adapter's rank, means nothing.
    """
    tokens, width = x.shape
    splits = num_splits(tokens, width, num_modules)
    room = triton.cdiv(max_rank, BLOCK_R) * BLOCK_R
    shrunk = torch.empty(splits, tokens, num_modules, room, dtype=torch.float32, device=x.device)
    is_short = x.element_size() == 2
    lora_shrink_kernel[(splits, num_modules, max_tiles)](
        x,
        tiles,
        count,
        shrunk,
        tokens,
        width,
        entry,
        num_modules,
        room,
        NUM_SPLITS=splits,
        BLOCK_M=TILE,
        BLOCK_R=BLOCK_R,
        BLOCK_K=BLOCK_K if is_short else BLOCK_K // 4,
        STEP=STEP if is_short else STEP // 2,
        PARTS=PARTS,
        num_warps=4,
        num_stages=3 if is_short else 2,
        **overlap(),
    )
    return shrunk


def cut(start: int, end: int) -> list[tuple[int, int]]:
    """Return the tiles of a run of tokens of one adapter."""
    return [(at, min(end, at + TILE)) for at in range(start, end, TILE)]


def whole_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix [any, rank] as the kernels read it: each row begins where the widest load may, zeros between."""
    spare = -matrix.shape[1] % ROW_STEP.value
    return functional.pad(matrix, (0, spare)) if spare else matrix


def num_splits(tokens: int, width: int, num_modules: int) -> int:
    """Return among how many programs the depth is cut: more where there are few tokens, a power of two or all.

    The same for all numbers of tokens up to a power of two, so that those are all that a kernel is compiled for.
    """
    programs = max(1, triton.next_power_of_2(tokens) // TILE) * num_modules
    wanted = triton.next_power_of_2(max(1, PROGRAMS_WANTED // programs))
    return int(min(triton.cdiv(width, BLOCK_K), wanted))
