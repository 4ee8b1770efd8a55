"""Constants of the memory layout of 4-bit weights, described in `kernels.streamed_linear.reference`. Needs no torch."""

from __future__ import annotations

BLOCK = 128
"""Inputs whose levels are interleaved."""
PAIRS = 4
"""Pairs of levels in a word."""
GROUP = 128
"""Inputs that share a scale and a zero point in weights quantized here."""
SHORT_GROUPS = (32, 64)
"""Supported group sizes below a block."""
LEVELS = 15
UNIT_BYTES = 4
"""The smallest unit of a GPU's asynchronous copies."""
BYTES_PER_WEIGHT = 0.5 + UNIT_BYTES / GROUP
