"""Launches, on meta tensors, of the kernels of layers that keep states."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.causal_conv.launch import causal_conv
from kernels.gated_delta.launch import gated_delta
from kernels.meta_tensors import empty, whole
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


def keep_states() -> None:
    """Launch the kernels of all layers in bfloat16, those of the first one also in float16 and float32."""
    for layer in DELTA_LAYERS:
        keep_delta_states(layer, torch.bfloat16)
    for dtype in (torch.float16, torch.float32):
        keep_delta_states(QWEN_3_5, dtype)


def keep_delta_states(layer: DeltaLayer, dtype: torch.dtype) -> None:
    """Launch the kernels of a layer, for a chunk of a prompt and for a recorded step."""
    key_heads, heads, key_dim, value_dim = layer
    widths = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
    channels, weight = sum(widths), empty(sum(widths), WIDTH, dtype=dtype)
    inputs, held = empty(NUM_STATES, channels, WIDTH, dtype=dtype), empty(NUM_STATES, *layer[1:], dtype=torch.float32)
    for rows, tokens in ((1, 512), (1, 1), (64, 1)):
        found = StateRows(whole(rows), empty(rows, dtype=torch.bool)) if rows > 1 else None
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
