from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.routing.asked import Asked
from deployments.routing.estimate import (
    MAX_LANDMARKS,
    OVERDUE_S,
    REPORT_PERIOD_S,
    UNSEEN_S,
    Estimate,
    ReplicaState,
    Sent,
    estimate,
)
from deployments.routing.report import LoadReport

DEFAULTS = LoadReport(model="m", replica_id="")
REST = LoadReport(
    model="m", replica_id="a", max_running=8, landmark_blocks=2, block_tokens=16, prefill_tokens_per_s=1000.0,
    adapter_load_s=0.8, turnover_s=0.5, is_whole=True, adapters_on_device=(7,), adapters_coming=(8,),
)  # fmt: skip
ASKED = Asked(request_id="r", num_tokens=200, block_marks=tuple(range(1, 13)))


def state_of(report: LoadReport) -> ReplicaState:
    state = ReplicaState("a")
    state.hear(report, 0.0, "link")
    return state


def expected(report: LoadReport, asked: Asked = ASKED, now_s: float = 0.0) -> Estimate:
    return estimate(asked, state_of(report), now_s, DEFAULTS)


def test_a_prompt_costs_what_is_not_cached() -> None:
    assert expected(REST).first_token_s == pytest.approx(0.2)
    # Landmarks are every second block: 2 and 4 are here, 6 is not, so that 8 is of no use.
    assert expected(replace(REST, landmarks_added=(2, 4, 8))).first_token_s == pytest.approx((200 - 64) / 1000)
    assert expected(replace(REST, landmark_blocks=0, landmarks_added=(2, 4))).num_new_tokens == 200
    assert expected(replace(REST, prefill_tokens_per_s=500.0)).first_token_s == pytest.approx(0.4)
    # Where nothing was computed yet, prompts take as long as elsewhere.
    unmeasured = state_of(replace(REST, prefill_tokens_per_s=0.0))
    elsewhere = replace(DEFAULTS, prefill_tokens_per_s=100.0)
    assert estimate(ASKED, unmeasured, 0.0, elsewhere).first_token_s == pytest.approx(2.0)


def test_what_is_queued_is_waited_for_and_shrinks_for_as_long_as_silence_is_usual() -> None:
    busy = replace(REST, queued_tokens=3000)
    assert expected(busy).first_token_s == pytest.approx(3.2)
    assert expected(busy, now_s=REPORT_PERIOD_S).first_token_s == pytest.approx(3.1)
    assert expected(busy, now_s=2.0).first_token_s == pytest.approx(3.1)


def test_silence_and_a_step_that_does_not_end_are_held_against_a_replica() -> None:
    assert expected(REST, now_s=OVERDUE_S + 1).first_token_s > OVERDUE_S
    assert expected(replace(REST, stalled_s=5.0)).first_token_s > 5


def test_the_step_under_way_is_waited_for_where_there_is_one() -> None:
    slow = replace(REST, step_s=0.3)
    assert expected(slow).first_token_s == pytest.approx(0.2)
    assert expected(replace(slow, num_running=1)).first_token_s == pytest.approx(0.5)


def test_rows_are_waited_for() -> None:
    assert expected(replace(REST, num_running=7)).first_token_s == pytest.approx(0.2)
    assert expected(replace(REST, num_running=8, num_waiting=1)).first_token_s == pytest.approx(2 * 0.5 + 0.2)
    assert expected(replace(REST, num_running=8, num_waiting=4)).occupancy == 1.5
    # Where nobody has waited yet, rows come free as they do elsewhere.
    unmeasured = state_of(replace(REST, num_running=8, num_waiting=1, turnover_s=0.0))
    assert estimate(ASKED, unmeasured, 0.0, replace(DEFAULTS, turnover_s=0.3)).first_token_s == pytest.approx(0.8)


def test_the_last_rows_have_a_price_before_anybody_waits() -> None:
    rows = replace(REST, max_running=20)
    crowding_s = [expected(replace(rows, num_running=taken)).crowding_s for taken in (0, 17, 18, 19, 20)]
    assert crowding_s == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.5])


@pytest.mark.parametrize(("adapter", "load_s"), [(None, 0.0), (7, 0.0), (8, 0.24), (9, 0.8)])
def test_an_adapter_is_loaded_beside_the_queue(adapter: int | None, load_s: float) -> None:
    asked = replace(ASKED, adapter=adapter)
    assert expected(REST, asked).first_token_s == pytest.approx(load_s + 0.2)
    assert expected(replace(REST, queued_tokens=3000), asked).first_token_s == pytest.approx(3.2)


def test_an_adapter_is_where_it_was_last_told_to_be() -> None:
    state = state_of(REST)
    changes = replace(REST, is_whole=False, adapters_on_device=(), adapters_coming=())
    state.hear(replace(changes, adapters_on_device=(8, 9), adapters_dropped=(7,)), 0.0, "link")
    assert (state.device, state.coming) == ({8, 9}, set())
    state.hear(replace(changes, adapters_coming=(8,)), 0.0, "link")
    state.hear(changes, 0.0, "link")
    assert (state.device, state.coming) == ({9}, {8})
    state.hear(REST, 0.0, "link")
    assert (state.device, state.coming) == ({7}, {8})
    state.forget()
    assert (state.device, state.coming) == (set(), set())


def test_what_was_sent_counts_until_it_is_seen_and_its_prefix_until_it_ends() -> None:
    state = state_of(REST)
    state.send("q", Sent(400, (2, 4), adapter=9))
    found = estimate(ASKED, state, 0.0, DEFAULTS)
    assert found.first_token_s == pytest.approx(0.4 + (200 - 64) / 1000)
    assert estimate(replace(ASKED, adapter=9), state, 0.0, DEFAULTS).has_adapter
    state.hear(replace(REST, is_whole=False, seen=("q",)), 0.0, "link")
    assert estimate(ASKED, state, 0.0, DEFAULTS).first_token_s == pytest.approx((200 - 64) / 1000)
    state.end("q")
    assert estimate(ASKED, state, 0.0, DEFAULTS).first_token_s == pytest.approx(0.2)
    state.send("unseen", Sent(400, (2, 4), adapter=9))
    state.end("unseen")
    assert estimate(ASKED, state, 0.0, DEFAULTS).first_token_s == pytest.approx(0.2)


def test_what_never_arrives_is_not_waited_for_for_ever() -> None:
    state = state_of(REST)
    state.send("q", Sent(4000, (), adapter=None, at_s=7.0))
    state.hear(replace(REST, is_whole=False), 7 + UNSEEN_S, "link")
    assert estimate(ASKED, state, 7 + UNSEEN_S, DEFAULTS).first_token_s > 4
    state.hear(replace(REST, is_whole=False), 8 + UNSEEN_S, "link")
    assert estimate(ASKED, state, 8 + UNSEEN_S, DEFAULTS).first_token_s < 1


def test_changes_of_what_was_never_told_are_ignored() -> None:
    state = ReplicaState("a")
    state.hear(replace(REST, is_whole=False, landmarks_added=(2,)), 0.0, "link")
    assert state.report is None
    state.hear(REST, 0.0, "link")
    state.hear(replace(REST, is_whole=False, landmarks_added=(2,), queued_tokens=5), 0.0, "another")
    assert state.report == REST


def test_no_more_landmarks_are_kept_than_the_bound() -> None:
    state = state_of(replace(REST, landmarks_added=range(MAX_LANDMARKS + 5)))
    assert len(state.landmarks) == MAX_LANDMARKS


def test_a_replica_unheard_of_counts_as_one_at_rest_with_what_others_measured() -> None:
    defaults = replace(DEFAULTS, prefill_tokens_per_s=100.0, landmark_blocks=2)
    assert estimate(ASKED, ReplicaState("b"), 50.0, defaults).first_token_s == pytest.approx(2.0)
