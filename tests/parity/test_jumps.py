"""An answer whose grammar forces tokens is the answer that is drawn token by token, and takes fewer steps."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, grammar_from
from tokenizers import Tokenizer

from deployments.tools.grammar import JSON_STYLE
from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Emission, FinishReason, Request, RequestId, SamplingParams
from tests.parity.conftest import BUNDLED, emissions_of

TOKENIZER = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
PROMPT = tuple(TOKENIZER.encode("What does os.path.join do?").ids)
SCHEMA = {
    "type": "object",
    "properties": {
        "function_name": {"type": "string", "maxLength": 12},
        "module": {"enum": ["os.path", "json", "collections"]},
        "arguments": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "is_deprecated": {"type": "boolean"},
    },
    "required": ["function_name", "module", "arguments", "is_deprecated"],
    "additionalProperties": False,
}
COMPACT = {"whitespace_flexible": False}
GRAMMARS = [
    LLMatcher.grammar_from_json_schema(SCHEMA, overrides=COMPACT),
    LLMatcher.grammar_from_json_schema(SCHEMA, overrides=JSON_STYLE),
    grammar_from("choice", json.dumps(["yes, it certainly is", "no", "nobody knows what it does"])),
    LLMatcher.grammar_from_regex("[a-f]{3}-a constant part of some tokens-[0-9]{1,3}!"),
]


def make_engine(**options: Any) -> Engine:
    config = EngineConfig(model_path=str(BUNDLED), dtype="float32", num_threads=1, num_speculative_tokens=0, **options)
    return build_engine(config)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(max_num_seqs=8, max_batched_tokens=48, block_tokens=4)


def a_request(name: str, grammar: str | None, **fields: Any) -> Request:
    prior = fields.pop("prior_output_ids", ())
    params = SamplingParams(**{"max_tokens": 60, "temperature": 0.0, "grammar": grammar} | fields)
    return Request(request_id=RequestId(name), prompt_ids=PROMPT, params=params, prior_output_ids=prior)


def drawn(request: Request) -> Request:
    """Return the same request, of which every token is drawn, for each is asked about."""
    return replace(request, params=replace(request.params, num_logprobs=0))


def told(emissions: list[Emission]) -> tuple[list[int], FinishReason | None]:
    return [token_id for emission in emissions for token_id in emission.token_ids], emissions[-1].finish_reason


@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
@given(
    picked=st.lists(st.tuples(st.sampled_from([None, *GRAMMARS]), st.integers(0, 99)), min_size=1, max_size=4),
    temperature=st.sampled_from([0.0, 1.0]),
    max_tokens=st.integers(1, 60),
)
def test_a_batch_of_those_that_jump_and_those_that_do_not(
    engine: Engine, picked: list[tuple[str | None, int]], temperature: float, max_tokens: int
) -> None:
    requests = [
        a_request(str(i), grammar, seed=seed, temperature=temperature, max_tokens=max_tokens, frequency_penalty=0.2)
        for i, (grammar, seed) in enumerate(picked)
    ]
    found = {name: told(emissions) for name, emissions in emissions_of(engine, requests).items()}
    assert found == {name: told(emissions) for name, emissions in emissions_of(engine, map(drawn, requests)).items()}
    assert all(len(tokens) <= max_tokens for tokens, _ in found.values())


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_it_ends_at_the_same_token_wherever_it_is_cut(engine: Engine, grammar: str) -> None:
    """By its bound, by a stop token, and by the death of a replica that had told it so far."""
    (emissions,) = emissions_of(engine, [a_request("whole", grammar)]).values()
    tokens, reason = told(emissions)
    assert max(len(emission.token_ids) for emission in emissions) > 1
    cuts: list[tuple[Request, list[int], FinishReason | None]] = []
    for place in range(0, len(tokens) - 1, 3):
        prior, stop = tuple(tokens[:place]), tokens.index(tokens[place])
        cuts += [
            (a_request(f"bound {place}", grammar, max_tokens=place + 1), tokens[: place + 1], FinishReason.LENGTH),
            (
                a_request(f"stop {place}", grammar, stop_token_ids=(tokens[place],)),
                tokens[: stop + 1],
                FinishReason.STOP,
            ),
            (a_request(f"resumed {place}", grammar, prior_output_ids=prior), tokens[place:], reason),
        ]
    found = emissions_of(engine, [request for request, _, _ in cuts])
    for request, *expected in cuts:
        assert [*told(found[request.request_id])] == expected, request.request_id


def test_some_are_put_back_in_between(engine: Engine) -> None:
    requests = [a_request(f"{i}", GRAMMARS[i % 2], seed=i, temperature=1.0) for i in range(6)]
    expected = {name: told(emissions) for name, emissions in emissions_of(engine, requests).items()}
    config = json.loads((BUNDLED / "config.json").read_text())
    token_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    small = make_engine(max_num_seqs=6, block_tokens=4, max_model_len=96, kv_cache_bytes=160 * token_bytes)
    found = {name: told(emissions) for name, emissions in emissions_of(small, requests).items()}
    assert small.snapshot().counters.num_preemptions > 0
    assert found == expected


@pytest.mark.parametrize(("grammar", "at_most"), zip(GRAMMARS, [0.5, 0.8, 0.5, 0.6], strict=True))
def test_it_takes_fewer_steps(engine: Engine, grammar: str, at_most: float) -> None:
    snapshots = [engine.snapshot()]
    for request in (a_request("a", grammar), drawn(a_request("a", grammar))):
        (emissions,) = emissions_of(engine, [request]).values()
        snapshots.append(engine.snapshot())
    jumping, plain = (after.num_steps - before.num_steps for before, after in pairwise(snapshots))
    assert plain == len(told(emissions)[0])
    assert jumping <= at_most * plain
    assert plain - jumping == snapshots[-1].counters.forced_tokens - snapshots[0].counters.forced_tokens
