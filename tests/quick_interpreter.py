"""Triton's interpreter, a quarter faster: it looked through all of the language's names at each call of a function."""

from __future__ import annotations

import inspect
from typing import Any


def remember_names() -> None:
    """Have the interpreter look once for those of the language's functions that it computes itself.

    They are no others later: what it has put in their place is passed over as before. Where a version of Triton has
    another way of its own, that is left alone.
    """
    # Not before it is said that kernels are to be interpreted.
    from triton.language import core
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_builtin") or not hasattr(interpreter, "_patch_attr"):
        return
    names_by_place: dict[Any, list[str]] = {}

    def patch_builtin(place: Any, *others: Any) -> None:
        if place not in names_by_place:
            names_by_place[place] = [name for name, member in inspect.getmembers(place) if core.is_builtin(member)]
        for name in names_by_place[place]:
            member = getattr(place, name)
            if core.is_builtin(member):
                interpreter._patch_attr(place, name, member, *others)

    interpreter._patch_builtin = patch_builtin
