"""How many of something a request may have: one check, and one sentence that names the field and the bound."""

from __future__ import annotations

from engine.errors import RequestError


def check_count(count: int, bound: int, what: str, *, field: str) -> None:
    """Do nothing where `count` is within the bound; `what` is counted, in the plural.

    Raises:
        RequestError: it is not.
    """
    if count > bound:
        raise RequestError(f"'{field}' has {count} {what}; at most {bound} are allowed.", field=field)
