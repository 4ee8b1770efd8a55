"""Whatever the model would like to say, what comes out follows the grammar."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, grammar_from
from tokenizers import Tokenizer

from deployments.tools.grammar import JSON_STYLE
from engine.errors import GrammarError, RequestError
from engine.request import DryPenalty, SamplingParams
from engine.sampling.grammar import MAX_KEPT, GrammarStore
from engine.sampling.masks import mask
from engine.sampling.sampler import Sampler
from tests.engine.test_sampler import CPU, make_params, make_request

FOLDER = Path(__file__).parents[3] / "models" / "stdlib-chat"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
CONFIG = json.loads((FOLDER / "config.json").read_text())
VOCAB, EOS = CONFIG["vocab_size"], CONFIG["eos_token_id"]


@pytest.fixture(scope="module")
def store() -> GrammarStore:
    return GrammarStore(str(FOLDER), VOCAB, [EOS])


def of_schema(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


def draw_all(store: GrammarStore, params: SamplingParams, seed: int, most: int = 400) -> tuple[list[int], bool]:
    """Draw from random logits that like closing; returns the tokens without the last, and whether the end was drawn."""
    sampler = Sampler(1, VOCAB, CPU, [EOS], store)
    sampler.admit(0, make_request(params), [])
    liked = torch.zeros(VOCAB)
    liked[[EOS, *(TOKENIZER.token_to_id(token) for token in '}]",')]] = 6.0
    output: list[int] = []
    while len(output) < most:
        # A function of the place alone, as those of a model are of the tokens before it.
        generator = torch.Generator().manual_seed(1000 * seed + len(output))
        logits = torch.randn(1, VOCAB, generator=generator) + liked
        found = sampler.sample(logits, [0], [len(output) + 2])
        output += [*found.token_ids, *found.forced.get(0, ())]
        assert min(output) >= 0
        if EOS in output[:most]:
            assert output.index(EOS) == len(output) - 1
            return output[:-1], True
    return output[:most], False


SCALARS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "number", "minimum": -2, "maximum": 3},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 8},
        {"type": "string", "pattern": "^[a-c]{2,5}$"},
        {"enum": ["red", 5, None, {"a": [1]}]},
        {"const": "fixed"},
        {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    ]
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        inner.map(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 3}),
        st.dictionaries(st.sampled_from(["a", "bb", "c d", "é"]), inner, min_size=1, max_size=3).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:2],
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=60)
@given(schema=SCHEMAS, seed=st.integers(0, 1000), temperature=st.sampled_from([0.0, 1.0]))
def test_every_finished_answer_is_valid_against_its_schema(
    store: GrammarStore, schema: dict[str, Any], seed: int, temperature: float
) -> None:
    params = make_params(grammar=of_schema(schema), temperature=temperature, seed=seed)
    output, is_finished = draw_all(store, params, seed)
    if is_finished:
        jsonschema.validate(json.loads(TOKENIZER.decode(output)), schema)


@pytest.mark.parametrize("value", ["a<|end|>b", "<|user|>", "<|en"])
def test_a_value_may_spell_a_special_token_which_ends_nothing(store: GrammarStore, value: str) -> None:
    for source, text in (
        (of_schema({"const": value}), f'"{value}"'),
        (of_schema({"enum": [value, value + "!"]}), f'"{value}'),
        (grammar_from("choice", json.dumps([value])), value),
    ):
        store.compile(source)
        output, is_finished = draw_all(store, make_params(grammar=source, temperature=1.0, seed=3), 3)
        assert is_finished
        assert TOKENIZER.decode(output).startswith(text)
        assert EOS not in output


GRAMMARS = st.one_of(
    st.tuples(SCHEMAS, st.sampled_from([{"whitespace_flexible": False}, JSON_STYLE])).map(
        lambda of: LLMatcher.grammar_from_json_schema(of[0], overrides=of[1])
    ),
    st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=4, unique=True).map(
        lambda words: grammar_from("choice", json.dumps(words))
    ),
    st.sampled_from(
        ["[a-f]{3}-a constant part-[0-9]+", "(ab|abc|abcd) and (the|their|there)fore", "(étoile|étage) 🙂+"]
    ).map(LLMatcher.grammar_from_regex),
)


@settings(deadline=None, max_examples=60)
@given(grammar=GRAMMARS, seed=st.integers(0, 1000), temperature=st.sampled_from([0.0, 1.0]), split=st.integers(0, 400))
def test_what_is_forced_is_what_would_have_been_drawn(
    store: GrammarStore, grammar: str, seed: int, temperature: float, split: int
) -> None:
    penalties = {"frequency_penalty": 0.7, "dry": DryPenalty(multiplier=2.0, allowed_length=1)}
    drawn = make_params(grammar=grammar, temperature=temperature, seed=seed, num_logprobs=0, **penalties)
    assert not drawn.can_jump
    expected = draw_all(store, drawn, seed, 60)
    assert draw_all(store, replace(drawn, num_logprobs=None), seed, 60) == expected
    output, is_finished = expected
    # As another replica would be told that goes on from the midst of it.
    split %= len(output) + 1
    follower = store.follow(grammar, output[:split])
    forced, rest = follower.take_forced(), (output + [EOS] * is_finished)[split:]
    assert all(a == b for a, b in zip(forced, rest, strict=False))
    assert follower.error is None
    assert len(forced) <= len(rest) or not is_finished


def test_no_token_is_forced_where_each_is_asked_about() -> None:
    forced = {"grammar": "g"}
    assert make_params(**forced).can_jump
    alone = ({"num_logprobs": 0}, {"min_tokens": 1}, {"ignore_eos": True})
    for asked in (*alone, {"bad_words": ((1,),)}, {"allowed_token_ids": (1,)}):
        assert not make_params(**forced, **asked).can_jump
    assert not make_params().can_jump


@pytest.mark.parametrize("seed", range(5))
def test_a_regular_expression_and_a_choice_are_followed(store: GrammarStore, seed: int) -> None:
    output, is_finished = draw_all(store, make_params(grammar=LLMatcher.grammar_from_regex("[a-f]{3}-[0-9]+")), seed)
    assert not is_finished or re.fullmatch("[a-f]{3}-[0-9]+", TOKENIZER.decode(output))
    words = ["yes", "no", 'with "quotes" and é']
    output, is_finished = draw_all(store, make_params(grammar=grammar_from("choice", json.dumps(words))), seed)
    assert is_finished
    assert TOKENIZER.decode(output) in words


def test_another_replica_goes_on_where_the_first_was(store: GrammarStore) -> None:
    grammar = of_schema({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]})
    params = make_params(grammar=grammar, temperature=0)
    output, _ = draw_all(store, params, 3)
    for split in range(len(output)):
        follower = store.follow(grammar, output[:split])
        logits = torch.zeros(VOCAB)
        mask(logits, follower.allowed())
        assert logits[output[split]] == 0


def allowed(store: GrammarStore, grammar: str, output_ids: Sequence[int] = ()) -> set[int]:
    logits = torch.zeros(VOCAB)
    mask(logits, store.follow(grammar, output_ids).allowed())
    return set(logits.isfinite().nonzero().squeeze(1).tolist())


def test_the_end_comes_only_where_the_grammar_ends(store: GrammarStore) -> None:
    grammar = LLMatcher.grammar_from_regex("ab?")
    a, b = TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("b")
    assert EOS not in allowed(store, grammar)
    assert {EOS, b} <= allowed(store, grammar, [a])
    assert allowed(store, grammar, [a, b]) == {EOS}


@pytest.mark.parametrize(
    "grammar",
    [
        "start: nowhere",
        LLMatcher.grammar_from_regex("(("),
        LLMatcher.grammar_from_json_schema({"type": "string", "pattern": "(.*a){20}.*", "minLength": 100}),
        LLMatcher.grammar_from_json_schema({"$ref": "http://elsewhere/x"}),
        LLMatcher.grammar_from_json_schema({"not": {"type": "string"}}),
        # What is too much of these shows behind the first token.
        LLMatcher.grammar_from_regex("b{1000000}"),
        LLMatcher.grammar_from_regex("q?b{1000000}"),
        LLMatcher.grammar_from_regex("(b{1000}{1000})?"),
        LLMatcher.grammar_from_json_schema({"type": "string", "pattern": "^z?b{1000}{1000}$"}),
        LLMatcher.grammar_from_json_schema(
            {
                "properties": {"x": {"pattern": "^k?b{1000}{1000}$", "type": "string"}},
                "required": ["x"],
                "type": "object",
            },
            defaults=JSON_STYLE,
        ),
        grammar_from("choice", json.dumps([f"{number:05}" for number in range(2101)])),
        # Each step of these took half a second, of all requests.
        "start: ((/[a-z]/{0,300}){0,300}){0,100}",
        "start: a*\na: b{0,1000}\nb: c{0,1000}\nc: /[a-z]/",
        'start: "a" start',
        "start: start",
        "no grammar at all",
        "",
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_line(store: GrammarStore, grammar: str) -> None:
    reasons = set()
    for _ in range(2):
        with pytest.raises(GrammarError) as refused:
            store.compile(grammar)
        reasons.add(pickle.loads(pickle.dumps(refused.value)).reason)
    (reason,) = reasons
    assert "\n" not in reason
    assert len(reason) < 400


def test_a_model_without_a_tokenizer_refuses(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot follow grammars"):
        GrammarStore(str(tmp_path), VOCAB, [EOS]).compile(LLMatcher.grammar_from_regex("a"))


def test_a_model_whose_answers_never_end_refuses() -> None:
    with pytest.raises(GrammarError, match="no token that ends an answer"):
        GrammarStore(str(FOLDER), VOCAB, []).compile(LLMatcher.grammar_from_regex("a"))


def test_tokens_that_the_model_lacks_are_never_chosen(tmp_path: Path) -> None:
    """Fine-tuned checkpoints may have tokens that were added to the tokenizer alone; each grammar was refused."""
    wider = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert wider.add_tokens(["banana"]) == 1
    wider.save(str(tmp_path / "tokenizer.json"))
    store = GrammarStore(str(tmp_path), VOCAB, [EOS])
    grammar = LLMatcher.grammar_from_regex("banana (split)?")
    store.compile(grammar)
    for seed in range(3):
        output, is_whole = draw_all(store, make_params(grammar=grammar, temperature=1.0), seed)
        assert is_whole
        assert TOKENIZER.decode(output) in ("banana ", "banana split")


def test_numbers_that_are_not_finite_stay_so(store: GrammarStore) -> None:
    logits = torch.full((VOCAB,), torch.nan)
    mask(logits, store.follow(LLMatcher.grammar_from_regex("a"), []).allowed())
    assert logits.isnan().all()


def test_old_grammars_are_forgotten_and_compiled_anew(store: GrammarStore) -> None:
    first = LLMatcher.grammar_from_regex("first")
    store.compile(first)
    for index in range(MAX_KEPT):
        store.compile(LLMatcher.grammar_from_regex(f"x{index}"))
    assert len(store._compiled) == MAX_KEPT
    assert first not in store._compiled
    assert allowed(store, first)


def test_one_that_goes_wrong_on_the_way_ends_its_own_request_with_the_reason(store: GrammarStore) -> None:
    sampler = Sampler(2, VOCAB, CPU, [EOS], store)
    # Tokens that the grammar does not allow, as if another one had been followed before.
    sampler.admit(0, make_request(make_params(grammar=LLMatcher.grammar_from_regex("ab"))), [5, 5])
    sampler.admit(1, make_request(make_params(grammar="start: nowhere")), [])
    found = sampler.sample(torch.randn(2, VOCAB), [0, 1], [2, 2])
    assert found.token_ids == [-1, -1]
    assert "nowhere" in found.failed[1]
    assert "\n" not in found.failed[0]
    assert found.unfollowable == {0, 1}


def test_what_takes_too_much_on_the_way_fails_whenever_it_is_followed_and_never_ends_an_answer(
    store: GrammarStore,
) -> None:
    """The library's copies have one lexer; where it has failed only the end is allowed, and an answer was empty."""
    grammar = LLMatcher.grammar_from_regex("a|z([a-y]q{1000000}|zx)")
    store.compile(grammar)
    first = store._compiled[grammar]
    y, z = TOKENIZER.token_to_id("y"), TOKENIZER.token_to_id("z")
    liked = torch.zeros(3, VOCAB)
    liked[:, z] = 1.0
    sampler = Sampler(3, VOCAB, CPU, [EOS], store)
    for row in range(3):
        sampler.admit(row, make_request(make_params(grammar=grammar, temperature=0)), [])
    assert sampler.sample(liked.clone(), [0, 1, 2], [2] * 3).token_ids == [z] * 3
    liked[[0, 2], y] = 2.0
    found = sampler.sample(liked.clone(), [0, 1, 2], [3] * 3)
    # The second goes on where it was.
    assert found.token_ids == [-1, z, -1]
    assert TOKENIZER.decode(found.forced[1]) == "x"
    assert found.unfollowable == found.failed.keys() == {0, 2}
    assert all("too many" in reason for reason in found.failed.values())
    # Who comes next begins with a lexer that has not failed.
    store.compile(grammar)
    assert store._compiled[grammar] is not first
    assert allowed(store, grammar) == {TOKENIZER.token_to_id("a"), z}


def test_who_goes_on_with_a_lexer_of_its_own_keeps_what_was_forced(store: GrammarStore) -> None:
    grammar = LLMatcher.grammar_from_regex("[mn]kk(a|z([a-y]q{1000000}|zx))")
    store.compile(grammar)
    failing, other = store.follow(grammar, []), store.follow(grammar, [])
    m, y, z = (TOKENIZER.token_to_id(letter) for letter in "myz")
    for follower in (failing, other):
        follower.note(m)
        assert TOKENIZER.decode(follower.take_forced()) == "kk"
        follower.note(z)
    failing.note(y)
    failing.take_forced()
    assert failing.error is not None
    logits = torch.zeros(VOCAB)
    mask(logits, other.allowed())
    assert other.error is None
    assert logits[z] == 0


def test_the_end_is_forced_with_the_last_tokens_before_it(store: GrammarStore) -> None:
    follower = store.follow(LLMatcher.grammar_from_regex("[mn]kk"), [])
    assert follower.take_forced() == []
    follower.note(TOKENIZER.token_to_id("m"))
    *forced, end = follower.take_forced()
    assert (TOKENIZER.decode(forced), end) == ("kk", EOS)


def test_a_grammar_is_compiled_once_for_all_that_follow_it(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[LLMatcher] = []

    def counted(matcher: LLMatcher) -> LLMatcher:
        compiled.append(matcher)
        return matcher

    monkeypatch.setattr(store, "_tried", counted)
    grammar = LLMatcher.grammar_from_regex("only once")
    store.compile(grammar)
    for _ in range(2):
        store.compile(grammar)
        store.follow(grammar, [])
    assert len(compiled) == 1
