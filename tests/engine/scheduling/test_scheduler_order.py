"""Who comes first: priorities, fair shares, and adapters that are not there yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from adapters.identity import AdapterDigest
from engine.cache.prefix_index import BlockName
from engine.cache.reach import Reach
from engine.request import FinishReason
from engine.scheduling import live_request
from engine.scheduling.block_tables import LONG_BLOCKS
from engine.scheduling.pins import MAX_SKIPS, Pins
from tests.engine.scheduling.test_own_step import teach
from tests.engine.scheduling.test_row_shares import live
from tests.engine.scheduling.test_scheduler import assert_right, shape
from tests.engine.scripted import Harness, ScriptedGate, a_config, a_request
from tests.oracles.naive_scheduler import VOCAB_SIZE

# --- who comes first ---


def test_among_waiting_requests_the_lower_priority_number_goes_first_then_the_earlier() -> None:
    harness = Harness(a_config(max_num_seqs=1))
    harness.add(*(a_request(name, priority=priority) for name, priority in [("a", 1), ("b", 0), ("c", 0), ("d", -5)]))
    order = []
    while len(order) < 4:
        plan = harness.step()
        order += [row.request.request_id for row in plan.rows if row.is_admission] if plan else []
    assert order == ["d", "b", "c", "a"]


def test_a_flood_of_one_adapter_or_tenant_keeps_nobody_else_waiting() -> None:
    flows: list[tuple[dict[str, Any], dict[str, Any]]] = [({"adapter": "a"}, {}), ({"tenant": "a"}, {"tenant": "b"})]
    for flood, other in flows:
        harness = Harness(a_config(max_num_seqs=1))
        harness.add(*(a_request(f"flood{index}", max_tokens=2, **flood) for index in range(20)))
        harness.step()
        harness.add(a_request("other", max_tokens=2, **other))
        order: list[str] = []
        while "other" not in order:
            plan = harness.step()
            order += [row.request.request_id for row in plan.rows if row.is_admission] if plan else []
        assert len(order) <= 2
        harness.finish()


def test_a_flow_with_more_than_its_share_of_the_rows_yields_one_to_each_request_of_another() -> None:
    harness = Harness(a_config(max_num_seqs=4, num_blocks=200))
    flood = [a_request(f"flood{index}", range(index, index + 8), max_tokens=30, tenant="a") for index in range(6)]
    harness.add(*flood)
    while harness.scheduler.num_running < 4:
        harness.step()
    others = [a_request(f"other{index}", range(10 + index, 18 + index), max_tokens=4, tenant="b") for index in range(3)]
    harness.add(*others)
    first = [harness.step(), harness.step(), harness.step()]
    admitted = [row.request.request_id for plan in first if plan for row in plan.rows if row.is_admission]
    # Two of the four rows are the other's share.
    assert admitted == ["other0", "other1"]
    assert harness.scheduler.counters.num_preemptions == 2
    harness.finish()
    assert_right(harness, *flood, *others)
    assert harness.scheduler.counters.num_preemptions <= len(flood)


def test_an_urgent_request_prefills_before_a_long_prompt_that_is_under_way() -> None:
    harness = Harness()
    harness.add(a_request("long", (7,) * 50))
    harness.step()
    harness.add(a_request("urgent", (1, 2), priority=-1))
    assert shape(harness) == [("urgent", 0, 2), ("long", 16, 30)]


def test_no_stream_of_urgent_requests_starves_a_patient_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_request, "MAX_HEAD_START_STEPS", 32)
    harness = Harness(a_config(max_num_seqs=1))
    harness.add(a_request("patient", priority=2**31 - 1))
    for i in range(200):
        harness.add(a_request(f"u{i}", max_tokens=1, priority=-(2**31)))
        harness.step()
        if harness.tokens("patient"):
            break
    assert 32 < i <= 2 * 32 + 2
    harness.finish()


def test_an_aged_request_is_not_pre_empted_for_newer_urgent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing the victim by raw priority undid the ageing: admitted by its age, pre-empted by the next urgent one."""
    monkeypatch.setattr(live_request, "MAX_HEAD_START_STEPS", 8)
    harness = Harness(a_config(num_blocks=6, max_model_len=24))
    harness.add(a_request("patient", range(1, 13), max_tokens=12, priority=100))
    for i in range(200):
        harness.add(a_request(f"u{i}", (i % 20, 1, 2), max_tokens=9, priority=-100))
        harness.step()
        if harness.reason("patient") is not None:
            break
    assert harness.reason("patient") is FinishReason.LENGTH
    assert i < 100
    harness.finish(20_000)


# --- adapters ---


def test_a_request_whose_adapter_still_loads_lets_others_go_first() -> None:
    gate = ScriptedGate(load_steps={"slow": 3})
    harness = Harness(a_config(max_num_seqs=8), gate)
    requests = [a_request("s", adapter="slow"), a_request("b"), a_request("f", adapter="fast")]
    harness.add(*requests)
    assert [name for name, *_ in shape(harness)] == ["b", "f"]
    harness.finish()
    assert_right(harness, *requests)


def test_an_adapter_begins_to_load_as_its_request_queues() -> None:
    gate = ScriptedGate(load_steps={"x": 2})
    harness = Harness(a_config(max_num_seqs=1), gate)
    harness.add(a_request("a", max_tokens=2), a_request("x", adapter="x"))
    harness.step()
    harness.step()
    assert [name for name, *_ in shape(harness)] == ["x"]


def test_a_failed_adapter_ends_its_requests_alone_even_while_no_row_is_free() -> None:
    harness = Harness(a_config(max_num_seqs=1), ScriptedGate(errors={"bad": "The adapter is broken."}))
    harness.add(a_request("a"))
    harness.step()
    harness.add(a_request("x", adapter="bad"))
    harness.step()
    [emission] = harness.emissions["x"]
    assert (emission.finish_reason, emission.error) == (FinishReason.FAILED, "The adapter is broken.")
    harness.finish()
    assert_right(harness, a_request("a"))


def test_files_that_cannot_be_had_now_are_no_failure_of_the_adapter_s() -> None:
    gate = ScriptedGate(errors={"far": "Its files are elsewhere."})
    gate.passing.add(AdapterDigest("far"))
    harness = Harness(a_config(max_num_seqs=1), gate)
    harness.add(a_request("x", adapter="far"))
    harness.step()
    [emission] = harness.emissions["x"]
    assert (emission.finish_reason, emission.error) == (FinishReason.UNAVAILABLE, "Its files are elsewhere.")


def test_two_requests_of_one_adapter_share_its_slot() -> None:
    harness = Harness(gate=ScriptedGate(num_slots=1))
    harness.add(a_request("a", adapter="x"), a_request("b", adapter="x"))
    harness.step()
    assert harness.scheduler.num_running == 2
    harness.finish()


def test_a_crowd_on_one_adapter_does_not_starve_a_request_of_another() -> None:
    """The crowd overlaps, so that its adapter is pinned at every moment."""
    harness = Harness(gate=ScriptedGate(num_slots=1))
    harness.add(a_request("c0", adapter="x", max_tokens=8))
    harness.step()
    harness.add(a_request("lone", adapter="y", max_tokens=1))
    for i in range(1, 400):
        if i % 4 == 0:
            harness.add(a_request(f"c{i}", adapter="x", max_tokens=8))
        harness.step()
        if harness.tokens("lone"):
            break
    assert MAX_SKIPS < i <= MAX_SKIPS + 10
    harness.finish()


def test_the_base_model_goes_on_while_a_slot_is_kept_free_for_a_patient_adapter() -> None:
    harness = Harness(gate=ScriptedGate(num_slots=1))
    harness.add(a_request("x", adapter="x", max_tokens=60), a_request("y", adapter="y"))
    for _ in range(MAX_SKIPS - 10):
        harness.step()
    for _ in range(30):
        if harness.reason("x") is None:
            harness.step()
    harness.add(a_request("base", max_tokens=1))
    harness.step()
    assert harness.tokens("base")


def test_a_slot_that_is_kept_free_is_given_to_nobody_who_comes_after() -> None:
    gate, digests = ScriptedGate(num_slots=1), [AdapterDigest(name) for name in "xyz"]
    for digest in digests:
        gate.prepare(digest)
    assert gate.try_pin(digests[0])
    there, patient, other = (live(name, name, place) for place, name in enumerate("xyz"))
    for request, digest in zip((there, patient, other), digests, strict=True):
        request.request = replace(request.request, adapter=digest)
    patient.num_skips = MAX_SKIPS
    pins = Pins(gate)
    assert [pins.try_pin(request) for request in (patient, other, there)] == [False, False, False]


def test_nobody_loses_a_row_to_who_waits_for_its_adapter() -> None:
    harness = Harness(a_config(max_num_seqs=2), ScriptedGate(load_steps={"x": 5}))
    harness.add(*(a_request(f"flood{i}", tenant="flood", max_tokens=30) for i in range(2)))
    harness.step()
    harness.add(a_request("light", tenant="light", adapter="x"))
    counts = []
    for _ in range(8):
        harness.step()
        counts.append(harness.scheduler.counters.num_preemptions)
    assert counts == [0] * 5 + [1] * 3


def test_the_pin_of_a_request_without_blocks_is_given_back() -> None:
    harness = Harness(a_config(num_blocks=4, max_model_len=16))
    harness.add(a_request("a", range(1, 11), adapter="x"), a_request("b", range(1, 11), adapter="y"))
    harness.step()
    assert +harness.gate.pins == {"x": 1}
    harness.finish()


@pytest.mark.parametrize("tenant", ["", "newcomer"])
def test_a_long_prefix_that_finds_no_room_is_not_looked_up_before_each_step(
    monkeypatch: pytest.MonkeyPatch, tenant: str
) -> None:
    """Of 100,000 tokens, that took milliseconds."""
    now_s, num_prefix = 0.0, LONG_BLOCKS * 4
    config = a_config(max_model_len=2 * num_prefix, num_blocks=LONG_BLOCKS + 20, max_batched_tokens=num_prefix)
    harness = Harness(config, clock=lambda: now_s)
    teach(harness.scheduler.admission.costs)
    prefix, lookups = tuple(i % VOCAB_SIZE for i in range(num_prefix)), []
    longest = Reach.longest

    def looked_up(reach: Reach, names: Sequence[BlockName], has: Callable[[BlockName], bool]) -> int:
        lookups.append(now_s)
        return longest(reach, names, has)

    monkeypatch.setattr(Reach, "longest", looked_up)
    runs, waits = a_request("runs", prefix, max_tokens=40), a_request("waits", (*prefix, *(1,) * 60), tenant=tenant)
    harness.add(runs)
    for _ in range(33):
        harness.step()
    harness.add(waits)
    lookups.clear()
    for _ in range(3):
        harness.step()
    num_first = len(lookups)
    assert not harness.tokens("waits")
    for _ in range(2):
        harness.step()
    assert len(lookups) == num_first <= 2
    now_s = 1.0
    harness.step()
    assert len(lookups) > num_first
    now_s = 2.0
    harness.finish()
    assert_right(harness, runs, waits)
