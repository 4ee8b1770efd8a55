"""Mends the short floats of Triton's interpreter: bfloat16, which it computes with as integers, and 8-bit floats.

NumPy has neither. The interpreter keeps their bits in unsigned integers; here bfloat16 is computed in float32 and
rounded after every operation, and all conversions are torch's, which round to the nearest, halves to the even.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH_BY_TRITON = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
UNSIGNED_BY_BYTES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
OPERATIONS = ("binary_op", "ternary_op", "unary_op", "create_fma", "create_rsqrt")
CONVERSIONS = ("cast_impl", "create_fp_to_fp")


def mend() -> None:
    """Change the interpreter."""
    interpreter._convert_float = partial(_converted, interpreter._convert_float)
    builder = interpreter.InterpreterBuilder
    for name in OPERATIONS:
        setattr(builder, name, _in_float32(getattr(builder, name)))
    builder.create_dot = _in_float32(builder.create_dot, is_rounded=False)
    for name in CONVERSIONS:
        setattr(builder, name, _through_float32(getattr(builder, name)))


def _converted(convert: Callable[..., Any], data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Take the place of the interpreter's `_convert_float`."""
    has_both = {source, target} <= TORCH_BY_TRITON.keys()
    return _bits(data, source, target) if has_both else convert(data, source, target, rounding)


def _bits(data: Any, source: Any, target: Any) -> Any:
    """Return the bits of floats in another type."""
    found = torch.from_numpy(np.array(data)).view(TORCH_BY_TRITON[source]).to(TORCH_BY_TRITON[target])
    return found.view(UNSIGNED_BY_BYTES[found.itemsize]).numpy()


def _in_float32(operation: Callable[..., Any], *, is_rounded: bool = True) -> Callable[..., Any]:
    def compute(builder: Any, *operands: Any) -> Any:
        if not any(map(_is_bfloat16, operands)):
            return operation(builder, *operands)
        found = operation(builder, *map(_widened, operands))
        # Comparisons give truth values.
        return _narrowed(found) if is_rounded and found.data.dtype == np.float32 else found

    return compute


def _through_float32(convert: Callable[..., Any]) -> Callable[..., Any]:
    def compute(builder: Any, source: Any, target: Any, *rounding: Any) -> Any:
        found = _widened(source)
        if found is source or target.scalar not in (tl.float32, tl.bfloat16):
            found = convert(builder, found, tl.float32 if target.scalar == tl.bfloat16 else target, *rounding)
        return _narrowed(found) if target.scalar == tl.bfloat16 else found

    return compute


def _is_bfloat16(operand: Any) -> bool:
    # What compares such numbers keeps their type, though it holds truth values.
    data = getattr(operand, "data", None)
    return isinstance(data, np.ndarray) and data.dtype == np.uint16 and operand.dtype.scalar == tl.bfloat16


def _widened(operand: Any) -> Any:
    if not _is_bfloat16(operand):
        return operand
    return type(operand)((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrowed(operand: Any) -> Any:
    return type(operand)(_bits(operand.data, tl.float32, tl.bfloat16), tl.bfloat16)
