"""Triton's interpreter, faster: it looked through all names at each call, and Python through memory at each frame."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from triton.language import core
from triton.runtime import interpreter

NUM_LOCALS = 20_000
"""So many variables that their frame needs a piece of memory of its own, of which enough is left for those above it."""


def quicken() -> None:
    """Change the interpreter."""
    remember_names()
    call, in_room = interpreter.GridExecutor.__call__, with_room()
    interpreter.GridExecutor.__call__ = lambda *args, **kwargs: in_room(call, args, kwargs)


def remember_names() -> None:
    """Have the interpreter look once for those of the language's functions that it computes itself.

    They are no others later: what it has put in their place is passed over as before. Where a version of Triton has
    another way of its own, that is left alone.
    """
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


def with_room() -> Callable[[Callable[..., Any], Any, Any], Any]:
    """Return a function that calls another where the frames of all further calls have room.

    Python takes memory for frames from the system in pieces of 16 KiB, and gives a piece back as soon as the last frame
    on it returns. Where a kernel is interpreted at the end of a piece, each of its calls did both: half of the time.
    """
    variables = " = ".join(f"_{number}" for number in range(NUM_LOCALS))
    made: dict[str, Any] = {}
    exec(f"def in_room(call, args, kwargs):\n  if False: {variables} = None\n  return call(*args, **kwargs)", made)
    in_room: Callable[[Callable[..., Any], Any, Any], Any] = made["in_room"]
    return in_room
