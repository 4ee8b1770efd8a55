"""`kernels.paged_attention.reference` on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kernels import architecture
from kernels.architecture import PROGRAMS_WANTED
from kernels.overlap import overlap
from kernels.paged_attention.kernel import combine_kernel, paged_attention_kernel
from kernels.row_quantization.reference import LIMIT_BY_DTYPE
from kernels.search import num_tiles

MIN_TILE = 16
"""Rows of the smallest tile that matrix units multiply."""
MAX_SPLITS = 32
LEAST_SPLITS, LEAST_KEYS = 4, 2048
"""However many rows there are, a context is cut into so many splits where that leaves each of them so many keys: the
longest of a batch would else be waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How one launch is cut: queries times the heads that share a kv head, keys, and how Triton runs it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_tile(group: int, head_dim: int, element_bytes: int, *, has_softcap: bool = False) -> Tile:
    """Return the tile for rows of one token: as many keys under way as fit beside each other."""
    block_m = max(MIN_TILE, triton.next_power_of_2(group))
    if element_bytes == 4:
        return Tile(block_m=block_m, block_n=32, num_warps=8, num_stages=2)
    block_n = 64 if head_dim <= 128 and not has_softcap else 32
    return Tile(block_m=block_m, block_n=block_n, num_warps=4, num_stages=3)


def prefill_tile(group: int, head_dim: int, element_bytes: int) -> Tile:
    """Return the tile for rows of several tokens: the largest whose registers do not spill on each architecture."""
    least = triton.next_power_of_2(group)
    if element_bytes == 4:
        return Tile(block_m=max(MIN_TILE, least), block_n=16, num_warps=4, num_stages=1)
    gpu = architecture.current()
    if gpu.startswith("gfx"):
        return Tile(block_m=max(128 if head_dim <= 128 else 64, least), block_n=32, num_warps=4, num_stages=1)
    if head_dim > 128:
        return Tile(block_m=max(64, least), block_n=32, num_warps=8, num_stages=2)
    has_room = gpu == "sm_90" or (gpu == "sm_100" and head_dim > 64)
    return Tile(block_m=max(128, least), block_n=64 if has_room else 32, num_warps=8, num_stages=2)


def num_splits(num_rows: int, kv_heads: int) -> int:
    """Return how many programs share the context of one row: enough to keep a large GPU busy, a power of two.

    The same for all numbers of rows up to a power of two, so that those are all that a kernel is compiled for.
    """
    wanted = PROGRAMS_WANTED // max(1, triton.next_power_of_2(num_rows) * kv_heads)
    return min(MAX_SPLITS, triton.next_power_of_2(wanted)) if wanted > 1 else 1


def paged_attention(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    num_decodes: int,
    tables: torch.Tensor,
    window: int = 0,
    softcap: float = 0.0,
    spans: tuple[torch.Tensor, torch.Tensor] | None = None,
    cut: tuple[Tile, int] | None = None,
) -> torch.Tensor:
    """Attend for the rows of a step, those of one token first.

    Args:
        q: [tokens, heads, head_dim], contiguous; head sizes up to 256.
        k_cache, v_cache: [num_blocks, block_tokens, kv_heads, head_dim], contiguous.
        rows: [rows, 4] int64: first token in `q`, its position, number of tokens, row of `tables`; in the order of
            their tokens. A row of no tokens fills up a batch, and its output means nothing.
        num_decodes: so many rows at the front have at most one token, and token i is that of row i.
        tables: [any, blocks] int64.
        window: how many of the last positions a token sees, its own included; 0 for all.
        softcap: scores are softcap * tanh(score / softcap); 0 for as they are.
        spans: of a cache of one byte a number, as `kernels.rope_kv_write` writes them; None where numbers are as they
            are, in the dtype of `q`.
        cut: tile and wanted number of splits of rows of one token, for who looks for better ones.

    Returns:
        [tokens, heads, head_dim] in the dtype of `q`.
    """
    out = torch.empty_like(q)
    heads, head_dim = q.shape[1:]
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    launch = _Launch(q, k_cache, v_cache, tables, out, window, softcap, spans)
    if num_decodes:
        tile, wanted = cut or (
            decode_tile(group, head_dim, q.element_size(), has_softcap=softcap > 0),
            num_splits(num_decodes, kv_heads),
        )
        launch.run(rows[:num_decodes], tile, num_decodes, wanted, block_q=1, is_decode=True)
    num_chunks = len(rows) - num_decodes
    if num_chunks:
        tile = prefill_tile(group, head_dim, q.element_size())
        block_q = tile.block_m // group
        tiles = num_tiles(len(q) - num_decodes, num_chunks, block_q)
        launch.run(rows[num_decodes:], tile, tiles, 1, block_q=block_q, is_decode=False)
    return out


@dataclass(frozen=True, slots=True)
class _Launch:
    """What the launches for decodes and for chunks have in common; fields as the arguments of `paged_attention`."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor
    out: torch.Tensor
    window: int
    softcap: float
    spans: tuple[torch.Tensor, torch.Tensor] | None

    def run(
        self, rows: torch.Tensor, tile: Tile, num_programs: int, wanted: int, *, block_q: int, is_decode: bool
    ) -> None:
        """Attend for some rows, their contexts cut into so many splits as are wanted, and join them."""
        splits = max(wanted, LEAST_SPLITS) if is_decode else wanted
        _, heads, head_dim = self.q.shape
        block_tokens, kv_heads = self.k_cache.shape[1:3]
        block_d = triton.next_power_of_2(head_dim)
        unit = 1.0 if self.spans is None else 1.0 / LIMIT_BY_DTYPE[self.k_cache.dtype]
        parts, sums = self._room(len(rows), splits, block_d)
        paged_attention_kernel[(num_programs, kv_heads, splits)](
            self.q,
            self.k_cache,
            self.v_cache,
            *(self.spans or (rows, rows)),
            rows,
            self.tables,
            parts,
            sums,
            len(rows),
            self.tables.stride(0),
            wanted,
            LEAST_KEYS,
            head_dim**-0.5 * unit,
            unit,
            self.softcap,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_TOKENS=block_tokens,
            WINDOW=self.window,
            HAS_SOFTCAP=self.softcap > 0,
            IS_QUANTIZED=self.spans is not None,
            IS_DECODE=is_decode,
            NUM_SPLITS=splits,
            BLOCK_Q=block_q,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_D=block_d,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **overlap(),
        )
        if splits > 1:
            combine_kernel[(len(rows), heads)](
                parts,
                sums,
                rows,
                self.out,
                HEADS=heads,
                HEAD_DIM=head_dim,
                NUM_SPLITS=splits,
                BLOCK_D=block_d,
                num_warps=4,
                **overlap(),
            )

    def _room(self, num_rows: int, splits: int, block_d: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where splits leave their outputs, and their maxima and sums; where there are none, the output."""
        if splits == 1:
            return self.out, self.out
        parts, sums = (
            torch.empty(num_rows, self.q.shape[1], splits, width, dtype=torch.float32, device=self.q.device)
            for width in (block_d, 2)
        )
        return parts, sums
