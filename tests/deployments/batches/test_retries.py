from __future__ import annotations

import pytest

from deployments.batches.retries import MAX_FAILURES, MAX_WAIT_S, Retries
from deployments.batches.values import InsideAnswer


@pytest.mark.parametrize("status", [200, 400, 401, 404, 413, 422])
def test_an_answer_to_the_request_stays(status: int) -> None:
    assert Retries().wait_s(InsideAnswer(status=status)) is None


@pytest.mark.parametrize("status", [500, 503])
def test_a_failure_that_would_recur_stays(status: int) -> None:
    assert Retries().wait_s(InsideAnswer(status=status, is_final=True)) is None


@pytest.mark.parametrize("status", [429, 503])
def test_who_is_told_to_come_back_does_for_ever(status: int) -> None:
    retries = Retries()
    assert [retries.wait_s(InsideAnswer(status=status, retry_after_s=20.0)) for _ in range(2000)] == [20.0] * 2000
    assert retries.wait_s(InsideAnswer(status=status)) == MAX_WAIT_S


def test_without_a_time_the_wait_doubles() -> None:
    retries = Retries()
    assert [retries.wait_s(InsideAnswer(status=503)) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_failures_are_tried_a_few_times_whatever_was_between() -> None:
    retries, waits = Retries(), []
    for status in (429, 500, 503, 502, 503, 504):
        waits.append(retries.wait_s(InsideAnswer(status=status)))
    assert waits[-1] is None
    assert None not in waits[:-1]
    assert waits.count(None) == 1
    assert MAX_FAILURES == 3
