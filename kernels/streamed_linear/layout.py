"""How weights of 4 bits lie in memory, in numbers; `kernels.streamed_linear.reference` says it in words. Pure."""

from __future__ import annotations

BLOCK = 128
"""Inputs whose levels lie among each other."""
GROUP = 128
"""Inputs that share a scale and a zero point where weights are rounded here."""
SHORT_GROUPS = (32, 64)
"""Other groups than whole blocks."""
LEVELS = 15
UNIT_BYTES = 4
"""The fewest that a GPU copies ahead of their use."""
BYTES_PER_WEIGHT = 0.5 + UNIT_BYTES / GROUP
