"""The operations of a decoder that differ between devices, behind one interface, and the CPU's choice of them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from engine.attention import AttentionBatch, Chunk, DecodeGroup


class KvCache:
    """Keys and values of all layers: [layers, 2, num_blocks + 1, block_tokens, kv_heads, head_dim].

    The extra last block is the null block: never written, always zero, it pads block tables.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_blocks + 1, block_tokens, kv_heads, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.null_block = num_blocks
        self.block_tokens = block_tokens

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (keys, values) of a layer, each [num_blocks + 1, block_tokens, kv_heads, head_dim]."""
        return self.data[index, 0], self.data[index, 1]

    def clear(self, block_ids: list[int]) -> None:
        """Zero blocks about to be filled: attention gathers whole blocks, and what a failed request left may be NaN."""
        if block_ids:
            self.data[:, :, block_ids] = 0


class Backend(Protocol):
    """One device's way to do what every decoder needs. All tensors are on that device."""

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
    ) -> None:
        """Store keys and values [tokens, kv_heads, head_dim] at `slots` [tokens] of a layer's cache."""
        ...

    def attend(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], batch: AttentionBatch) -> torch.Tensor:
        """Attend as `kernels.paged_attention.reference` defines; [tokens, heads, head_dim] in and out.

        Slots of a row's last block past its own position may be read, and must hold finite numbers: a weight of zero
        times NaN is NaN. `KvCache.clear` sees to it. No other slot outside of a row's positions is read.
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise the last dimension by its root mean square, in float32, and scale by `weight`."""
        ...

    def rotate(self, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """Rotate heads [tokens, heads, head_dim] by the angles of `cos_sin` [tokens, 2, head_dim]."""
        ...

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(first half) * second half along the last dimension."""
        ...


class CpuBackend:
    """Torch operators. Attention gathers a row's blocks and leaves the arithmetic to torch's blockwise kernel."""

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
    ) -> None:
        """Store keys and values at their slots."""
        cache[0].flatten(0, 1).index_copy_(0, slots, k)
        cache[1].flatten(0, 1).index_copy_(0, slots, v)

    def attend(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], batch: AttentionBatch) -> torch.Tensor:
        """Attend, single-token rows together and every chunk alone."""
        out = torch.empty_like(q)
        for group in batch.decodes:
            out.index_copy_(0, group.tokens, self._attend_decodes(q.index_select(0, group.tokens), cache, group))
        for chunk in batch.chunks:
            out[chunk.start : chunk.end] = self._attend_chunk(q[chunk.start : chunk.end], cache, chunk)
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise in float32, as transformers does."""
        if x.dtype == torch.float32:
            return functional.rms_norm(x, (x.shape[-1],), weight, eps)
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    def rotate(self, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """Rotate pairs (i, i + head_dim / 2)."""
        half = x.shape[-1] // 2
        swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos_sin[:, :1] + swapped * cos_sin[:, 1:]

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Gate the second half by the first."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def _attend_decodes(
        self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], group: DecodeGroup
    ) -> torch.Tensor:
        rows, heads, head_dim = q.shape
        kv_heads = cache[0].shape[2]
        k, v = (
            # [rows, kv_heads, slots, head_dim]
            part.index_select(0, group.tables.flatten()).view(rows, -1, kv_heads, head_dim).transpose(1, 2)
            for part in cache
        )
        # The query heads that share a kv head stand as its query positions: no key is ever repeated.
        grouped = q.view(rows, kv_heads, heads // kv_heads, head_dim)
        out = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask)
        return out.reshape(rows, heads, head_dim)

    def _attend_chunk(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], chunk: Chunk) -> torch.Tensor:
        k, v = (
            # [kv_heads, num_context, head_dim]
            part.index_select(0, chunk.table).flatten(0, 1)[: chunk.num_context].transpose(0, 1)
            for part in cache
        )
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)
