"""Rename a chat's fields in errors to those of the API that the client used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from engine.errors import RequestError

FieldName = str | Callable[[re.Match[str]], str]
"""A replacement for `re.sub`."""


@contextmanager
def renamed_fields(names: Mapping[str, FieldName]) -> Iterator[None]:
    """Make errors raised in the block name the client's fields.

    Args:
        names: maps a regular expression for a chat's field to the client's name for it.
    """
    try:
        yield
    except RequestError as error:
        if error.field is None:
            raise
        field = _renamed(error.field, names)
        message = re.sub(r"'([\w.\[\]]+)'", lambda found: f"'{_renamed(found[1], names)}'", error.message)
        raise RequestError(message, field=field, code=error.code) from error


def _renamed(field: str, names: Mapping[str, FieldName]) -> str:
    for pattern, name in names.items():
        field, count = re.subn(f"^{pattern}(?![a-z_])", name, field)
        if count:
            return field
    return field
