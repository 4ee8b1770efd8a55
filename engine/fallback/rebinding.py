"""Makes a transformers module call replacements for global functions of its Python file.

All users of transformers in this process share that file, other engines included. So it is not patched: a copy of the
module's `forward` gets its own globals.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch


def rebound(
    module: torch.nn.Module, functions: Mapping[str, Callable[..., Any]]
) -> tuple[Callable[..., Any], Collection[str]]:
    """Return a module's `forward` with replacements for some of the functions that it calls, and their names.

    Args:
        functions: replacements by name; each takes the original function, then the call's arguments. Names that
            `forward` does not use, or that are not callable there, are ignored.
    """
    forward: Callable[..., Any] = module.forward
    if not isinstance(forward, MethodType):
        return forward, ()
    # transformers' wrappers only serve weights spread over several devices.
    plain = inspect.unwrap(forward.__func__)
    if not isinstance(plain, FunctionType):
        return forward, ()
    ours = {
        name: partial(function, theirs)
        for name, function in functions.items()
        if name in plain.__code__.co_names and callable(theirs := plain.__globals__.get(name))
    }
    if not ours:
        return forward, ()
    names = {**plain.__globals__, **ours}
    copy = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    return MethodType(copy, module), ours
