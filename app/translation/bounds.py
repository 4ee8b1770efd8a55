"""Limits on a request: checks whose error messages name the field and the bound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.errors import RequestError


def check_count(count: int, bound: int, what: str, *, field: str) -> None:
    """Check that `count` is at most `bound`; `what` names the counted things in the plural.

    Raises:
        RequestError: the count exceeds the bound.
    """
    if count > bound:
        raise RequestError.about(field, f"accepts at most {bound} {what}; {count} were given.")


def check_depth(value: Any, bound: int, *, field: str) -> None:
    """Check that objects and arrays are nested at most `bound` levels deep.

    Raises:
        RequestError: they are nested deeper.
    """
    depth, level = 0, [value]
    while level := [inner for outer in level for inner in _children(outer)]:
        depth += 1
    if depth > bound:
        raise RequestError.about(field, f"is nested {depth} levels deep; at most {bound} levels are allowed.")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
