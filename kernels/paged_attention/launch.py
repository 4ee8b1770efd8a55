"""`kernels.paged_attention.reference` on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kernels import architecture
from kernels.overlap import overlap
from kernels.paged_attention.decode_kernel import decode_attention_kernel
from kernels.paged_attention.prefill_kernel import prefill_attention_kernel
from kernels.paged_attention.search import num_tiles
from kernels.row_quantization.reference import LIMIT_BY_DTYPE

MIN_TILE = 16
"""Rows of the smallest tile of matrix instructions."""
MAX_PROGRAMS = 8192
"""Maximum programs of one launch for single-token rows."""
JOINED_NUMBERS = 32
"""Elements per thread of the partial results that are combined at once."""
FEW_ROWS = 8
"""Up to this many rows, the latency of the first keys matters rather than the bytes in flight."""
MANY_ROWS = 512
"""With more rows than this, one warp would not have registers for their numbers of tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tiling of one prefill launch: queries times the heads that share a kv head, keys, and Triton's options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The tiling of a decode launch: least queries and keys of a tile, programs per multiprocessor, Triton options.

    `is_bounded` leaves a thread as many registers as it has where a multiprocessor runs all of its programs; else the
    compiler chooses.
    """

    least_m: int
    block_n: int
    per_multiprocessor: int
    num_warps: int
    num_stages: int
    is_bounded: bool = True

    @property
    def max_registers(self) -> int | None:
        """The bound on each thread's registers; None: the compiler's choice."""
        return architecture.max_registers(self.num_warps, self.per_multiprocessor) if self.is_bounded else None


def decode_share(num_rows: int, head_dim: int, element_bytes: int) -> Share:
    """Return the tiling for `num_rows` single-token rows, with a cache of `element_bytes` per element.

    Measured on an H200: many rows run best on many programs of one warp, which need no synchronization. On other GPUs,
    and for wider elements, chosen so that no register spills.
    """
    is_hopper, is_amd = architecture.current() == "sm_90", architecture.current().startswith("gfx")
    is_blackwell = architecture.current() == "sm_100"
    if head_dim > 256:
        return _wide_share(architecture.current(), element_bytes)
    if element_bytes == 4:
        least_m, num_stages = 16 if is_hopper else 8, 2 if is_hopper and head_dim <= 64 else 1
        # On sm_90, some spill with a bound above the number that the compiler chooses.
        return Share(
            least_m=least_m,
            block_n=32,
            per_multiprocessor=2,
            num_warps=4,
            num_stages=num_stages,
            is_bounded=not is_hopper,
        )
    if head_dim > 128 and element_bytes == 1:
        return Share(least_m=16, block_n=64 if is_amd else 32, per_multiprocessor=2, num_warps=4, num_stages=1)
    if head_dim > 128:
        return Share(least_m=16, block_n=32, per_multiprocessor=2, num_warps=4, num_stages=2 if is_blackwell else 3)
    if is_amd:
        return Share(least_m=16, block_n=64, per_multiprocessor=2, num_warps=4, num_stages=4 - element_bytes)
    if num_rows > FEW_ROWS and head_dim <= 64 and element_bytes == 2 and is_blackwell:
        return Share(least_m=8, block_n=32, per_multiprocessor=4, num_warps=2, num_stages=1)
    if num_rows > MANY_ROWS:
        return Share(least_m=8, block_n=32, per_multiprocessor=4, num_warps=2, num_stages=3 - element_bytes)
    if num_rows > FEW_ROWS:
        num_stages = 1 if element_bytes == 2 or head_dim <= 64 else 2
        return Share(least_m=8, block_n=32, per_multiprocessor=8, num_warps=1, num_stages=num_stages)
    if element_bytes == 1:
        block_n = 128 if is_hopper and head_dim > 64 else 64
        num_stages = 2 if architecture.current() == "sm_80" else 1
        return Share(least_m=8, block_n=block_n, per_multiprocessor=2, num_warps=4, num_stages=num_stages)
    if is_hopper:
        # The dependent loads of block ids take up three of the five stages.
        return Share(least_m=16, block_n=128, per_multiprocessor=1, num_warps=4, num_stages=5)
    return Share(least_m=16, block_n=32, per_multiprocessor=2, num_warps=4, num_stages=4)


def prefill_tile(
    group: int, head_dim: int, element_bytes: int, *, is_quantized: bool = False, has_window: bool = False
) -> Tile:
    """Return the tile for multi-token rows: on each architecture, the largest that does not spill registers."""
    least = triton.next_power_of_2(group)
    if element_bytes == 4:
        return Tile(block_m=max(MIN_TILE, least), block_n=16, num_warps=4, num_stages=1)
    gpu = architecture.current()
    if head_dim > 256:
        return _wide_tile(gpu, least, is_quantized=is_quantized)
    if gpu.startswith("gfx"):
        return Tile(block_m=max(128 if head_dim <= 128 else 64, least), block_n=32, num_warps=4, num_stages=1)
    if gpu == "sm_90":
        if head_dim <= 64:
            return Tile(block_m=max(64, least), block_n=64, num_warps=4, num_stages=3)
        block_n = 64 if is_quantized else 128
        if head_dim > 128:
            block_n = 16 if is_quantized else 32
        return Tile(block_m=max(128, least), block_n=block_n, num_warps=8, num_stages=3)
    if head_dim > 128:
        block_n = 64 if gpu == "sm_100" and has_window else 32
        return Tile(block_m=max(64, least), block_n=block_n, num_warps=8, num_stages=2)
    if gpu == "sm_100" and head_dim <= 64 and is_quantized:
        return Tile(block_m=max(128, least), block_n=32, num_warps=8, num_stages=3)
    block_n = 64 if gpu == "sm_100" and head_dim > 64 else 32
    return Tile(block_m=max(128, least), block_n=block_n, num_warps=8, num_stages=2)


def _wide_share(gpu: str, element_bytes: int) -> Share:
    """Return the tiling of a decode launch for heads of more than 256."""
    is_amd = gpu.startswith("gfx")
    if element_bytes == 4:
        return Share(least_m=16, block_n=16, per_multiprocessor=1, num_warps=4 if is_amd else 8, num_stages=1)
    if is_amd:
        return Share(least_m=16, block_n=32 // element_bytes, per_multiprocessor=1, num_warps=4, num_stages=2)
    is_large = gpu in ("sm_90", "sm_100")
    return Share(
        least_m=8 if gpu == "sm_100" and element_bytes == 2 else 16,
        block_n=32,
        per_multiprocessor=1,
        num_warps=8,
        num_stages=5 if is_large else 3,
    )


def _wide_tile(gpu: str, least: int, *, is_quantized: bool) -> Tile:
    """Return the tile for heads of more than 256."""
    if gpu.startswith("gfx"):
        return Tile(block_m=max(64, least), block_n=16, num_warps=4, num_stages=2)
    has_room = architecture.shared_bytes() >= 160 << 10
    num_stages = 3 if has_room else 2
    if is_quantized:
        return Tile(block_m=max(32, least), block_n=32, num_warps=8, num_stages=num_stages)
    if gpu == "sm_90" or not has_room:
        return Tile(block_m=max(64, least), block_n=16, num_warps=8, num_stages=num_stages)
    return Tile(block_m=max(64, least), block_n=32, num_warps=8, num_stages=2)


def counters(device: torch.device) -> torch.Tensor:
    """Return the counters for programs that share rows: int32, zero again after each launch."""
    return torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)


def paged_attention(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    num_decodes: int,
    tables: torch.Tensor,
    arrived: torch.Tensor,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    spans: tuple[torch.Tensor, torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
    cut: Share | None = None,
) -> torch.Tensor:
    """Attend for the rows of a step, single-token rows first.

    Args:
        q: [tokens, heads, head_dim], contiguous; head_dim up to 512.
        k_cache, v_cache: [num_blocks, block_tokens, kv_heads, head_dim]; a token's heads are contiguous, and there may
            be room for more heads between tokens.
        rows: [rows, 4] int64: first token in `q`, its position, number of tokens, row of `tables`; in token order. A
            row of no tokens is padding, whose output is undefined.
        num_decodes: number of leading rows that have at most one token; token i belongs to row i of these.
        tables: block tables, [any, blocks] int64.
        arrived: `counters`, not shared with a concurrent launch.
        scale: of scores; None for 1 / sqrt(head_dim).
        window: how many of the last positions a token sees, its own included; 0 for all.
        softcap: scores become softcap * tanh(score / softcap); 0 for no cap.
        spans: for an 8-bit cache, as `kernels.rope_kv_write` writes them; None if the cache has the dtype of `q`.
        sinks: float32 [heads]; None for none.
        cut: overrides the tiling of single-token rows, for tuning.

    Returns:
        [tokens, heads, head_dim] in the dtype of `q`.
    """
    out = torch.empty_like(q)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    launch = _Launch(q, k_cache, v_cache, tables, out, scale, window, softcap, spans, sinks)
    if num_decodes:
        share = cut or decode_share(num_decodes, q.shape[2], k_cache.element_size())
        launch.decodes(rows[:num_decodes], share, arrived)
    if len(rows) > num_decodes:
        launch.chunks(rows[num_decodes:], len(q) - num_decodes)
    return out


def heads_between_tokens(cache: torch.Tensor) -> int:
    """Return how many heads there is room for in each token of a cache [num_blocks, block_tokens, heads, dim]."""
    # By the stride between blocks: that between tokens is arbitrary if a block has only one.
    return cache.stride(0) // (cache.shape[1] * cache.shape[3])


def room_of_tokens(cache: torch.Tensor, spans: tuple[torch.Tensor, torch.Tensor] | None) -> dict[str, int]:
    """Return the compile-time constants by which kernels address tokens of a cache and of its spans."""
    span_heads = 0 if spans is None else heads_between_tokens(spans[0].unsqueeze(-1))
    return {"CACHE_HEADS": heads_between_tokens(cache), "SPAN_HEADS": span_heads}


@dataclass(frozen=True, slots=True)
class _Launch:
    """What the decode and prefill launches have in common; fields as the arguments of `paged_attention`."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor
    out: torch.Tensor
    scale: float
    window: int
    softcap: float
    spans: tuple[torch.Tensor, torch.Tensor] | None
    sinks: torch.Tensor | None

    @property
    def _group(self) -> int:
        return self.q.shape[1] // self.k_cache.shape[2]

    @property
    def _block_d(self) -> int:
        return int(triton.next_power_of_2(self.q.shape[2]))

    @property
    def _unit(self) -> float:
        return 1.0 if self.spans is None else 1.0 / LIMIT_BY_DTYPE[self.k_cache.dtype]

    def decodes(self, rows: torch.Tensor, share: Share, arrived: torch.Tensor) -> None:
        """Attend for single-token rows."""
        group, block_d, device = self._group, self._block_d, self.q.device
        block_g = triton.next_power_of_2(group)
        programs = min(MAX_PROGRAMS, share.per_multiprocessor * architecture.num_multiprocessors())
        parts, sums = (
            torch.empty(programs, 2, group, width, dtype=torch.float32, device=device) for width in (block_d, 2)
        )
        decode_attention_kernel[(programs,)](
            self.q,
            self.k_cache,
            self.v_cache,
            *(self.spans or (rows, rows)),
            rows if self.sinks is None else self.sinks,
            rows,
            self.tables,
            self.out,
            parts,
            sums,
            arrived,
            len(rows),
            self.tables.stride(0),
            self.scale,
            self._unit,
            self.softcap,
            **self._constants,
            BLOCK_ROWS=max(MIN_TILE, triton.next_power_of_2(len(rows))),
            BLOCK_M=max(share.least_m, block_g),
            BLOCK_N=share.block_n,
            BLOCK_G=block_g,
            BLOCK_P=max(2, JOINED_NUMBERS * 32 * share.num_warps // (block_g * block_d)),
            num_warps=share.num_warps,
            num_stages=share.num_stages,
            **architecture.bounded(share.max_registers),
            **overlap(),
        )

    def chunks(self, rows: torch.Tensor, num_tokens: int) -> None:
        """Attend for multi-token rows, with `num_tokens` in total."""
        is_quantized = self.spans is not None
        tile = prefill_tile(
            self._group,
            self.q.shape[2],
            self.q.element_size(),
            is_quantized=is_quantized,
            has_window=self.window > 0,
        )
        block_q = tile.block_m // self._group
        prefill_attention_kernel[(num_tiles(num_tokens, len(rows), block_q), self.k_cache.shape[2])](
            self.q,
            self.k_cache,
            self.v_cache,
            *(self.spans or (rows, rows)),
            rows if self.sinks is None else self.sinks,
            rows,
            self.tables,
            self.out,
            len(rows),
            self.tables.stride(0),
            self.scale * self._unit,
            self._unit,
            self.softcap,
            **self._constants,
            BLOCK_Q=block_q,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **overlap(),
        )

    @property
    def _constants(self) -> dict[str, int]:
        """The compile-time constants of both kernels."""
        return {
            "HEADS": self.q.shape[1],
            "KV_HEADS": self.k_cache.shape[2],
            "HEAD_DIM": self.q.shape[2],
            "BLOCK_TOKENS": self.k_cache.shape[1],
            **room_of_tokens(self.k_cache, self.spans),
            "WINDOW": self.window,
            "HAS_SOFTCAP": self.softcap > 0,
            "IS_QUANTIZED": self.spans is not None,
            "HAS_SINKS": self.sinks is not None,
            "BLOCK_D": self._block_d,
        }
