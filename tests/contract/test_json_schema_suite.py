"""The grammars of schemas against JSON Schema's own test suite, and against `jsonschema` where they make answers."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer

from app.schemas.completions import CompletionRequest
from app.settings import LimitSettings
from app.translation.structure import answer_grammar
from deployments.gateway.grammars import check_grammar
from engine.errors import RequestError
from engine.sampling.grammar import GrammarStore
from engine.sampling.masks import mask

FOLDER = Path(__file__).parents[2] / "models" / "stdlib-chat"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
CONFIG = json.loads((FOLDER / "config.json").read_text())
VOCAB, EOS = CONFIG["vocab_size"], CONFIG["eos_token_id"]
STORE = GrammarStore(str(FOLDER), VOCAB, [EOS])

CASES: list[list[Any]] = json.loads(Path(__file__).with_name("json_schema_suite.json").read_text(encoding="utf-8"))[1:]
NAMES = sorted({name for name, *_ in CASES})

REFUSED = {
    *("boolean_schema", "contains", "defs", "dependentRequired", "dependentSchemas", "dynamicRef", "if-then-else"),
    *("maxContains", "minContains", "not", "propertyNames", "refRemote", "unevaluatedItems", "unevaluatedProperties"),
    *("uniqueItems", "vocabulary"),
}
"""Parts of the suite of which no schema is followed."""

STRICTER = {
    r"(const|enum|type): .*(float|\[0\.0\]|\[1\.0\])": "a whole number is written without a fraction",
    r"optional/ecmascript-regex: .*zero-width": "Rust's expressions do not take U+FEFF for white space",
    r"optional/float-overflow: ": "a multiple is written without an exponent",
    r"optional/format/email: .*(quoted|IPv6)": "a name is not quoted, a host not in brackets",
    r"optional/format/ipv6: .*(mixed format|long valid)": "its end is not written as IPv4",
}
"""Valid values that no answer has -> why. Answers are valid all the same."""

LOOSER = {
    r"optional/ecmascript-regex: .*zero-width": "Rust's expressions do not take U+FEFF for white space",
    r"optional/format/date: .*not a leap year": "a pattern does not count years",
    r"optional/format/(date-time|time): .*leap second": "a pattern does not turn zones to UTC",
    r"optional/format/hostname: .*(A-label|overall length)": "a pattern does not decode Punycode or count all of it",
}
"""Invalid values that an answer may have -> why."""


@cache
def source_of(schema: str) -> str:
    """Return the grammar of a schema, as for a client.

    Raises:
        RequestError: it cannot be followed.
        ValidationError: it is no object.
    """
    body = {"model": "m", "prompt": "x", "structured_outputs": {"json": orjson.loads(schema)}}
    grammar = answer_grammar(CompletionRequest.model_validate(body), LimitSettings())
    assert grammar is not None
    check_grammar(grammar)
    STORE.compile(grammar.source)
    return grammar.source


def is_followed(schema: Any) -> bool:
    try:
        source_of(json.dumps(schema))
    except (RequestError, ValidationError):
        return False
    return True


def can_be_written(schema: Any, value: Any) -> bool:
    """Whether an answer may be this value, its keys in any order: a grammar wants them in the schema's."""
    source = source_of(json.dumps(schema))
    return any(accepts(source, json.dumps(each, ensure_ascii=False)) for each in in_all_orders(value))


def accepts(source: str, text: str) -> bool:
    """Whether a text, token by token, is all that a grammar wants."""
    follower = STORE.follow(source, TOKENIZER.encode(text, add_special_tokens=False).ids)
    logits = torch.zeros(VOCAB)
    mask(logits, follower.allowed())
    return follower.error is None and bool(logits[EOS] == 0)


def in_all_orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for keys in itertools.permutations(value):
            for inner in itertools.product(*(list(in_all_orders(value[key])) for key in keys)):
                yield dict(zip(keys, inner, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*map(list, map(in_all_orders, value))))
    else:
        yield value


@cache
def divergences(name: str) -> dict[bool, list[str]]:
    """Return the tests that came out otherwise than the suite says, by what it says."""
    found = defaultdict(list)
    for _, case, schema, tests in (case for case in CASES if case[0] == name):
        if is_followed(schema):
            for test, (value, is_valid) in tests.items():
                if can_be_written(schema, value) != is_valid:
                    found[is_valid].append(f"{name}: {case}: {test}")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_valid_values_can_be_written_and_others_cannot(name: str) -> None:
    for is_valid, known in ((True, STRICTER), (False, LOOSER)):
        assert [test for test in divergences(name)[is_valid] if not any(re.match(each, test) for each in known)] == []
    assert any(is_followed(schema) for each, _, schema, _ in CASES if each == name) == (name not in REFUSED)


def test_what_is_not_followed_is_refused_by_name() -> None:
    for schema, words in (
        ({"not": {"type": "null"}}, '"not"'),
        ({"oneOf": [{}, {}]}, "oneOf"),
        ({"$ref": "http://x/y"}, "http://x/y"),
    ):
        with pytest.raises(RequestError, match=words) as refused:
            source_of(json.dumps(schema))
        assert refused.value.field == "structured_outputs.json"


def test_every_known_divergence_is_one() -> None:
    for is_valid, known in ((True, STRICTER), (False, LOOSER)):
        tests = [test for name in NAMES for test in divergences(name)[is_valid]]
        assert [each for each in known if not any(re.match(each, test) for test in tests)] == []


@pytest.mark.xfail(strict=True, reason="the library takes the names of additional properties as they are spelt")
@pytest.mark.parametrize("answer", [r'{"a": 1, "\u0061": "x"}', '{"b": "x", "b": "y"}'], ids=["escaped", "twice"])
def test_the_name_of_an_additional_property_is_no_other_again(answer: str) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "minProperties": 2}
    schema["additionalProperties"] = {"type": "string"}
    assert not jsonschema.Draft202012Validator(schema).is_valid(json.loads(answer))
    assert not accepts(source_of(json.dumps(schema)), answer)


CLOSES = torch.zeros(VOCAB)
CLOSES[[EOS, *(TOKENIZER.token_to_id(token) for token in '}]",')]] = 6.0


def drawn(schema: Any, seed: int, most: int = 150) -> str | None:
    """Return an answer of tokens that are equally likely but for those that close, None for one without an end."""
    follower = STORE.follow(source_of(json.dumps(schema)), [])
    generator = torch.Generator().manual_seed(seed)
    output: list[int] = []
    for _ in range(most):
        logits = torch.randn(VOCAB, generator=generator) + CLOSES
        mask(logits, follower.allowed())
        assert follower.error is None
        token_id = int(logits.argmax())
        if token_id == EOS:
            return TOKENIZER.decode(output)
        follower.note(token_id)
        output.append(token_id)
    return None


def check_drawn(schema: Any, seed: int) -> bool:
    """Draw an answer; returns whether it has an end."""
    answer = drawn(schema, seed)
    if answer is not None:
        jsonschema.validate(json.loads(answer), schema, jsonschema.Draft202012Validator)
    return answer is not None


@cache
def plain() -> list[Any]:
    """Return the schemas that are followed and that mean the same inside another one."""
    schemas = (
        {word: value for word, value in case[2].items() if word != "$schema"}
        for case in CASES
        if isinstance(case[2], dict)
    )
    # Python's expressions have no classes by name.
    return [schema for schema in schemas if not re.search(r'"\$|\\\\[pc]', json.dumps(schema)) and is_followed(schema)]


def listed(some: list[Any]) -> dict[str, Any]:
    return {"type": "array", "prefixItems": some, "minItems": 2}


def named(some: list[Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(zip("abc", some, strict=False)), "required": ["a"]}


def mixed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pair, some = st.lists(inner, min_size=2, max_size=2), st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        some.map(listed),
        some.map(named),
        pair.map(lambda two: {"anyOf": two}),
        pair.map(lambda two: {"allOf": two}),
        pair.map(lambda two: {"allOf": two[:1]} | two[1]),
        inner.map(lambda items: {"items": items, "minItems": 1, "maxItems": 3}),
    )


@settings(deadline=None, max_examples=100)
@given(
    schema=st.recursive(st.deferred(lambda: st.sampled_from(plain())), mixed, max_leaves=4), seed=st.integers(0, 1000)
)
def test_every_finished_answer_is_valid(schema: dict[str, Any], seed: int) -> None:
    if is_followed(schema):
        check_drawn(schema, seed)


def test_answers_to_the_schemas_of_the_suite_are_valid() -> None:
    ends = [check_drawn(schema, seed) for seed, schema in enumerate(plain())]
    assert sum(ends) > len(ends) // 2
