"""The two kinds of JSON objects: strict ones from clients, and ours.

Nothing is ignored: a field is either done, or asks for nothing (`NEUTRAL`, and null whatever its name), or is refused.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError


def _until_wrong(value: Any) -> Any:
    """Return an object, or of one with values that are no texts the first of these: an error for each takes seconds."""
    if not isinstance(value, dict):
        return value
    return next(({name: text} for name, text in value.items() if not isinstance(text, str)), value)


Texts = Annotated[dict[str, str], BeforeValidator(_until_wrong)]
"""Texts by name."""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    BeforeValidator(_until_wrong),
]
"""What a client notes on something, within OpenAI's bounds."""
ModelName = Annotated[
    str, Field(min_length=1, max_length=256, description="Public name of a base model or an adapter.")
]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
ASKS_NOTHING: tuple[object, ...] = (None,)
"""Only null leaves the field unused."""
MIN_LIKENESS = 0.8
"""Of an unknown field to the one that is hinted at: a slip of the hand, not another word."""


def _stop_at_the_first(schema: Any) -> None:
    inner: Iterable[Any] = ()
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        inner = schema.values()
    elif isinstance(schema, list):
        inner = schema
    for part in inner:
        _stop_at_the_first(part)


class WireRequest(BaseModel):
    """A JSON object from a client: no coercion, no NaN, no unknown field with a value.

    Attributes:
        NEUTRAL: fields of OpenAI's and of vLLM's that we know and do not do, each with the values that ask for
            nothing. Any other value is refused as `unsupported_parameter`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Stop at a list's first bad item: an error tells of one, and collecting a million blocks the event loop."""
        schema = handler(source)
        _stop_at_the_first(schema)
        return schema

    @classmethod
    def wire_names(cls) -> set[str]:
        """Return the fields as they are written in JSON."""
        return {info.alias or name for name, info in cls.model_fields.items()}

    @classmethod
    def _is_absent(cls, name: str, value: Any) -> bool:
        """Return whether a field is null that may be left out and means something else than null then."""
        if value is not None:
            return False
        fields = cls.model_fields
        info = fields.get(name) or next((info for info in fields.values() if info.alias == name), None)
        return info is not None and not info.is_required() and info.default is not None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_we_do_not_do(cls, data: Any) -> Any:
        known = cls.wire_names()
        if not isinstance(data, dict):
            return data
        data = {name: _whole(value) for name, value in data.items() if not cls._is_absent(name, value)}
        if data.keys() <= known:
            return data
        kept = {}
        for name, value in data.items():
            if name in known:
                kept[name] = value
            elif name not in cls.NEUTRAL:
                if value is None:
                    continue  # clients send items back as they hold them, with the fields of newer versions
                raise _unknown_field(name, [*known, *cls.NEUTRAL])
            elif not any(value == neutral and type(value) is type(neutral) for neutral in cls.NEUTRAL[name]):
                raise PydanticCustomError(
                    "unsupported_parameter", "this server does not support it yet", {"field": name}
                )
        return kept


def _whole(value: Any) -> Any:
    """Return an integer that the parser has made a float of, so that its field tells of the bound that it is over.

    The parser leaves -2^63 an integer, but makes -2.0^63 of the next lower ones.
    """
    if type(value) is not float or not 2.0**63 <= abs(value) < math.inf:
        return value
    return int(value) - (value < 0)


def missing(field: str) -> PydanticCustomError:
    """Return the error for a field that has to be there."""
    return PydanticCustomError("missing", "", {"field": field})


def checked_type(
    is_foreign: Callable[[str], bool], words: str, needed: Mapping[str, Sequence[str]] | None = None
) -> Any:
    """Return a validator of an object's `type`.

    Args:
        is_foreign: whether we know a type and do not do it; `words` refuse it, and may name it as `{kind}`.
        needed: fields that objects of a type must have.
    """

    def check(data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str):
            if is_foreign(kind):
                raise PydanticCustomError("unsupported_value", words, {"field": "type", "kind": kind[:64]})
            for field in (needed or {}).get(kind, ()):
                if data.get(field) is None:
                    raise missing(field)
        return data

    return model_validator(mode="before")(check)


def _unknown_field(name: str, known: list[str]) -> PydanticCustomError:
    # What older versions of vLLM, and programs written for them, call `guided_json` and so on.
    asked = "structured_outputs" if name.startswith("guided_") else name[:64]
    near = difflib.get_close_matches(asked, known, n=1, cutoff=MIN_LIKENESS)
    hint = f". Did you mean '{near[0]}'?" if near else ""
    return PydanticCustomError("unknown_parameter", "{hint}", {"field": name[:64], "hint": hint})


class WireResponse(BaseModel):
    """A JSON object of ours."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


T = TypeVar("T")
IfAny = Annotated[T | None, Field(exclude_if=lambda value: value is None)]
"""A field that only some answers have; left out where it is null."""


class WirePage(WireResponse, Generic[T]):
    """A page of a list."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, data: list[T], ids: Sequence[str], *, has_more: bool) -> Self:
        """Return the page with these items, whose ids are given beside them."""
        first_id, last_id = (ids[0], ids[-1]) if ids else (None, None)
        return cls(data=data, first_id=first_id, last_id=last_id, has_more=has_more)
