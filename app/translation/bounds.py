"""Limits on a request: checks whose error messages name the field and the bound."""

from __future__ import annotations

import json
from typing import Any

from app.settings import LimitSettings
from deployments.prompt_texts import depth_of
from engine.errors import RequestError


def check_count(count: int, bound: int, what: str, *, field: str) -> None:
    """Check that `count` is at most `bound`; `what` names the counted things in the plural.

    Raises:
        RequestError: the count exceeds the bound.
    """
    if count > bound:
        raise RequestError.about(field, f"accepts at most {bound} {what}; {count} were given.")


def check_chars(count: int, limits: LimitSettings, *, field: str) -> None:
    """Check that a prompt, or all prompts of a request together, are not too long.

    Raises:
        RequestError: they are.
    """
    check_count(count, limits.max_prompt_chars, "characters or token ids", field=field)


def check_depth(value: Any, bound: int, *, field: str) -> None:
    """Check that objects and arrays are nested at most `bound` levels deep.

    Raises:
        RequestError: they are nested deeper.
    """
    if (depth := depth_of(value)) > bound:
        raise RequestError.about(field, f"is nested {depth} levels deep; at most {bound} levels are allowed.")


def check_json(value: Any, limits: LimitSettings, *, field: str) -> int:
    """Check that a schema, or other JSON of a client's, is not nested too deep or too long, and return its characters.

    Raises:
        RequestError: it is.
    """
    check_depth(value, limits.max_schema_depth, field=field)
    num_chars = len(json.dumps(value))
    check_count(num_chars, limits.max_schema_chars, "characters", field=field)
    return num_chars
