"""Modules that call functions of ours by the names of others, while all other modules call those."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from engine.fallback.rebinding import rebound

GIVEN = 3


def double(x: int) -> int:
    return 2 * x


def watched(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wrapped(*arguments: Any, **told: Any) -> Any:
        return forward(*arguments, **told)

    return wrapped


class Doubling(nn.Module):
    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more

    @watched
    def forward(self, x: int, *, times: int = GIVEN) -> int:
        return double(x) * times + self.more


def add_one(theirs: Callable[[int], int], x: int) -> int:
    return theirs(x) + 1


def test_a_copy_of_forward_calls_another_function_and_nobody_else_does() -> None:
    module, other = Doubling(100), Doubling(200)
    ours, names = rebound(module, {"double": add_one, "unheard_of": add_one})
    assert list(names) == ["double"]
    assert ours(5) == 11 * 3 + 100
    assert ours(5, times=1) == 111
    assert (module(5), other(5), double(5)) == (130, 230, 10)
    module.more = 0
    assert ours(5) == 33


def test_what_calls_none_of_the_names_stays_as_it_is() -> None:
    module = Doubling(0)
    assert rebound(module, {}) == (module.forward, ())
    # It is no function.
    assert rebound(module, {"GIVEN": add_one}) == (module.forward, ())
    layer = nn.Linear(2, 2)
    assert rebound(layer, {"double": add_one}) == (layer.forward, ())


def test_a_forward_that_somebody_has_put_there_stays() -> None:
    module = Doubling(0)
    module.forward = lambda x: torch.tensor(x)  # type: ignore[assignment,misc]
    assert rebound(module, {"double": add_one}) == (module.forward, ())
