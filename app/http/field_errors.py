"""Convert pydantic's validation errors to one `ApiError` that names the field as the client wrote it, and the bound.

Pydantic locates an error by a path that mixes keys of the body with tags of union branches; walking the body tells them
apart. Of several failures of one field, the deepest is the most specific. Pydantic's own messages are never passed on,
because they are written for programmers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic_core.core_schema import ErrorType

from app.http.errors import ApiError

_TEXT_BY_TYPE = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be an integer",
    "int_parsing": "must be an integer",
    "int_parsing_size": "must be an integer of at most 4,300 digits",
    "int_type": "must be an integer",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be an array",
    "literal_error": "must be one of {expected}",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_type": "must be a string",
    "too_long": "must have at most {max_length} items",
    "too_short": "must have at least {min_length} items",
}
_KINDS_OF_PYDANTIC = frozenset(get_args(ErrorType))
_TOO_LONG = "must be an integer of at most 64 bits"
_MAX_FAILURES = 1000
"""Only so many are looked at: an object may have hundreds of thousands of wrong values, and the event loop would stand
still for seconds."""
_IS_KEY = "[key]"
"""Pydantic adds this to the location of a key, which is otherwise that of its value."""
TOO_DEEP = "it is nested too deep; some 900 levels are read"
_NOT_JSON = {
    "depth limit exceeded": TOO_DEEP,
    "invalid high surrogate in string": "a string has a lone surrogate",
    "no low surrogate in string": "a string has a lone surrogate",
    "number is infinity when parsed as double": "a number is beyond what a double holds, 1.8e308",
    "str is not valid UTF-8: surrogates not allowed": "it is not UTF-8",
}
"""Replacements for orjson messages that clients might not understand."""
_NO_NUMBER = re.compile(r"-?(?:NaN|Infinity)")
_OWN_CODES = ("unsupported_parameter", "unsupported_value", "unknown_parameter", "invalid_type")


@dataclass(frozen=True, slots=True)
class _Failure:
    param: str
    depth: int
    kind: str
    text: str


def invalid_body(errors: Sequence[Mapping[str, Any]], body: object) -> ApiError:
    """Return the 400 for the first offending field of `body`.

    Args:
        errors: from `ValidationError.errors()`; FastAPI's leading "body" in locations is skipped.
        body: the parsed JSON.
    """
    if errors and errors[0]["type"] == "json_invalid":
        reason = _why_not_json(errors[0], body)
        return ApiError(400, f"The request body is not valid JSON: {reason}.", code="invalid_json")
    failures = [_failure(error, body) for error in errors[:_MAX_FAILURES]]
    root = _root(failures[0].param)
    of_field = [failure for failure in failures if _root(failure.param) == root]
    deepest = max(of_field, key=lambda failure: failure.depth)
    same = [failure for failure in of_field if failure.param == deepest.param]
    return _answer(deepest, list(dict.fromkeys(failure.text for failure in same)))


def _why_not_json(error: Mapping[str, Any], body: object) -> str:
    told = error["ctx"]["error"]
    if told in _NOT_JSON:
        return _NOT_JSON[told]
    # orjson reports the character after the sign.
    start = max(0, error["loc"][-1] - 1)
    if isinstance(body, str) and (found := _NO_NUMBER.search(body, start, start + 10)):
        return f"{found[0]} is no JSON number"
    return f"{told}, at character {error['loc'][-1] + 1}"


def _answer(failure: _Failure, texts: list[str]) -> ApiError:
    if failure.kind == "unknown_parameter":
        message = f"Unknown parameter: '{failure.param}'{failure.text or '.'}"
        return ApiError(400, message, param=failure.param, code="unknown_parameter")
    param = failure.param or None
    if failure.kind == "missing":
        if param is None:
            return ApiError(400, "The request body is empty; a JSON object is expected.", code="missing_body")
        return ApiError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    text = " or ".join([texts[0], *(text.removeprefix("must be ") for text in texts[1:])])
    code = (
        failure.kind if failure.kind in _OWN_CODES else "invalid_type" if "_type" in failure.kind else "invalid_value"
    )
    subject = f"'{param}'" if param else "The request body"
    if code.startswith("unsupported"):
        return ApiError(400, f"Unsupported: {subject}: {text}." if param else text, param=param, code=code)
    return ApiError(400, f"Invalid value: {subject} {text}.", param=param, code=code)


def _failure(error: Mapping[str, Any], body: object) -> _Failure:
    kind, context = str(error["type"]), error.get("ctx", {})
    place, *keys = error["loc"] or ("body",)
    if place in ("query", "path"):
        # A single value in the URL: the rest of the location names the branch of its type.
        body, keys = {keys[0]: None}, keys[:1]
    elif place != "body":
        keys = [place, *keys]
    here, param, depth = body, "", 0
    is_missing = kind == "missing" and "field" not in context
    for number, key in enumerate(keys, 1):
        if isinstance(key, int) and isinstance(here, list) and key < len(here):
            here, param = here[key], f"{param}[{key}]"
        elif isinstance(key, str) and isinstance(here, dict) and key in here:
            here, param = here[key], f"{param}.{key}" if param else key
        elif isinstance(key, str) and isinstance(here, dict) and is_missing and number == len(keys):
            param = f"{param}.{key}" if param else key
        else:
            continue  # tag of a union branch
        depth += 1
    if "field" in context:
        param, depth = f"{param}.{context['field']}" if param else str(context["field"]), depth + 1
    is_too_long = kind == "int_type" and isinstance(given := error.get("input"), float) and abs(given) >= 2.0**63
    # In a list, where the parser's float has not been made an integer again.
    text = _TOO_LONG if is_too_long else _text(kind, context, str(error["msg"]))
    return _Failure(param=param, depth=depth, kind=kind, text=f"is a key, which {text}" if _IS_KEY in keys else text)


def _text(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind in _TEXT_BY_TYPE:
        return re.sub(r"\b(1 (?:character|item))s$", r"\1", _TEXT_BY_TYPE[kind].format(**context))
    return "has a value that is not allowed" if kind in _KINDS_OF_PYDANTIC else message


def _root(param: str) -> str:
    return param.split(".")[0].split("[")[0]
