"""Translate the requested format of an answer to a grammar for the engine. Pure functions; settings give the bounds."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from llguidance import LLMatcher, StructTag, grammar_from
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from app.schemas.common import SamplingFields
from app.schemas.structured import StructuralTag, StructuredOutputs
from app.settings import LimitSettings
from app.translation.bounds import check_count, check_json
from deployments.gateway.grammars import without_hints
from deployments.generation import Grammar
from deployments.tools.grammar import JSON_STYLE
from engine.errors import RequestError

_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start[ \t]*:)", re.MULTILINE)
"""Where a grammar is not GBNF. The library's own pattern takes time quadratic in the number of empty lines."""

MAX_GBNF_RULES = 1000
"""The library takes time quadratic in the number of rules that refer to each other: 0.4 s for so many."""

_GBNF_ESCAPE = re.compile(r"\\(?:u(?P<short>[0-9a-fA-F]{4})|U(?P<long>[0-9a-fA-F]{8})|.)")
"""Any escape, so that a backslash that is escaped begins none."""


def answer_grammar(body: SamplingFields, limits: LimitSettings) -> Grammar | None:
    """Return the grammar of an answer, None for free text.

    Raises:
        RequestError: a schema is too large or too deep, a grammar is invalid, or two fields conflict.
    """
    wanted, extension = body.response_format, body.structured_outputs
    if wanted is None or wanted.type == "text":
        return None if extension is None else _checked(body, _of_extension(extension, limits))
    if extension is not None:
        raise RequestError("Set 'response_format' or 'structured_outputs', not both.", field="structured_outputs")
    schema: Any = {"type": "object"}
    if wanted.json_schema is not None:
        schema = {} if wanted.json_schema.schema_ is None else wanted.json_schema.schema_
    source = _of_schema(schema, limits, "response_format")
    return _checked(body, Grammar(source=source, field="response_format"))


def _checked(body: SamplingFields, grammar: Grammar) -> Grammar:
    # Combined with these, the grammar may allow no token at all.
    for name in ("min_tokens", "ignore_eos", "allowed_token_ids", "bad_words"):
        if getattr(body, name):
            raise RequestError.about(name, f"cannot be used with '{grammar.field}'.")
    return grammar


def _of_extension(wanted: StructuredOutputs, limits: LimitSettings) -> Grammar:
    if wanted.json_ is not None:
        field = "structured_outputs.json"
        source = _of_schema(wanted.json_, limits, field)
    elif wanted.regex is not None:
        field = "structured_outputs.regex"
        _check_size(len(wanted.regex), limits, field)
        source = LLMatcher.grammar_from_regex(wanted.regex)
    elif wanted.choice is not None:
        field = "structured_outputs.choice"
        _check_size(sum(map(len, wanted.choice)), limits, field)
        source = grammar_from("choice", json.dumps(wanted.choice))
    elif wanted.grammar is not None:
        field = "structured_outputs.grammar"
        _check_size(len(wanted.grammar), limits, field)
        lark = wanted.grammar if _LARK.search(wanted.grammar) else _lark_of(wanted.grammar, field)
        source = LLMatcher.grammar_from_lark(lark)
    else:
        assert wanted.structural_tag is not None
        field = "structured_outputs.structural_tag"
        source = _of_tags(wanted.structural_tag, limits, field)
    return Grammar(source=source, field=field)


def _lark_of(gbnf: str, field: str) -> str:
    check_count(gbnf.count("::="), MAX_GBNF_RULES, "rules in GBNF", field=field)
    try:
        return gbnf_to_lark(_GBNF_ESCAPE.sub(_readable, gbnf))
    except Exception as error:
        # The library raises bare exceptions too, for a rule that is missing. Its own slips tell nothing of a grammar.
        is_told = isinstance(error, GbnfToLarkError) or type(error) is Exception
        reason = str(error)[:300] if is_told else "it could not be read"
        raise RequestError.about(field, f"is not a valid grammar: {reason}") from error


def _readable(escape: re.Match[str]) -> str:
    """Return an escape as the library reads it, which takes the zeros off the number of a character."""
    digits = escape["short"] or escape["long"]
    code = -1 if digits is None else int(digits, 16)
    if not 0 <= code <= sys.maxunicode or 0xD800 <= code <= 0xDFFF:
        return escape[0]
    # What has a meaning in a literal or a class is ASCII.
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _of_tags(wanted: StructuralTag, limits: LimitSettings, field: str) -> str:
    tags = []
    for structure in wanted.structures:
        trigger = next((text for text in wanted.triggers if structure.begin.startswith(text)), None)
        if trigger is None:
            raise RequestError(f"'{field}': structure {structure.begin[:64]!r} begins with no trigger.", field=field)
        check_json(structure.schema_, limits, field=field)
        schema = {"x-guidance": JSON_STYLE, **without_hints(structure.schema_)}
        tags.append(StructTag(trigger=trigger, begin=structure.begin, grammar=schema, end=structure.end))
    return StructTag.to_grammar(tags, assume_special=False)


def _of_schema(schema: Any, limits: LimitSettings, field: str) -> str:
    check_json(schema, limits, field=field)
    return LLMatcher.grammar_from_json_schema(without_hints(schema), defaults=JSON_STYLE)


def _check_size(num_chars: int, limits: LimitSettings, field: str) -> None:
    check_count(num_chars, limits.max_schema_chars, "characters", field=field)
