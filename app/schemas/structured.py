"""What an answer has to look like: OpenAI's `response_format`, and the extension `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from app.schemas.wire import WireRequest, missing

JsonSchema = dict[str, Any]

MAX_CHOICES = 1900
"""llguidance has 2,000 items in a row, and some are of what stands around the choices."""


class JsonSchemaFormat(WireRequest):
    """A named JSON schema, enforced whether `strict` is set or not."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="No effect.")
    description: str | None = Field(default=None, max_length=65536, description="No effect.")
    schema_: JsonSchema | None = Field(default=None, alias="schema", description="The answer is valid against it.")
    strict: bool | None = Field(default=None, description="Accepted; the schema is always enforced.")


class ResponseFormat(WireRequest):
    """Free text, any JSON object, or JSON that is valid against a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(default=None, description="Only with type `json_schema`.")

    @model_validator(mode="after")
    def _has_a_schema_where_it_needs_one(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            if self.json_schema is None:
                raise missing("json_schema")
            raise PydanticCustomError("invalid", "requires the type 'json_schema'", {"field": "json_schema"})
        return self


class TagStructure(WireRequest):
    """Text that starts with `begin` continues with JSON that is valid against `schema`, then `end`."""

    begin: str = Field(min_length=1, max_length=1024)
    schema_: JsonSchema = Field(alias="schema")
    end: str = Field(max_length=1024)


class StructuralTag(WireRequest):
    """Free text in which every trigger must start one of the structures."""

    type: Literal["structural_tag"]
    structures: list[TagStructure] = Field(min_length=1, max_length=64)
    triggers: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(min_length=1, max_length=64)


class StructuredOutputs(WireRequest):
    """Extension: the format of the answer, given in exactly one way."""

    json_: JsonSchema | None = Field(default=None, alias="json", description="A JSON schema.")
    regex: str | None = Field(default=None, min_length=1, description="A regular expression in Rust syntax.")
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None, min_length=1, max_length=MAX_CHOICES, description="One of these strings."
    )
    grammar: str | None = Field(default=None, min_length=1, description="A grammar in Lark or GBNF syntax.")
    structural_tag: StructuralTag | None = Field(default=None, description="Free text that contains structures.")

    @model_validator(mode="after")
    def _says_one_thing(self) -> StructuredOutputs:
        if sum(value is not None for _, value in self) != 1:
            raise PydanticCustomError(
                "invalid", "must have exactly one of json, regex, choice, grammar or structural_tag"
            )
        return self
