"""Triton's interpreter, faster: operands of equal types and shapes are taken as they are, others without detours."""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def quicken() -> None:
    """Change the language and the interpreter; nothing that they compute is another afterwards."""
    take_equal_types()
    take_equal_shapes()
    hold_at_once()
    unwrap, is_equal = core._unwrap_if_constexpr, core.dtype.__eq__
    core._unwrap_if_constexpr = lambda value: value if type(value) in (core.tensor, int) else unwrap(value)
    core.dtype.__eq__ = lambda a, b: a is b or is_equal(a, b)


def take_equal_types() -> None:
    """Have two values of one type, or a pointer and an offset, taken as they are, and others looked up."""
    check, promote = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.computation_type_impl
    known: dict[Any, Any] = {}

    def check_others(semantic: Any, a: Any, b: Any, *options: Any, **named: Any) -> Any:
        # The interpreter's own numbers are values too. Division promotes some types.
        if not named and len(options) < 4 and type(a) is type(b) is core.tensor:
            a_type, b_type = a.type.scalar, b.type.scalar
            is_offset = options[:1] == (True,) and a_type.is_ptr() and b_type.is_int()
            if is_offset or (a_type.name == b_type.name and not a_type.is_ptr()):
                return semantic.broadcast_impl_value(a, b)
        return check(semantic, a, b, *options, **named)

    def promote_once(semantic: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, *others: Any) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, *others
        if key not in known:
            known[key] = promote(semantic, a, a_is_scalar, b, b_is_scalar, *others)
        return known[key]

    TritonSemantic.binary_op_type_checking_impl = check_others
    TritonSemantic.computation_type_impl = promote_once


def take_equal_shapes() -> None:
    """Have two values of one shape taken as they are, and others, if as long, spread to what is found once."""
    broadcast = TritonSemantic.broadcast_impl_value
    known: dict[Any, list[int]] = {}

    def spread(semantic: Any, value: Any, sizes: list[int]) -> Any:
        if value.type.shape.values == sizes:
            return value
        kind = core.block_type(value.type.scalar, sizes)
        return semantic.tensor(semantic.builder.create_broadcast(value.handle, sizes), kind)

    def broadcast_others(semantic: Any, a: Any, b: Any) -> Any:
        are_blocks = a.type.is_block(), b.type.is_block()
        if not any(are_blocks):
            return a, b
        if not all(are_blocks):
            return broadcast(semantic, a, b)
        a_sizes, b_sizes = a.type.shape.values, b.type.shape.values
        if a_sizes == b_sizes:
            return a, b
        if len(a_sizes) != len(b_sizes):
            return broadcast(semantic, a, b)
        key = tuple(a_sizes), tuple(b_sizes)
        if key not in known:
            known[key] = list(broadcast(semantic, a, b)[0].type.shape.values)
        return spread(semantic, a, known[key]), spread(semantic, b, known[key])

    TritonSemantic.broadcast_impl_value = broadcast_others


def hold_at_once() -> None:
    """Have what holds an array made by one call, and a number spread without a look at a shape's parts."""
    most_by_name: dict[str, float] = {}

    def begin(handle: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        handle.data, handle.dtype, handle.attr = data, dtype, {} if attr is None else attr
        most = most_by_name.get(dtype.name)
        if most is None:
            most = float("inf") if dtype.is_ptr() else max(dtype.primitive_bitwidth, 8) / 8
            most_by_name[dtype.name] = most
        if data.itemsize > most:
            handle.__post_init__()

    def splat(_: Any, kind: Any, number: Any) -> Any:
        # A comparison's handle has the type of what was compared; Triton 3.9 takes only booleans for a mask.
        is_found = number.data.dtype == np.bool_
        data = np.empty(kind.shape.values, dtype=np.bool_ if is_found else interpreter._get_np_dtype(number.dtype))
        data[...] = number.data
        return interpreter.TensorHandle(data, number.dtype.scalar)

    interpreter.TensorHandle.__init__ = begin
    interpreter.InterpreterBuilder.create_splat = splat
