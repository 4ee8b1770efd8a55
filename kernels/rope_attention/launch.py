"""`kernels.rope_attention.reference` on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kernels import architecture
from kernels.architecture import PROGRAMS_WANTED
from kernels.overlap import overlap
from kernels.paged_attention.launch import heads_between_tokens
from kernels.rope_attention.kernel import rope_attention_kernel

MAX_ROWS, MAX_GROUP, MAX_HEAD_DIM, MAX_NUMBER_BYTES = 2, 4, 128, 2
"""Limits of the kernel: every two heads read all keys and values again, if mostly from the L2 cache, and larger heads
or elements would not fit into registers.
"""
LOAD_NUMBERS = 8
"""Elements per load of a thread; half a warp loads a key of 128."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCut:
    """The tiling of one launch: heads per program, maximum splits of a row's keys, keys per thread, and warps."""

    heads: int
    num_splits: int
    depth: int
    num_warps: int

    def lanes(self, head_dim: int) -> int:
        """Return how many keys all threads of a program load at once."""
        warp = 64 if architecture.current().startswith("gfx") else 32
        return max(1, warp * self.num_warps * LOAD_NUMBERS // head_dim)

    def splits(self, others: int) -> int:
        """Return the number of splits with which all programs run concurrently, given `others` programs per split."""
        return min(self.num_splits, 1 << max(0, (PROGRAMS_WANTED // others).bit_length() - 1))


USUAL = AttentionCut(heads=2, num_splits=32, depth=2, num_warps=8)
"""Chosen so that two programs fit on a multiprocessor and a thousand keys are in flight. Derived from the machine code,
not measured yet.
"""


def can_attend(qkv: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Return whether the kernel supports a QKV projection [rows, any] of single-token rows with this cache."""
    num_rows, _, group, head_dim = _sizes(qkv, k_cache)
    is_plain = qkv.dtype == k_cache.dtype and qkv.element_size() <= MAX_NUMBER_BYTES
    return is_plain and 0 < num_rows <= MAX_ROWS and group <= MAX_GROUP and head_dim <= MAX_HEAD_DIM


def rope_attention(
    *,
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    tables: torch.Tensor,
    arrived: torch.Tensor,
    scale: float | None = None,
    cut: AttentionCut = USUAL,
) -> torch.Tensor:
    """Write keys and values of single-token rows, token i for row i, and attend: [rows, heads, head_dim].

    Args:
        qkv .. slots, rows .. scale: as in `kernels.rope_kv_write.launch` and `kernels.paged_attention.launch`.
            Requires `can_attend`.
        cut: overrides the tiling, for tuning.
    """
    num_rows, kv_heads, group, head_dim = _sizes(qkv, k_cache)
    block_g, block_d = min(cut.heads, triton.next_power_of_2(group)), triton.next_power_of_2(head_dim)
    teams = kv_heads * triton.cdiv(group, block_g)
    num_splits = cut.splits(num_rows * teams)
    out = qkv.new_empty(num_rows, kv_heads * group, head_dim)
    sums = torch.empty(num_rows, teams, block_g, num_splits, dtype=torch.float32, device=qkv.device)
    parts = sums.new_empty(num_rows, teams, block_g, block_d, num_splits)
    rope_attention_kernel[(num_rows, teams, num_splits)](
        qkv,
        cos_sin,
        *(norms or (qkv, qkv)),
        k_cache,
        v_cache,
        slots,
        rows,
        tables,
        out,
        parts,
        sums,
        arrived,
        tables.stride(0),
        eps,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=k_cache.shape[1],
        CACHE_HEADS=heads_between_tokens(k_cache),
        HAS_NORMS=norms is not None,
        NUM_SPLITS=num_splits,
        BLOCK_G=block_g,
        DEPTH=cut.depth,
        LANES=cut.lanes(block_d),
        BLOCK_D=block_d,
        num_warps=cut.num_warps,
        **overlap(),
    )
    return out


def _sizes(qkv: torch.Tensor, k_cache: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the number of rows, the number of kv heads, the query heads per kv head, and the head size."""
    kv_heads, head_dim = k_cache.shape[2:]
    return len(qkv), kv_heads, qkv.shape[1] // (kv_heads * head_dim) - 2, head_dim
