"""An answer with drafts is the answer without, whatever the request; where drafts are right it takes fewer steps."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import DryPenalty, Emission, FinishReason, LzPenalty, Request, RequestId, SamplingParams
from engine.scheduling.step_costs import StepCosts
from tests.parity.conftest import BUNDLED, emissions_of
from tests.parity.test_jumps import GRAMMARS

TOKENIZER = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
PROMPT = tuple(TOKENIZER.encode("What does os.path.join do?").ids)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "num_logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.0, "grammar": GRAMMARS[0]},
    {"temperature": 1.0, "grammar": GRAMMARS[1]},
    {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": (5, 6, 7, 8, 9, 10)},
    {"temperature": 1.0, "dry": DryPenalty(multiplier=0.8, allowed_length=1), "lz": LzPenalty(strength=0.2)},
    {"temperature": 1.0, "min_p": 0.01, "typical_p": 0.9, "top_n_sigma": 3.0, "eta_cutoff": 0.001},
    {"temperature": 1.0, "xtc_probability": 0.5, "presence_penalty": -1.0, "num_prompt_logprobs": 1},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(5, 2000)), "bad_words": ((6, 7), (8,), (9, 10, 11))},
    {"temperature": 1.0, "logit_bias": ((300, 5.0), (301, -100.0)), "ignore_eos": True},
]


def make_engine(num_speculative_tokens: int, **options: Any) -> Engine:
    fields = {"dtype": "float32", "max_num_seqs": 6, "block_tokens": 4, "num_threads": 1} | options
    config = EngineConfig(model_path=str(BUNDLED), num_speculative_tokens=num_speculative_tokens, **fields)
    return build_engine(config)


@pytest.fixture(scope="module")
def plain() -> Engine:
    return make_engine(0)


@pytest.fixture(scope="module")
def drafting() -> Engine:
    return make_engine(12)


def let_drafts_cost_nothing(patch: pytest.MonkeyPatch, step_s: float = 0.01) -> None:
    """So that they are computed from the first step on, and as long as they may be."""
    patch.setattr(StepCosts, "has_decode_steps", True)
    patch.setattr(StepCosts, "draft_token_s", 0.0)
    patch.setattr(StepCosts, "step_s", lambda self, num_rows: step_s)


def bytes_of(num_tokens: int) -> int:
    """Bytes of the keys and values of so many tokens in float32."""
    config = json.loads((BUNDLED / "config.json").read_text())
    return num_tokens * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4


@pytest.fixture(autouse=True)
def _drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    let_drafts_cost_nothing(monkeypatch)


def a_request(name: str, **fields: Any) -> Request:
    return Request(
        request_id=RequestId(name), prompt_ids=PROMPT, params=SamplingParams(**{"max_tokens": 48, "seed": 1} | fields)
    )


def told(emissions: list[Emission]) -> tuple[list[int], FinishReason | None, list[list[int]]]:
    """Tokens, why they end, and which were likeliest where that is asked for, of the prompt too."""
    scores = [entry for emission in emissions for entry in (*emission.prompt_logprobs, *emission.logprobs)]
    likeliest = [[token_id for token_id, _ in entry.top] for entry in scores]
    return (
        [token_id for emission in emissions for token_id in emission.token_ids],
        emissions[-1].finish_reason,
        likeliest,
    )


def answers(engine: Engine, requests: list[Request]) -> dict[RequestId, Any]:
    return {name: told(emissions) for name, emissions in emissions_of(engine, requests).items()}


def predicting(request: Request, answer: list[int], wrong_every: int) -> Request:
    predicted = list(answer)
    if wrong_every:
        predicted[wrong_every::wrong_every] = [i + 1 for i in predicted[wrong_every::wrong_every]]
    return replace(request, prediction_ids=tuple(predicted))


@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    picked=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 99), st.integers(0, 5)), min_size=1, max_size=5),
    max_tokens=st.integers(1, 48),
)
def test_a_batch_of_every_kind(
    plain: Engine, drafting: Engine, picked: list[tuple[dict[str, Any], int, int]], max_tokens: int
) -> None:
    requests = [
        a_request(str(index), seed=seed, **{"max_tokens": max_tokens} | kind)
        for index, (kind, seed, _) in enumerate(picked)
    ]
    expected = answers(plain, requests)
    found = answers(
        drafting,
        [
            predicting(request, expected[request.request_id][0], wrong_every)
            for request, (_, _, wrong_every) in zip(requests, picked, strict=True)
        ],
    )
    assert found == expected


def test_some_are_put_back_in_between_and_prompts_come_in_chunks(plain: Engine) -> None:
    requests = [a_request(f"{i}", seed=i, temperature=float(i % 2), ignore_eos=True) for i in range(6)]
    expected = answers(plain, requests)
    small = make_engine(12, max_model_len=96, max_batched_tokens=20, kv_cache_bytes=bytes_of(100))
    asked = [predicting(request, expected[request.request_id][0], 3) for request in requests]
    assert answers(small, asked) == expected
    assert small.snapshot().counters.num_preemptions > 0
    assert small.snapshot().counters.num_accepted_tokens > 0


def test_a_prediction_that_is_right_but_for_some_places_takes_a_fraction_of_the_steps(
    plain: Engine, drafting: Engine
) -> None:
    request = a_request("a", temperature=1.0, max_tokens=48, ignore_eos=True)
    ((tokens, _, _),) = answers(plain, [request]).values()
    before = drafting.snapshot()
    (emissions,) = emissions_of(drafting, [predicting(request, tokens, 20)]).values()
    after = drafting.snapshot()
    assert told(emissions)[0] == tokens
    assert after.num_steps - before.num_steps < 16
    accepted, rejected = emissions[-1].num_accepted, emissions[-1].num_rejected
    assert accepted + (after.num_steps - before.num_steps) >= len(tokens)
    assert accepted + rejected <= after.counters.num_draft_tokens - before.counters.num_draft_tokens


def test_an_answer_that_quotes_its_prompt_is_found_there(plain: Engine, drafting: Engine) -> None:
    """The model's own greedy answer, given once more in the prompt, and followed by its beginning."""
    ((tokens, _, _),) = answers(plain, [a_request("a", temperature=0.0, ignore_eos=True)]).values()
    request = replace(a_request("b", temperature=0.0, ignore_eos=True), prompt_ids=(*PROMPT, *tokens, *PROMPT))
    before = drafting.snapshot()
    found = answers(drafting, [request])
    after = drafting.snapshot()
    assert found == answers(plain, [request])
    assert after.num_steps - before.num_steps < 48
    assert after.counters.num_accepted_tokens > before.counters.num_accepted_tokens


def test_a_resumed_answer_goes_on_as_it_would_have(plain: Engine, drafting: Engine) -> None:
    request = a_request("a", temperature=1.0, ignore_eos=True)
    ((tokens, reason, _),) = answers(plain, [request]).values()
    rest = replace(predicting(request, tokens, 11), prior_output_ids=tuple(tokens[:20]))
    assert answers(drafting, [rest]) == {request.request_id: (tokens[20:], reason, [])}


def test_torch_s_operators_and_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no compiler; and in the precision that is served."""
    for options in ({"block_tokens": 6}, {"dtype": "bfloat16", "block_tokens": 16}):
        requests = [a_request(f"{i}", seed=i, temperature=float(i % 2), ignore_eos=True) for i in range(3)]
        expected = answers(make_engine(0, **options), requests)
        asked = [predicting(request, expected[request.request_id][0], 9) for request in requests]
        engine = make_engine(12, **options)
        assert answers(engine, asked) == expected
        assert engine.snapshot().counters.num_accepted_tokens > 60
