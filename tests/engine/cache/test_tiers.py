"""What lies below the cache comes back, is shared, lost and waited for; what came back is what was computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.cache.prefix_index import BlockName, child_name, landmark, root_name
from engine.ports import KeptBlock
from engine.request import FinishReason, Request
from tests.engine.scripted import Harness, a_config, a_request
from tests.engine.scripted_mover import ScriptedMover
from tests.oracles.naive_scheduler import answer_alone

CONFIG = a_config(num_blocks=16)
PROMPT = tuple(range(1, 18))
"""Four full blocks, and a token."""


def others(count: int) -> list[Request]:
    """Requests that together need more blocks than there are."""
    return [a_request(f"other{i}", tuple((i + j) % 20 for j in range(18)), salt=f"s{i}") for i in range(count)]


def serve(harness: Harness, *requests: Request) -> None:
    harness.add(*requests)
    harness.finish()
    for request in requests:
        assert harness.tokens(request.request_id) == answer_alone(request, harness.config.max_model_len).token_ids


def cached(harness: Harness, name: str) -> int:
    return harness.emissions[name][-1].num_cached_tokens


def teach(harness: Harness, *, token_s: float) -> None:
    """Have a step of one row last a second, and a prompt token so long."""
    for _ in range(20):
        harness.scheduler.admission.costs.observe(num_decodes=1, num_prompt_tokens=0, took_s=1.0, now_s=0.0)
        took_s = 1 + 64 * token_s
        harness.scheduler.admission.costs.observe(num_decodes=1, num_prompt_tokens=64, took_s=took_s, now_s=0.0)


def names_of(prompt: tuple[int, ...], salt: str = "") -> list[BlockName]:
    """The names of a prompt's full blocks."""
    names = [root_name(None, salt)]
    for start in range(0, len(prompt) - 3, 4):
        names.append(child_name(names[-1], prompt[start : start + 4]))
    return names[1:]


def hang(mover: ScriptedMover) -> None:
    mover._steps = 10**9


def end_hanging(mover: ScriptedMover) -> None:
    """What hangs is done with the next step."""
    mover._steps = 0
    mover._fetches = [(0, *fetch[1:]) for fetch in mover._fetches]


def forgotten(mover: ScriptedMover | None, **options: Any) -> Harness:
    """Return a harness that has served PROMPT, and then so much else that no block of it is on the device."""
    harness = Harness(CONFIG, mover=mover, **options)
    serve(harness, a_request("first", PROMPT))
    for other in others(6):
        serve(harness, other)
    return harness


def begun(mover: ScriptedMover) -> Harness:
    """Return a harness whose device holds the first two blocks of PROMPT, which no tier does, and a tier the others."""
    harness = forgotten(mover)
    mover._losing = 1
    serve(harness, a_request("begins", PROMPT[:9]))
    mover._losing = 0
    return harness


def test_a_prefix_comes_back_from_a_tier() -> None:
    without, harness = forgotten(None), forgotten(ScriptedMover([64]))
    serve(without, a_request("again", PROMPT))
    assert cached(without, "again") == 0
    serve(harness, a_request("again", PROMPT))
    assert cached(harness, "again") == 16
    assert harness.scheduler.tiers.num_fetched_blocks == 4


@pytest.mark.usefixtures("small_tiles")
def test_a_token_counts_once_however_many_tables_its_block_has_parts_in() -> None:
    harness = Harness(replace(CONFIG, windows=(0, 5, 5), num_blocks=40), mover=ScriptedMover([400]))
    serve(harness, a_request("first", PROMPT))
    for _ in range(20):
        # Nobody asks for anything: everything is stored.
        harness.step()
    assert harness.scheduler.tiers.num_stored_blocks == 5
    for other in others(12):
        serve(harness, other)
    before = harness.scheduler.tiers.num_fetched_blocks
    serve(harness, a_request("again", PROMPT))
    assert cached(harness, "again") == 16
    assert harness.scheduler.tiers.num_fetched_blocks - before == 4


@pytest.mark.parametrize("capacities", [[2], [64, 2], [2, 64]])
def test_tiers_of_any_size_give_back_what_they_hold(capacities: list[int]) -> None:
    harness = forgotten(ScriptedMover(capacities))
    serve(harness, a_request("again", PROMPT))
    assert cached(harness, "again") == (16 if max(capacities) == 64 else 0)


def test_others_go_on_while_a_prefix_is_on_its_way() -> None:
    mover = ScriptedMover([64])
    harness = forgotten(mover)
    mover._steps = 1000
    harness.add(a_request("again", PROMPT), a_request("quick", (7, 7, 7)))
    for _ in range(20):
        harness.step()
    assert harness.reason("quick") is not None
    assert not harness.emissions["again"]
    end_hanging(mover)
    harness.finish()
    assert cached(harness, "again") == 16


def test_nobody_waits_for_a_disk_that_hangs() -> None:
    now_s, mover = [0.0], ScriptedMover([64])
    harness = forgotten(mover, clock=lambda: now_s[0])
    hang(mover)
    harness.add(a_request("again", PROMPT), a_request("same", (*PROMPT[:16], 3)))
    for _ in range(50):
        harness.step()
        now_s[0] += 0.1
    assert not harness.emissions["again"]
    for _ in range(200):
        harness.step()
        now_s[0] += 0.1
    assert harness.reason("again") is harness.reason("same") is FinishReason.LENGTH
    assert cached(harness, "again") == 0
    # Whoever comes now finds no fetch to wait for that is not hanging.
    end_hanging(mover)
    harness.finish()


def test_a_fetch_that_hangs_holds_nothing_for_ever() -> None:
    now_s, mover = [0.0], ScriptedMover([64])
    harness = forgotten(mover, clock=lambda: now_s[0])
    hang(mover)
    harness.add(a_request("again", PROMPT))
    harness.step()
    assert harness.scheduler.kv_usage > 0
    harness.cancel("again")
    now_s[0] = 11.0
    # It is let in where nothing is held.
    serve(harness, a_request("large", tuple(range(20)) * 3, salt="other"))
    # What it was about is read again once it no longer hangs.
    end_hanging(mover)
    serve(harness, *others(1))
    serve(harness, a_request("later", PROMPT))
    assert cached(harness, "later") == 16


def test_a_fetch_gives_way_to_who_runs() -> None:
    mover = ScriptedMover([64])
    harness = forgotten(mover)
    hang(mover)
    harness.add(a_request("runs", tuple(range(19, 1, -1)), salt="other", max_tokens=40))
    harness.step()
    harness.add(a_request("again", PROMPT))
    for _ in range(45):
        harness.step()
    assert harness.reason("runs") is FinishReason.LENGTH
    assert harness.scheduler.counters.num_preemptions == 0
    # Who waited for it waits no longer.
    for _ in range(10):
        harness.step()
    assert harness.reason("again") is FinishReason.LENGTH
    end_hanging(mover)
    harness.finish()


def test_what_a_fetch_had_brought_before_it_was_given_up_is_not_found() -> None:
    """Its blocks are somebody else's by then, whatever they hold."""
    mover = ScriptedMover([64])
    harness = forgotten(mover)
    hang(mover)
    harness.add(a_request("again", PROMPT))
    harness.step()
    assert harness.scheduler.tiers.give_up_one()
    harness.cancel("again")
    end_hanging(mover)
    harness.step()
    assert harness.scheduler.tiers.num_fetched_blocks == 0
    serve(harness, a_request("later", PROMPT))
    assert cached(harness, "later") == 16


def test_who_shares_little_with_a_long_fetch_does_not_wait_for_it() -> None:
    mover = ScriptedMover([64])
    harness = forgotten(mover)
    hang(mover)
    mover.block_s = 1.0
    teach(harness, token_s=1.0)
    harness.add(a_request("long", PROMPT), a_request("short", (*PROMPT[:4], 9, 9)))
    for _ in range(20):
        harness.step()
    assert harness.reason("short") is not None
    assert not harness.emissions["long"]
    end_hanging(mover)
    harness.finish()


def test_requests_with_one_beginning_wait_for_one_fetch() -> None:
    mover = ScriptedMover([64], steps=3)
    harness = forgotten(mover)
    before = mover.num_fetches
    serve(harness, a_request("a", PROMPT), a_request("b", (*PROMPT[:16], 3, 2)))
    assert mover.num_fetches == before + 1
    assert cached(harness, "a") == cached(harness, "b") == 16


def test_all_who_have_one_beginning_wait_for_its_fetch_however_many_they_are() -> None:
    """Only the first four did; the fifth computed all of it, and those behind waited for that."""
    mover = ScriptedMover([64], steps=3)
    harness = forgotten(mover)
    before = mover.num_fetches
    serve(harness, *(a_request(str(number), (*PROMPT[:16], number, 3)) for number in range(9)))
    assert mover.num_fetches == before + 1
    assert {cached(harness, str(number)) for number in range(9)} == {16}


def test_what_cannot_be_read_is_computed_and_forgotten() -> None:
    mover = ScriptedMover([64])
    harness = forgotten(mover)
    mover._losing = 3
    serve(harness, a_request("again", PROMPT))
    assert cached(harness, "again") == 8
    mover._losing = 0
    assert harness.scheduler.tiers.num_fetched_blocks == 2


def test_a_request_that_is_cancelled_meanwhile_leaves_nothing_behind() -> None:
    mover = ScriptedMover([64], steps=5)
    harness = forgotten(mover)
    harness.add(a_request("again", PROMPT))
    harness.step()
    assert harness.scheduler.kv_usage > 0
    harness.cancel("again")
    harness.finish()


def test_other_salts_and_adapters_find_nothing() -> None:
    harness = forgotten(ScriptedMover([64]))
    serve(harness, a_request("salted", PROMPT, salt="other"), a_request("adapted", PROMPT, adapter="x"))
    assert cached(harness, "salted") == cached(harness, "adapted") == 0


def test_what_a_tier_held_before_the_start_is_found() -> None:
    name = names_of(PROMPT)[0]

    class Kept(ScriptedMover):
        def contents(self) -> list[list[KeptBlock]]:
            return [[KeptBlock(name, 0, 5)]]

    mover = Kept([8])
    first = forgotten(None)
    cells = first.runner.cells
    serve(first, a_request("again", PROMPT))
    plan = next(plan for plan in reversed(first.runner.plans) if plan.rows[0].request.request_id == "again")
    start = plan.rows[0].block_tables[0][0] * 4
    mover.slots[0][5] = name, 0, {i: cells[start + i] for i in range(4)}
    harness = Harness(CONFIG, mover=mover)
    assert landmark(name) in harness.scheduler.landmarks.copy()
    serve(harness, a_request("first", PROMPT))
    assert cached(harness, "first") == 4
