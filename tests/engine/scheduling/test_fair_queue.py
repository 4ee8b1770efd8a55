from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.fair_queue import MAX_KNOWN_FLOWS, FairQueue

REQUESTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 2000), st.integers(1, 500)), min_size=1, max_size=60
)


def a_queue() -> FairQueue:
    return FairQueue(num_rows=8, step_tokens=256)


def test_who_asks_for_less_than_there_is_is_served_as_it_comes() -> None:
    queue = a_queue()
    for _ in range(5):
        now = queue.tag("other", num_prompt=2000, max_output=64)
        queue.note_service(now)
        assert queue.tag("a", num_prompt=10, max_output=64) == now


def test_others_come_before_the_backlog_of_a_flood() -> None:
    queue = a_queue()
    flood = [queue.tag("flood", num_prompt=100, max_output=64) for _ in range(50)]
    assert flood == sorted(flood)
    for tag in flood[:20]:
        queue.note_service(tag)
    other = queue.tag("other", num_prompt=100, max_output=64)
    assert sum(tag < other for tag in flood) == 19


def test_what_never_had_its_turn_costs_nothing_and_says_nothing_of_answers() -> None:
    queue = a_queue()
    queue.tag("a", num_prompt=256, max_output=8)
    before, mean = queue.next_tag("a"), queue.mean_output("a")
    cost = queue.tag("a", num_prompt=512, max_output=8) - before
    queue.end("a", num_output=None, unused=queue.next_tag("a") - before + cost)
    assert (queue.next_tag("a"), queue.mean_output("a")) == (before, mean)


def test_a_flow_pays_for_the_fetching_of_its_adapter_as_for_tokens() -> None:
    queue = a_queue()
    for flow, swap_steps in (("there", 0.0), ("fetched", 7.5)):
        assert queue.tag(flow, num_prompt=256, max_output=8, swap_steps=swap_steps) == 0
    there, fetched = (queue.tag(flow, num_prompt=1, max_output=1) for flow in ("there", "fetched"))
    assert (there, fetched) == (2, 9.5)


def test_what_a_flow_took_while_nobody_else_asked_is_forgotten() -> None:
    queue = a_queue()
    for _ in range(50):
        queue.note_service(queue.tag("a", num_prompt=100, max_output=64))
    for _ in range(50):
        queue.end("a", num_output=64)
    assert queue.tag("a", num_prompt=1, max_output=1) == queue.tag("b", num_prompt=1, max_output=1)


def test_a_crowd_of_new_flows_keeps_nobody_waiting_for_ever() -> None:
    queue = a_queue()
    queue.tag("a", num_prompt=1000, max_output=64)
    patient = queue.tag("a", num_prompt=1, max_output=1)
    num_before = 0
    while (new := queue.tag(f"new {num_before}", num_prompt=1, max_output=1)) <= patient:
        queue.note_service(new)
        queue.note_step()
        num_before += 1
    assert 0 < num_before < 1000


def test_requests_for_vectors_say_nothing_of_how_long_a_flow_s_answers_are() -> None:
    queue = a_queue()
    before = queue.cost("a", num_prompt=100, max_output=500)
    for _ in range(50):
        queue.tag("a", num_prompt=100, max_output=0)
        queue.end("a", num_output=None)
    assert queue.cost("a", num_prompt=100, max_output=500) == before
    assert queue.cost("a", num_prompt=100, max_output=0) < before


def test_a_flow_pays_for_the_answers_that_it_has_got() -> None:
    queue = a_queue()
    for _ in range(30):
        for flow, length in (("long", 1000), ("short", 10)):
            queue.tag(flow, num_prompt=1, max_output=4096)
            queue.end(flow, num_output=length)
    long, short = (queue.cost(flow, num_prompt=1, max_output=4096) for flow in ("long", "short"))
    assert 90 < long / short < 110
    assert queue.cost("long", num_prompt=1, max_output=16) < 3


@given(requests=REQUESTS)
def test_flows_with_a_backlog_get_the_same_service_to_within_a_request_each(
    requests: list[tuple[str, int, int]],
) -> None:
    """However they mix: in every prefix of the order that the tags make, for any two flows that have some left."""
    queue = a_queue()
    tagged = []
    for place, (flow, num_prompt, max_output) in enumerate(requests):
        cost = queue.cost(flow, num_prompt=num_prompt, max_output=max_output)
        tag = queue.tag(flow, num_prompt=num_prompt, max_output=max_output)
        tagged.append((tag, place, flow, cost))
    most = {name: max((cost for *_, flow, cost in tagged if flow == name), default=0.0) for name in "abc"}
    left = {name: sum(flow == name for *_, flow, _ in tagged) for name in "abc"}
    served = dict.fromkeys("abc", 0.0)
    for *_, flow, cost in sorted(tagged):
        backlogged = [name for name in "abc" if left[name]]
        for one in backlogged:
            for other in backlogged:
                assert served[one] - served[other] <= most[one] + most[other] + 1e-6
        served[flow] += cost
        left[flow] -= 1


@given(requests=REQUESTS)
def test_a_flow_s_own_requests_keep_their_order(requests: list[tuple[str, int, int]]) -> None:
    queue = a_queue()
    last: dict[str, float] = {}
    for flow, num_prompt, max_output in requests:
        tag = queue.tag(flow, num_prompt=num_prompt, max_output=max_output)
        assert tag >= last.get(flow, 0.0)
        last[flow] = tag


def test_virtual_time_never_goes_back() -> None:
    """A request that priority has put before others is served with a later tag than theirs."""
    queue = a_queue()
    early, late = (queue.tag("a", num_prompt=1000, max_output=64) for _ in range(2))
    queue.note_service(late)
    queue.note_service(early)
    assert queue.tag("b", num_prompt=1, max_output=1) == late


def test_a_flow_is_remembered_as_long_as_it_has_requests_however_many_flows_there_are() -> None:
    """Its end would find nothing otherwise, and end the engine's thread."""
    queue, flows = a_queue(), range(MAX_KNOWN_FLOWS + 2)
    for flow in (*flows, *flows):
        queue.tag(flow, num_prompt=1, max_output=1)
    for flow in (*flows, *flows):
        queue.end(flow, num_output=1)
    assert len(queue._flows) == MAX_KNOWN_FLOWS


def test_memory_of_flows_is_bounded() -> None:
    queue = a_queue()
    for index in range(2 * MAX_KNOWN_FLOWS):
        queue.tag(index, num_prompt=1, max_output=1)
        queue.end(index, num_output=1)
    assert len(queue._flows) == MAX_KNOWN_FLOWS
