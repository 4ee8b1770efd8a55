"""Check from the raw bytes that an adapter's numbers are finite, without torch: the registry's process has none."""

from __future__ import annotations

import numpy as np

from adapters.tensor_file import TensorFile

_EXPONENT_BF16 = 0x7F80


def find_not_finite(tensors: TensorFile) -> str | None:
    """Return the name of a tensor that holds NaN or infinity, or None."""
    for name, entry in tensors.entry_by_name.items():
        content = tensors.bytes_of(entry)
        if entry.dtype == "BF16":
            bits = np.frombuffer(content, dtype="<u2")
            is_bad = bool(((bits & _EXPONENT_BF16) == _EXPONENT_BF16).any())
        else:
            is_bad = not np.isfinite(np.frombuffer(content, dtype="<f4" if entry.dtype == "F32" else "<f2")).all()
        if is_bad:
            return name
    return None
