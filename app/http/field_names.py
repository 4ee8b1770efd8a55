"""Errors that name a chat's fields, told to a client that wrote other ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from engine.errors import RequestError

FieldName = str | Callable[[re.Match[str]], str]
"""As `re.sub` takes a replacement."""


@contextmanager
def renamed_fields(names: Mapping[str, FieldName]) -> Iterator[None]:
    """Let errors of the block name what the client wrote.

    Args:
        names: regular expression of a chat's field -> what the client calls it.
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
