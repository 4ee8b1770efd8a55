from __future__ import annotations

import pytest

from deployments.channel.token_channel import SlowReaderError
from deployments.slo import Slo
from deployments.timeline import Timeline

SLO = Slo(ttft_s=1.0, tpot_s=0.1, e2e_s=3.0)


def ended(
    outcome: str = "stop", first_token_s: float | None = 0.5, end_s: float = 1.0, num_tokens: int = 11
) -> Timeline:
    return Timeline(
        request_id="r.1",
        model="m",
        base="m",
        arrived_unix_s=0.0,
        outcome=outcome,
        first_token_s=first_token_s,
        first_text_s=first_token_s,
        end_s=end_s,
        num_tokens=num_tokens,
    )


@pytest.mark.parametrize(
    ("timeline", "missed"),
    [
        (ended(), ()),
        (ended(first_token_s=1.1, end_s=1.5), ("ttft",)),
        (ended(end_s=2.0), ("tpot",)),
        (ended(num_tokens=100, end_s=4.0), ("e2e",)),
        (ended(first_token_s=2.0, end_s=4.0), ("ttft", "tpot", "e2e")),
        (ended(end_s=2.0, num_tokens=1), ()),
        (ended("content_filter", None, 0.1, 0), ()),
        (ended("OverloadError", None, 0.1, 0), ("refused",)),
        (ended("UnavailableError", None, 0.1, 0), ("refused",)),
        (ended("TimeoutError"), ("failed",)),
        (ended("EngineError"), ("failed",)),
        (ended("RequestError", None), None),
        (ended("cancelled"), None),
        (ended(SlowReaderError.__name__), None),
    ],
)
def test_an_answer_is_held_against_every_bound_and_who_left_or_erred_counts_not(
    timeline: Timeline, missed: tuple[str, ...] | None
) -> None:
    assert SLO.missed(timeline) == missed


def test_what_has_no_bound_is_never_missed() -> None:
    assert Slo().missed(ended(first_token_s=100.0, end_s=1000.0)) == ()
