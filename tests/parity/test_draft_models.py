"""An answer with a draft model is the answer without; a model that guesses for itself is always right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from engine.build import build_engine
from engine.config import EngineConfig
from engine.decoder.decoder import Decoder
from engine.engine import Engine
from engine.request import Request
from engine.speculation.draft_model import DraftModel
from tests.parity.conftest import BUNDLED
from tests.parity.test_speculation import KINDS, a_request, answers, bytes_of, let_drafts_cost_nothing, make_engine

DRAFT = BUNDLED.parent / "stdlib-draft"


def drafting_by(draft_model: Path, **options: object) -> Engine:
    return make_engine(12, **{"draft_model": str(draft_model)} | options)


@pytest.fixture(scope="module")
def plain() -> Engine:
    return make_engine(0)


@pytest.fixture(autouse=True)
def _drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every request is drafted, as long as it may be."""
    let_drafts_cost_nothing(monkeypatch, step_s=10.0)
    monkeypatch.setattr(DraftModel, "_learn", lambda self, plan, took_s: setattr(self, "token_s", 1e-9))


def mixed() -> list[Request]:
    return [a_request(f"{index}", **{"seed": index, **kind}) for index, kind in enumerate([*KINDS, KINDS[1]])]


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "block_tokens": 16}])
def test_every_kind_of_request_has_the_answer_that_it_would_have_had(options: dict[str, object]) -> None:
    """A batch of them, and one after the other."""
    drafting = drafting_by(DRAFT, **options)
    expected = answers(make_engine(0, **options), mixed())
    assert answers(drafting, mixed()[:6]) == {name: expected[name] for name in list(expected)[:6]}
    for request in mixed():
        assert answers(drafting, [request]) == {request.request_id: expected[request.request_id]}
    counters = drafting.snapshot().counters
    assert counters.num_accepted_tokens > 10
    assert counters.num_draft_tokens > counters.num_accepted_tokens


def test_two_threads_write_the_same_answers() -> None:
    """Some of them: where cores are few, the two of them wait for each other most of the time."""
    drafting, requests = drafting_by(DRAFT, num_threads=2), mixed()[:6]
    expected = answers(make_engine(0), requests)
    assert answers(drafting, requests) == expected
    assert answers(drafting, [requests[1]]) == {requests[1].request_id: expected[requests[1].request_id]}
    assert drafting.snapshot().counters.num_accepted_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_guesses_for_itself_is_right_with_the_same_noise(plain: Engine, temperature: float) -> None:
    drafting = drafting_by(BUNDLED)
    requests = [
        a_request(f"{seed}", seed=seed, temperature=temperature, ignore_eos=True, max_tokens=41, frequency_penalty=0.2)
        for seed in range(3)
    ]
    assert answers(drafting, requests) == answers(plain, requests)
    snapshot = drafting.snapshot()
    assert snapshot.counters.num_accepted_tokens == snapshot.counters.num_draft_tokens
    # The first is drawn behind the prompt, and each step brings five guesses for each and one token more.
    assert snapshot.num_steps <= 12


def test_texts_that_are_put_back_in_between_are_read_again(plain: Engine) -> None:
    requests = [a_request(f"{i}", seed=i, temperature=float(i % 2), ignore_eos=True) for i in range(6)]
    small = drafting_by(BUNDLED, max_model_len=96, max_batched_tokens=20, kv_cache_bytes=bytes_of(100))
    assert answers(small, requests) == answers(plain, requests)
    assert small.snapshot().counters.num_preemptions > 0
    assert small.snapshot().counters.num_accepted_tokens > 0


def test_what_a_draft_model_does_not_look_at_makes_no_difference(plain: Engine) -> None:
    """A salt, a tenant, and an answer that was begun elsewhere."""
    request = a_request("a", temperature=1.0, ignore_eos=True)
    ((tokens, reason, _),) = answers(plain, [request]).values()
    rest = replace(request, prior_output_ids=tuple(tokens[:20]), salt="s", tenant="t")
    assert answers(drafting_by(BUNDLED), [rest]) == {request.request_id: (tokens[20:], reason, [])}


def test_a_draft_model_has_the_threads_of_the_other() -> None:
    config = EngineConfig(model_path=str(BUNDLED), draft_model=str(DRAFT), num_threads=2, max_model_len=64)
    engine = build_engine(config)
    model = engine._scheduler._speculation._model
    assert isinstance(model, DraftModel)
    pools = [runner._model._backend.program._pool for runner in (engine._runner, model._runner)]  # type: ignore[attr-defined]
    assert pools[0] is pools[1]


def test_a_draft_model_that_our_kernels_cannot_run_is_run_by_torch(tmp_path: Path) -> None:
    """Its heads fill no panels; those of the model that it drafts for do."""
    vocab_size = AutoConfig.from_pretrained(BUNDLED).vocab_size
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 3}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes)).save_pretrained(tmp_path)
    drafting = drafting_by(tmp_path, block_tokens=16)
    model = drafting._scheduler._speculation._model
    assert isinstance(model, DraftModel)
    assert isinstance(model._runner._model, Decoder)  # type: ignore[attr-defined]
    request = a_request("a", ignore_eos=True)
    assert answers(drafting, [request]) == answers(make_engine(0, block_tokens=16), [request])
