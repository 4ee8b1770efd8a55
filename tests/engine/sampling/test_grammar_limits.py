"""An ambiguous grammar, whose steps get slower and slower, ends; a large one that is not ambiguous does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from deployments.generation import ToolSpec
from deployments.tools.formats import FORMATS
from deployments.tools.grammar import JSON_STYLE, CallRules, write_grammar
from engine.sampling.grammar import GrammarStore
from engine.sampling.sampler import Sampler
from tests.engine.sampling.test_grammar import EOS, FOLDER, TOKENIZER, VOCAB, draw_all
from tests.engine.test_sampler import CPU, make_params, make_request


@pytest.fixture(scope="module")
def store() -> GrammarStore:
    return GrammarStore(str(FOLDER), VOCAB, [EOS])


def test_what_is_ambiguous_fails_when_a_step_of_it_has_become_too_costly(store: GrammarStore) -> None:
    """What it cost grew with the answer, up to 0.7 s for each token, and all requests waited for it."""
    grammar = "start: (/[a-z]/{0,1000}){0,30}"
    store.compile(grammar)
    liked = torch.zeros(1, VOCAB)
    liked[:, TOKENIZER.token_to_id("z")] = 1.0
    sampler = Sampler(1, VOCAB, CPU, [EOS], store)
    sampler.admit(0, make_request(make_params(grammar=grammar, temperature=0)), [])
    found = (sampler.sample(liked.clone(), [0], [place]) for place in range(2, 100))
    failed = next(step for step in found if step.failed)
    assert failed.unfollowable == {0}
    assert "Too many items" in failed.failed[0]


@pytest.mark.parametrize("name", FORMATS)
def test_as_many_tools_as_a_chat_may_have_are_no_ambiguous_grammar(store: GrammarStore, name: str) -> None:
    kinds: list[Any] = [{"type": "string"}, {"enum": ["a", "b"]}, {"type": "array", "items": {"type": "integer"}}]
    parameters = {"type": "object", "properties": {f"p{number}": kinds[number % 3] for number in range(14)}}
    tools = tuple(ToolSpec(name=f"tool_{number}", parameters=parameters) for number in range(128))
    names = frozenset(tool.name for tool in tools)
    calls = CallRules(tools=tools, callable_names=names, is_required=True, is_parallel=True, tool_format=FORMATS[name])
    grammar = write_grammar({}, calls=calls)
    store.compile(grammar)
    output, _ = draw_all(store, make_params(grammar=grammar, temperature=1.0), seed=1, most=60)
    assert output


def test_large_schemas_are_no_ambiguous_grammars(store: GrammarStore) -> None:
    deep: Any = {"type": "integer"}
    for _ in range(30):
        deep = {"type": "array", "items": {"type": "object", "properties": {"a": deep}}}
    cases = [{"properties": {"kind": {"const": f"k{number}"}}, "required": ["kind"]} for number in range(200)]
    for schema in (
        deep,
        {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(100)}},
        {"anyOf": [{"type": "object", "additionalProperties": False} | case for case in cases]},
    ):
        grammar = LLMatcher.grammar_from_json_schema(schema, defaults=JSON_STYLE)
        store.compile(grammar)
        for seed in range(3):
            output, _ = draw_all(store, make_params(grammar=grammar, temperature=1.0), seed, most=60)
            assert output
