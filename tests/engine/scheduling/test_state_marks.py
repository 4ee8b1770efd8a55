"""Where states are kept, and what is found by them; `Harness` checks that each row goes on from its own."""

from __future__ import annotations

import pytest

from engine.request import Pooling, Request
from tests.engine.scripted import Harness, a_config, a_request
from tests.oracles.naive_scheduler import answer_alone

CONFIG = a_config(
    max_model_len=512,
    max_batched_tokens=64,
    block_tokens=16,
    num_blocks=128,
    num_snapshots=6,
)
LONG = tuple(number % 23 + 1 for number in range(200))


def served(harness: Harness, *requests: Request) -> int:
    """Serve requests side by side; returns how much of the last one was found."""
    harness.add(*requests)
    harness.finish()
    for request in requests:
        alone = answer_alone(request, harness.config.max_model_len)
        assert (harness.tokens(request.request_id), harness.reason(request.request_id)) == (
            alone.token_ids,
            alone.reason,
        )
    return harness.emissions[requests[-1].request_id][-1].num_cached_tokens


def kept(harness: Harness, name: str) -> list[int]:
    """The positions at which states of a request were written, in their order."""
    rows = [row for plan in harness.runner.plans for row in plan.rows if row.request.request_id == name]
    return [position for row in rows for position, _ in row.snapshots]


def test_a_conversation_goes_on_from_the_end_of_its_last_prompt() -> None:
    harness = Harness(CONFIG)
    assert served(harness, a_request("first", LONG)) == 0
    assert kept(harness, "first") == [176]
    # A template may repeat the end of the prompt otherwise.
    assert served(harness, a_request("second", (*LONG[:194], 22, 23, *LONG))) == 176
    assert kept(harness, "second") == [384]
    assert served(harness, a_request("same again", LONG)) == 176
    assert kept(harness, "same again") == []


def test_an_answer_that_is_repeated_as_it_was_is_found_up_to_the_last_state_of_it() -> None:
    harness = Harness(CONFIG)
    first = a_request("first", LONG, max_tokens=200)
    served(harness, first)
    # The fourth lies in the prompt; of the others each is in the place of the one before it.
    assert kept(harness, "first") == [176, 256, 320, 384]
    places = [place for plan in harness.runner.plans for row in plan.rows for _, place in row.snapshots]
    assert len({*places}) == 2
    text = (*LONG, *harness.tokens("first"))
    assert served(harness, a_request("second", (*text, 1, 2, 3))) == 384
    assert served(harness, a_request("other answer", (*text[:300], 1, 2, 3))) == 176


def test_what_many_prompts_begin_with_is_found_by_the_third() -> None:
    harness = Harness(CONFIG)
    common = LONG[:100]
    assert served(harness, a_request("first", (*common, *[1] * 90))) == 0
    assert served(harness, a_request("second", (*common, *[2] * 90))) == 0
    assert kept(harness, "second") == [96, 176]
    assert served(harness, a_request("third", (*common, *[3] * 90))) == 96
    assert kept(harness, "third") == [176]


def test_nothing_is_kept_that_saves_little() -> None:
    harness = Harness(CONFIG)
    served(harness, a_request("short", LONG[:70]))
    assert kept(harness, "short") == []
    served(harness, a_request("first", LONG))
    # Behind the state at 176 it has only 48 tokens more.
    assert served(harness, a_request("second", (*LONG, *LONG[:40]))) == 176
    assert kept(harness, "second") == []


def test_who_computes_anew_what_is_kept_does_not_keep_it_again() -> None:
    harness = Harness(CONFIG)
    served(harness, a_request("first", LONG))
    assert served(harness, a_request("scored", LONG, num_prompt_logprobs=0)) == 0
    assert kept(harness, "scored") == []


def test_of_who_wants_a_vector_only_what_others_share_is_kept() -> None:
    harness = Harness(CONFIG)
    for number, name in enumerate(("first", "second", "third"), 1):
        served(harness, a_request(name, (*LONG[:130], *[number] * 90), pooling=Pooling.LAST, max_tokens=1))
    assert [kept(harness, name) for name in ("first", "second", "third")] == [[], [128], []]
    assert harness.emissions["third"][-1].num_cached_tokens == 128


def test_a_state_is_given_up_with_the_block_that_it_stands_behind() -> None:
    config = a_config(
        max_model_len=256,
        max_batched_tokens=64,
        block_tokens=16,
        num_blocks=16,
        num_snapshots=6,
    )
    harness = Harness(config)
    served(harness, a_request("first", LONG))
    served(harness, a_request("other", LONG[::-1]))
    assert served(harness, a_request("again", LONG)) == 0


def test_the_state_that_nobody_has_asked_for_longest_is_given_up_for_another() -> None:
    harness = Harness(a_config(**{name: getattr(CONFIG, name) for name in CONFIG.__slots__} | {"num_snapshots": 2}))
    texts = {name: (number, *LONG) for number, name in enumerate("abc", 1)}
    served(harness, a_request("a", texts["a"]))
    served(harness, a_request("b", texts["b"]))
    assert served(harness, a_request("a again", texts["a"])) == 192
    served(harness, a_request("c", texts["c"]))
    assert served(harness, a_request("b again", texts["b"])) == 0
    assert served(harness, a_request("a once more", texts["a"])) == 0


def test_who_fails_or_is_cancelled_keeps_no_state_and_no_place() -> None:
    harness = Harness(CONFIG, failing=frozenset({"fails"}), steps_ahead=1)
    harness.add(a_request("fails", LONG[:150]), a_request("goes", LONG[:170]))
    harness.step()
    harness.cancel("goes")
    harness.finish()
    for number in range(8):
        served(harness, a_request(str(number), (number + 1, *LONG)))


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_one_text_twice_at_once_is_kept_once(steps_ahead: int) -> None:
    harness = Harness(CONFIG, steps_ahead=steps_ahead)
    served(harness, a_request("a", LONG, max_tokens=80), a_request("b", LONG, max_tokens=80))
    assert served(harness, a_request("c", (*LONG, *harness.tokens("a"), 5))) == 256


def test_who_had_to_give_way_goes_on_from_its_own_state() -> None:
    config = a_config(
        max_model_len=512,
        max_batched_tokens=512,
        block_tokens=16,
        num_blocks=40,
        num_snapshots=6,
    )
    harness = Harness(config)
    requests = [a_request(name, (number, *LONG), max_tokens=150) for number, name in enumerate("abc", 1)]
    served(harness, *requests)
    assert harness.scheduler.counters.num_preemptions > 0
    admissions = [row.start for plan in harness.runner.plans for row in plan.rows if row.is_admission]
    assert sorted(admissions)[:3] == [0, 0, 0]
    assert {*admissions} - {0} == {192}
