"""How many of something a request may have: one check, and one sentence that names the field and the bound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.errors import RequestError


def check_count(count: int, bound: int, what: str, *, field: str) -> None:
    """Do nothing where `count` is within the bound; `what` is counted, in the plural.

    Raises:
        RequestError: it is not.
    """
    if count > bound:
        raise RequestError(f"'{field}' accepts at most {bound} {what}; {count} were given.", field=field)


def check_depth(value: Any, bound: int, *, field: str) -> None:
    """Do nothing where objects and arrays are nested no deeper than the bound.

    Raises:
        RequestError: they are.
    """
    depth, level = 0, [value]
    while level := [inner for outer in level for inner in _children(outer)]:
        depth += 1
    if depth > bound:
        raise RequestError(f"'{field}' is nested {depth} levels deep; at most {bound} levels are allowed.", field=field)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
