from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.exc import SQLAlchemyError

from deployments.accounts.ledger import Ledger
from deployments.accounts.values import GATEWAY_LOST, KeyInfo, UsageQuestion, UsageRecord

RECORD = UsageRecord(
    record_id="r1",
    tenant="blue",
    model="base",
    adapter="",
    started_unix_s=100.0,
    input_tokens=10,
    cached_tokens=4,
    output_tokens=6,
    ttft_s=0.25,
    device_s=0.5,
    outcome="stop",
)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/deeper/accounts.sqlite"


def test_records_outlive_the_ledger_and_come_once(url: str) -> None:
    ledger = Ledger(url)
    assert ledger.record([RECORD, RECORD]) == 1
    ledger.close()
    again = Ledger(url)
    assert again.record([RECORD, replace(RECORD, record_id="r2", started_unix_s=50.0)]) == 1
    assert [record.record_id for record in again.records(UsageQuestion(), limit=10)] == ["r2", "r1"]
    assert again.records(UsageQuestion(), limit=10)[1] == RECORD


def test_the_word_of_a_gateway_counts_more_than_that_of_a_replica(url: str) -> None:
    ledger = Ledger(url)
    guess = replace(RECORD, outcome=GATEWAY_LOST, output_tokens=5, ttft_s=None)
    assert ledger.record([guess]) == 1
    assert ledger.record([RECORD]) == 0
    assert ledger.records(UsageQuestion(), limit=10) == [RECORD]
    # It may have computed more than the client was told of.
    assert ledger.record([guess, replace(guess, output_tokens=9)]) == 0
    assert ledger.records(UsageQuestion(), limit=10) == [RECORD]
    both = [replace(record, record_id="r2") for record in (guess, RECORD, guess)]
    assert ledger.record(both) == 1
    assert ledger.records(UsageQuestion(), limit=10)[1].outcome == "stop"


@pytest.mark.parametrize("order", list(itertools.permutations((5, 500, 70))))
@pytest.mark.parametrize("size", [1, 3])
def test_of_what_several_replicas_say_the_most_output_counts(url: str, order: tuple[int, ...], size: int) -> None:
    """The first to say so counted: of a beam search, or an answer that was resumed, one that had done but a part."""
    ledger = Ledger(url)
    guesses = [replace(RECORD, outcome=GATEWAY_LOST, output_tokens=count) for count in order]
    num_new = [ledger.record(guesses[start : start + size]) for start in range(0, len(guesses), size)]
    assert sum(num_new) == 1
    assert [record.output_tokens for record in ledger.records(UsageQuestion(), limit=10)] == [500]


def test_totals_are_by_tenant_model_and_adapter(url: str) -> None:
    ledger = Ledger(url)
    ledger.record(
        [
            RECORD,
            replace(RECORD, record_id="r2", outcome="EngineError", ttft_s=None, device_s=None),
            replace(RECORD, record_id="r3", adapter="d", model="sql", ttft_s=0.75),
            replace(RECORD, record_id="r4", tenant="red", started_unix_s=200.0),
        ]
    )
    totals = ledger.totals(UsageQuestion())
    assert [(t.tenant, t.model, t.adapter, t.num_requests, t.num_failed) for t in totals] == [
        ("blue", "base", "", 2, 1),
        ("blue", "sql", "d", 1, 0),
        ("red", "base", "", 1, 0),
    ]
    assert (totals[0].input_tokens, totals[0].cached_tokens, totals[0].output_tokens) == (20, 8, 12)
    assert (totals[0].mean_ttft_s, totals[0].device_s, totals[0].mean_tpot_s) == (0.25, 0.5, None)


@pytest.mark.parametrize(
    ("question", "ids"),
    [
        (UsageQuestion(since_unix_s=100.0, until_unix_s=200.0), ["r1"]),
        (UsageQuestion(since_unix_s=100.1), ["r2"]),
        (UsageQuestion(tenant="red"), ["r2"]),
        (UsageQuestion(model="none"), []),
    ],
)
def test_a_question_is_about_a_span_a_tenant_a_model(url: str, question: UsageQuestion, ids: list[str]) -> None:
    ledger = Ledger(url)
    ledger.record([RECORD, replace(RECORD, record_id="r2", tenant="red", started_unix_s=200.0)])
    assert [record.record_id for record in ledger.records(question, limit=9)] == ids


def test_keys_are_kept_and_forgotten(url: str) -> None:
    ledger = Ledger(url)
    key = KeyInfo(digest="d" * 64, tenant="blue", created_unix_s=1.5)
    ledger.add_key(key)
    ledger.close()
    again = Ledger(url)
    assert again.keys() == [key]
    assert again.remove_key(key.digest)
    assert not again.remove_key(key.digest)
    assert again.keys() == []


def test_many_records_are_stored_page_by_page(url: str) -> None:
    ledger = Ledger(url)
    records = [replace(RECORD, record_id=f"r{number}") for number in range(2500)]
    assert ledger.record(records) == 2500
    assert ledger.totals(UsageQuestion())[0].num_requests == 2500


def test_a_database_that_cannot_be_opened_says_so() -> None:
    with pytest.raises(SQLAlchemyError):
        Ledger("nonsense://nowhere")
