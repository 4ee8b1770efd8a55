"""`kernels.lora_shrink.reference` on a GPU, for whole batches of adapters addressed by tables on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch.nn import functional

from kernels.architecture import PROGRAMS_WANTED
from kernels.lora_shrink.kernel import ROW_STEP, lora_shrink_kernel
from kernels.overlap import overlap

TILE = 16
"""Maximum tokens per tile."""
BLOCK_R, BLOCK_K = 16, 1024
STEP, PARTS = 256, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The tokens of a step's adapters, cut to the size of a program.

    Attributes:
        numbers: [any, 3] int64, cut by `cut`, disjoint: first token, end, and device address of the adapter's table. A
            table is [entries, 4] int64: the address of A [rank, in], that of B [out, rank] padded by `whole_rows`, both
            multiples of 16; the rank, 0 for no such module; and the address of gains and shifts, float32 [2, out], 0
            for none (`kernels.lora_expand.launch`).
        count: [1] int64 on the device, the number of tiles.
        most: at least `count` and at most the rows of `numbers`; programs are launched for this many tiles.
    """

    numbers: torch.Tensor
    count: torch.Tensor
    most: int


def lora_shrink(x: torch.Tensor, tiles: Tiles, *, entry: int, num_modules: int, max_rank: int) -> torch.Tensor:
    """Multiply each tile of tokens by its adapter's A matrices.

    Args:
        x: [tokens, in], contiguous.
        entry: the first module's entry in the tables.
        num_modules: number of adjacent modules that share the input.
        max_rank: the highest rank of any adapter.

    Returns:
        [splits, tokens, num_modules, room] float32 with `room` at least `max_rank`; the product is the sum over splits.
        Undefined for tokens outside all tiles and past the last block of an adapter's rank.
    """
    tokens, width = x.shape
    splits = num_splits(tokens, width, num_modules)
    room = triton.cdiv(max_rank, BLOCK_R) * BLOCK_R
    shrunk = torch.empty(splits, tokens, num_modules, room, dtype=torch.float32, device=x.device)
    is_short = x.element_size() == 2
    lora_shrink_kernel[(splits, num_modules, tiles.most)](
        x,
        tiles.numbers,
        tiles.count,
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
    """Return a matrix [any, rank] as the kernels read it, rows padded by zeros to the alignment of the widest load."""
    spare = -matrix.shape[1] % ROW_STEP.value
    return functional.pad(matrix, (0, spare)) if spare else matrix


def num_splits(tokens: int, width: int, num_modules: int) -> int:
    """Return how many programs split the depth: more for fewer tokens. A power of two, or one program per block.

    The same for all token counts up to a power of two, which limits how many variants of the kernel are compiled.
    """
    programs = max(1, triton.next_power_of_2(tokens) // TILE) * num_modules
    wanted = triton.next_power_of_2(max(1, PROGRAMS_WANTED // programs))
    return int(min(triton.cdiv(width, BLOCK_K), wanted))
