"""Launches, on meta tensors, of the kernels of layers that keep states."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.causal_conv.launch import causal_conv
from kernels.gated_delta.launch import gated_delta
from kernels.selective_scan.launch import selective_scan
from kernels.state_rows import StateRows

NUM_STATES = 65


class DeltaLayer(NamedTuple):
    """Heads of a layer with the gated delta rule."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int


QWEN_3_5 = DeltaLayer(16, 32, 128, 128)
"""Of Qwen3-Next too."""
DELTA_LAYERS = (QWEN_3_5, DeltaLayer(30, 30, 96, 192), DeltaLayer(4, 8, 256, 256))
"""The second one is OLMo Hybrid's; the third has the widest keys."""
WIDTH = 4


class ScanLayer(NamedTuple):
    """Heads of a layer with a selective scan."""

    heads: int
    groups: int
    head_dim: int
    state_dim: int


GRANITE_4 = ScanLayer(128, 1, 64, 128)
SCAN_LAYERS = (GRANITE_4, ScanLayer(128, 8, 64, 128), ScanLayer(24, 1, 128, 256))
"""The second one is Nemotron-H's; the third has the widest states, as Falcon-H1."""
BATCHES = ((1, 512), (1, 1), (64, 1))
"""Rows and tokens of each: a chunk of a prompt, and steps."""


def keep_states() -> None:
    """Launch the kernels of all layers in bfloat16, those of the first ones also in float16 and float32."""
    for delta_layer in DELTA_LAYERS:
        keep_delta_states(delta_layer, torch.bfloat16)
    for scan_layer in SCAN_LAYERS:
        keep_scan_states(scan_layer, torch.bfloat16)
    for dtype in (torch.float16, torch.float32):
        keep_delta_states(QWEN_3_5, dtype)
        keep_scan_states(GRANITE_4, dtype)


def keep_delta_states(layer: DeltaLayer, dtype: torch.dtype) -> None:
    """Launch the kernels of a layer with the gated delta rule."""
    key_heads, heads, key_dim, value_dim = layer
    widths = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
    channels, weight = sum(widths), empty(sum(widths), WIDTH, dtype=dtype)
    inputs, held = empty(NUM_STATES, channels, WIDTH, dtype=dtype), empty(NUM_STATES, *layer[1:], dtype=torch.float32)
    for rows, tokens in BATCHES:
        found = _rows(rows) if rows > 1 else None
        x = empty(rows, tokens, channels, dtype=dtype)
        mixed = causal_conv(x, None if tokens > 1 else inputs, weight, None, found)
        q, k, v = mixed.split(widths, dim=-1)
        g = empty(rows, tokens, heads, dtype=torch.float32)
        gated_delta(
            q.unflatten(-1, (key_heads, key_dim)),
            k.unflatten(-1, (key_heads, key_dim)),
            v.unflatten(-1, (heads, value_dim)),
            *(g, g, held, found),
        )


def keep_scan_states(layer: ScanLayer, dtype: torch.dtype) -> None:
    """Launch the kernels of a layer with a selective scan."""
    heads, groups, head_dim, state_dim = layer
    widths = [heads * head_dim, groups * state_dim, groups * state_dim]
    of_heads, states = (
        empty(heads, dtype=torch.float32),
        empty(NUM_STATES, heads, head_dim, state_dim, dtype=torch.float32),
    )
    for rows, tokens in BATCHES:
        x, b, c = empty(rows, tokens, sum(widths), dtype=dtype).split(widths, dim=-1)
        selective_scan(
            x.unflatten(-1, (heads, head_dim)),
            empty(rows, tokens, heads, dtype=torch.float32),
            of_heads,
            b.unflatten(-1, (groups, state_dim)),
            c.unflatten(-1, (groups, state_dim)),
            *(of_heads, states, _rows(rows) if rows > 1 else None),
        )


def _rows(count: int) -> StateRows:
    return StateRows(empty(count, dtype=torch.int64), empty(count, dtype=torch.bool))


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")
