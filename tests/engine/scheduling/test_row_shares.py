from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.live_request import LiveRequest, flow_of, rank_of
from engine.scheduling.row_shares import takes_row, who_yields
from tests.engine.scripted import Harness, a_config, a_request


def live(name: str, flow: str, place: int, *, has_yielded: bool = False, priority: int = 0) -> LiveRequest:
    return LiveRequest(
        request=a_request(name, tenant=flow, priority=priority),
        rank=rank_of(priority, tag=0.0, arrival=place),
        tag=0.0,
        queued_at_s=0.0,
        output_ids=[],
        has_yielded=has_yielded,
    )


def test_the_last_of_the_largest_yield_to_the_first_of_another() -> None:
    running = [live(f"a{place}", "a", place) for place in (2, 0, 3, 1)]
    guest = live("c0", "c", 4)
    guest.is_guest = True
    waiting = [live(f"b{place}", "b", 10 + place) for place in range(3)]
    pairs = list(who_yields([guest, *running], waiting, 4, lambda _: True))
    assert [(victim.request.request_id, behind.request.request_id) for victim, behind in pairs] == [
        ("a3", "b1"),
        ("a2", "b1"),
    ]


def test_nobody_yields_to_his_own_flow_or_to_one_that_is_not_ready_or_a_second_time() -> None:
    running = [live(f"a{place}", "a", place) for place in range(4)]
    assert list(who_yields(running, [live("a9", "a", 9)], 4, lambda _: True)) == []
    assert list(who_yields(running, [live("b", "b", 9)], 4, lambda _: False)) == []
    worn = [live(f"a{place}", "a", place, has_yielded=True) for place in range(4)]
    assert list(who_yields(worn, [live("b", "b", 9)], 4, lambda _: True)) == []


def test_where_there_are_more_flows_than_rows_each_that_has_several_yields_down_to_one() -> None:
    running = [live(name, name[0], place) for place, name in enumerate(["a0", "a1", "d0", "d1"])]
    waiting = [live(name, name, 10 + place) for place, name in enumerate("bcef")]
    pairs = list(who_yields(running, waiting, 4, lambda _: True))
    assert [(victim.request.request_id, behind.request.request_id) for victim, behind in pairs] == [
        ("d1", "b"),
        ("a1", "c"),
    ]


def test_nobody_yields_to_lower_priority() -> None:
    """Lines of a batch preempted answers that others waited for, which then stood still for hundreds of steps."""
    running = [live(f"a{place}", "a", place) for place in range(4)]
    assert list(who_yields(running, [live("line", "b", 9, priority=1)], 4, lambda _: True)) == []
    (pair,) = who_yields(running, [live("urgent", "b", 9, priority=-1)], 4, lambda _: True)
    assert pair[0] is running[-1]


def test_who_comes_is_told_of_a_row_where_one_is_yielded() -> None:
    """A guest counted among those who hold rows: its flow was told to wait where it would have been yielded one."""
    running = [live(f"a{place}", "a", place) for place in range(4)]
    guest = live("c0", "c", 4)
    guest.is_guest = True
    for flow, count in (("a", 0), ("b", 2), ("c", 2)):
        crowd = [live(f"{flow}{place}", flow, 10 + place) for place in range(3)]
        pairs = list(who_yields([guest, *running], crowd, 4, lambda _: True))
        assert len(pairs) == count
        for num_before in range(3):
            asking = [one.request for one in crowd[:num_before]]
            request = crowd[num_before].request
            assert takes_row(request, [guest, *running], asking, 4) == (num_before < count)


def test_nobody_yields_a_row_that_another_of_his_flow_would_get() -> None:
    running = [live(f"a{place}", "a", place) for place in range(4)]
    first, last = live("a9", "a", 9), live("b", "b", 10)
    assert list(who_yields(running, [first, last], 4, lambda _: True)) == []
    assert list(who_yields(running, [first, last], 4, lambda waiting: waiting is last)) != []


FLOWS = st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=8)


@given(holding=FLOWS.filter(bool), asking=FLOWS.filter(bool))
def test_nobody_falls_below_his_share_and_nobody_gets_more(
    holding: list[tuple[str, bool]], asking: list[tuple[str, bool]]
) -> None:
    running = [live(f"r{i}", flow, i, has_yielded=worn) for i, (flow, worn) in enumerate(holding)]
    waiting = [live(f"w{i}", flow, 100 + i) for i, (flow, _) in enumerate(asking)]
    num_rows = len(running)
    before = Counter(flow_of(one.request) for one in running)
    after = Counter(before)
    share = max(1, num_rows // len({flow for flow, _ in holding + asking}))
    seen = set()
    for victim, behind in who_yields(running, waiting, num_rows, lambda _: True):
        assert not victim.has_yielded
        assert flow_of(victim.request) != flow_of(behind.request)
        assert victim.request.request_id not in seen
        seen.add(victim.request.request_id)
        after[flow_of(victim.request)] -= 1
        after[flow_of(behind.request)] += 1
    for flow, count in after.items():
        assert count >= min(share, before[flow])
        assert count <= max(share, before[flow])


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_who_has_no_row_gets_one_though_a_step_is_always_under_way(steps_ahead: int) -> None:
    harness = Harness(a_config(max_num_seqs=4, num_blocks=200), steps_ahead=steps_ahead)
    harness.add(*(a_request(f"flood{place}", tenant="flood", max_tokens=40) for place in range(8)))
    for _ in range(3):
        harness.step()
    harness.add(a_request("light", tenant="light", max_tokens=2))
    for _ in range(6):
        harness.step()
    assert harness.reason("light") is not None
    harness.finish()


def test_nobody_loses_a_row_to_a_step_that_is_planned_before_the_one_under_way_is_done() -> None:
    """What that one writes would lie in blocks that another has by then, and its token in a row of another."""
    harness = Harness(a_config(max_num_seqs=2, num_blocks=200), steps_ahead=1)
    harness.add(*(a_request(f"flood{place}", tenant="flood", max_tokens=40) for place in range(2)))
    harness.step()
    harness.add(a_request("light", tenant="light", max_tokens=2))
    assert harness.under_way
    assert harness.step() is None
    assert harness.scheduler.counters.num_preemptions == 0
    harness.step()
    assert harness.scheduler.counters.num_preemptions == 1
    harness.finish()


def test_who_has_yielded_once_runs_to_its_end_whoever_comes() -> None:
    """A long answer of a tenant that has two would else begin anew for each short one of another."""
    harness = Harness(a_config(max_num_seqs=2, num_blocks=200))
    harness.add(*(a_request(f"long{place}", tenant="long", max_tokens=40) for place in range(2)))
    harness.step()
    for number in range(8):
        harness.add(a_request(f"short{number}", tenant=f"short{number}", max_tokens=2))
        for _ in range(4):
            harness.step()
    assert harness.scheduler.counters.num_preemptions == 2
    harness.finish()
