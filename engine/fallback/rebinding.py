"""Has a module of transformers call functions of ours where it calls its own by their names.

What a module's file defines all its modules share, other engines' too, and whoever else computes by transformers in
this process. So it stays as it is: a copy of the module's `forward` looks names up somewhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch


def rebound(module: torch.nn.Module, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a module's `forward` with other functions for some of the names that it calls.

    Args:
        functions: by name; each takes the function of that name that it stands for, and what that is called with. Names
            that the module does not call, or that stand for something else, are ignored.
    """
    forward: Callable[..., Any] = module.forward
    if not isinstance(forward, MethodType):
        return forward
    # What transformers wraps it in is for weights that lie on several devices.
    plain = inspect.unwrap(forward.__func__)
    if not isinstance(plain, FunctionType):
        return forward
    ours = {
        name: partial(function, theirs)
        for name, function in functions.items()
        if name in plain.__code__.co_names and callable(theirs := plain.__globals__.get(name))
    }
    if not ours:
        return forward
    names = {**plain.__globals__, **ours}
    copy = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    return MethodType(copy, module)
