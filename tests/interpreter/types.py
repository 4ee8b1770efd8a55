"""Triton's interpreter, faster: what it worked out of types for every operation of a kernel, it works out once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from triton.language import core
from triton.runtime import interpreter

QUESTIONS = ("is_int", "is_int_signed", "is_int_unsigned", "is_floating")


def quicken() -> None:
    """Change the language and the interpreter; what they compute stays the same."""
    remember_blocks()
    remember_shapes()
    interpreter._get_np_dtype = once_by_name(interpreter._get_np_dtype)
    for name in QUESTIONS:
        setattr(core.dtype, name, once_by_name(getattr(core.dtype, name)))


def remember_blocks() -> None:
    """Have types of blocks that are equal share what they are made of."""
    begin = core.block_type.__init__
    known: dict[Any, dict[str, Any]] = {}

    def begin_once(block: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if key not in known:
            begin(block, element_ty, shape)
            known[key] = vars(block).copy()
        vars(block).update(known[key])

    core.block_type.__init__ = begin_once


def remember_shapes() -> None:
    """Have values of equal shapes share them."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def begin(value: Any, handle: Any, kind: Any) -> None:
        value.handle, value.type, value.dtype = handle, kind, kind.scalar
        sizes = tuple(kind.shape.values) if kind.is_block() else ()
        if sizes not in known:
            known[sizes] = core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])
        value.numel, value.shape = known[sizes]

    core.tensor.__init__ = begin


def once_by_name(answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function of a type that asks another once about each; names tell all types apart."""
    known: dict[str, Any] = {}

    def answer_once(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = answer(kind)
        return known[kind.name]

    return answer_once
