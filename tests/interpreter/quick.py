"""Triton's interpreter, faster: it searched all names at each call, and Python memory at each frame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

NUM_LOCALS = 20_000
"""So many variables that their frame needs a piece of memory of its own, of which enough is left for those above it."""


def quicken() -> None:
    """Change the interpreter."""
    patch_once()
    call_at_once()
    builder = interpreter.interpreter_builder
    # Whether numbers overflow is computed for every sum, and looked at in debugging only.
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    call, in_room = interpreter.GridExecutor.__call__, with_room()
    interpreter.GridExecutor.__call__ = lambda *args, **kwargs: in_room(call, args, kwargs)


def patch_once() -> None:
    """Have the interpreter put its own functions in the place of the language's once, for good.

    It did so at each call of a function, and took them back at the end of a launch.
    """
    patch = interpreter._patch_lang
    places: Any = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    is_done = False

    def patch_first(_: Any) -> Any:
        nonlocal is_done
        if not is_done:
            patch(places)
            is_done = True
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_first


def call_at_once() -> None:
    """Have functions of the language called without a look at all their arguments."""

    def patch_attr(place: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        # What checks whether there is a `_semantic` is left out.
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(place, name, call)

    interpreter._patch_attr = patch_attr


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
