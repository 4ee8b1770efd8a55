"""Tools of the Responses API: functions, alone or in namespaces, each with the name by which the model calls it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from app.schemas.structured import JsonSchema
from app.schemas.tools import FunctionDefinition, FunctionName, Tool, not_too_many
from app.schemas.wire import ASKS_NOTHING, WireRequest, checked_type
from engine.errors import RequestError

MAX_CALLED_NAME_CHARS = 64


class FunctionTool(WireRequest):
    """A function that the model may call."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "allowed_callers": (None, ["direct"]),
        "async": (None, False),
        "defer_loading": (None, False),
        "output_schema": ASKS_NOTHING,
    }

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None

    _only_functions = checked_type(
        "function".__ne__, "this server does not support tools of type '{kind}', only functions"
    )


class NamespaceTool(WireRequest):
    """A group of functions; calls to them give the namespace next to the name."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = Field(
        default=None, description="Shown to the model before the description of the first function."
    )
    tools: list[FunctionTool]


class CachedSearch(WireRequest):
    """A web search without external access, which coding agents offer by default. It is accepted but not shown to the
    model, because there is nothing to search. A search with external access is refused.
    """

    type: Literal["web_search"]
    external_web_access: Literal[False]
    filters: dict[str, Any] | None = Field(default=None, description="Accepted, no effect.")
    search_content_types: list[str] | None = Field(default=None, description="Accepted, no effect.")
    search_context_size: str | None = Field(default=None, description="Accepted, no effect.")
    user_location: dict[str, Any] | None = Field(default=None, description="Accepted, no effect.")


def _kind(tool: Any) -> str:
    match tool:
        case NamespaceTool() | {"type": "namespace"}:
            return "a namespace"
        case CachedSearch() | {"type": "web_search", "external_web_access": False}:
            return "a search"
    return "a function"


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("a function")]
    | Annotated[NamespaceTool, Tag("a namespace")]
    | Annotated[CachedSearch, Tag("a search")],
    Discriminator(_kind),
]


ResponseTools = Annotated[list[ResponseTool], BeforeValidator(not_too_many)]


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A function that is shown to the model.

    Attributes:
        place: its path in the request, such as `tools[0]`.
        namespace: None if it belongs to none.
    """

    place: str
    namespace: str | None
    name: str
    tool: Tool


def offered_functions(tools: Sequence[ResponseTool]) -> Iterator[OfferedFunction]:
    """Yield the functions in order.

    Raises:
        RequestError: a name is too long, including its namespace.
    """
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if isinstance(tool, FunctionTool):
            yield _offered(tool, place, None, tool.description)
        elif isinstance(tool, NamespaceTool):
            told = [tool.description]
            for inner_index, inner in enumerate(tool.tools):
                description = "\n".join(text for text in (*told, inner.description) if text)
                yield _offered(inner, f"{place}.tools[{inner_index}]", tool.name, description or None)
                told = []


def called_name(name: str, namespace: str | None, place: str) -> str:
    """Return the name by which the model calls a function.

    Raises:
        RequestError: it is too long.
    """
    called = name if namespace is None else f"{namespace}__{name}"
    if len(called) > MAX_CALLED_NAME_CHARS:
        raise RequestError.about(
            f"{place}.name", f"must have at most {MAX_CALLED_NAME_CHARS} characters, including its namespace and '__'."
        )
    return called


def _offered(tool: FunctionTool, place: str, namespace: str | None, description: str | None) -> OfferedFunction:
    name = called_name(tool.name, namespace, place)
    function = FunctionDefinition(name=name, description=description, parameters=tool.parameters, strict=tool.strict)
    return OfferedFunction(place, namespace, tool.name, Tool(type="function", function=function))
