"""What a request finds before it: who, how much is left of each, and whether somebody gives a row up for it."""

from __future__ import annotations

import pytest

from engine.request import Pooling, Request, RequestId
from engine.scheduling.forecast import Backlog, Load
from tests.engine.scripted import Harness, a_config, a_request

ONE_ROW = a_config(max_num_seqs=1)


def backlog(harness: Harness, *unread: Request, **fields: object) -> Backlog:
    """What a request finds that comes now."""
    return backlog_of(harness, a_request("comes", **fields), *unread)


def backlog_of(harness: Harness, asking: Request, *unread: Request) -> Backlog:
    hits = harness.scheduler.expected_hits
    for request in unread:
        hits.add(request, hits.look(request))
    return harness.scheduler.admission.backlog(asking, hits.look(asking), unread, 0.0)


def lengths(loads: tuple[Load, ...]) -> list[int]:
    return [load.output_tokens for load in loads]


def busy(**fields: object) -> Harness:
    """One request runs and has two tokens."""
    harness = Harness(ONE_ROW)
    harness.add(a_request("runs", **{"max_tokens": 9} | fields))
    harness.step()
    harness.step()
    return harness


def test_those_who_are_served_before_it_stand_in_their_order() -> None:
    harness = busy()
    urgent, late = (a_request(f"urgent{i}", priority=-100, max_tokens=20 + i) for i in range(2))
    harness.add(a_request("plain", max_tokens=10), urgent, a_request("low", priority=100, max_tokens=30))
    unread = a_request("unread", max_tokens=11), late
    found = backlog(harness, *unread)
    assert lengths(found.running) == [9 - 2]
    assert lengths(found.waiting) == [20, 10, 11, 21]
    # Of those who have not been read yet an equal came first.
    assert lengths(backlog(harness, *unread, priority=-100).waiting) == [20, 21]


def test_those_who_run_stand_in_the_order_in_which_they_are_sent_back_last() -> None:
    harness = Harness()
    harness.add(a_request("first", max_tokens=5))
    harness.step()
    harness.add(a_request("urgent", priority=-100, max_tokens=7))
    harness.step()
    assert lengths(backlog(harness).running) == [7 - 1, 5 - 2]


def test_what_is_left_of_a_request() -> None:
    """A decode has one token to compute; blocks are of 4 tokens, and one more is kept free for each."""
    harness = busy(deadline_s=50.0)
    assert backlog(harness).running == (Load(1, 7, (3 + 9) // 4 + 1, 50.0),)
    harness.add(a_request("waits", range(1, 11), prior_output_ids=(5, 6), max_tokens=6))
    unread = a_request("unread", range(2, 12), prior_output_ids=(5, 6), max_tokens=6)
    assert backlog(harness, unread).waiting == (Load(12, 4, 4 + 1, None, 72), Load(12, 4, 4 + 1, None, 72))


def test_no_block_is_counted_beyond_the_context() -> None:
    harness = busy()
    unread = a_request("unread", range(1, 21), max_tokens=1000)
    assert backlog(harness, unread).waiting == (Load(20, 64 - 20, 64 // 4 + 1, None, 200),)


@pytest.mark.parametrize("windows", [(0,), (0, 8, 8)])
def test_a_block_of_each_table_is_kept_free_for_each(windows: tuple[int, ...]) -> None:
    config = a_config(max_num_seqs=1, windows=windows)
    (load,) = backlog(Harness(config), a_request("unread", range(1, 9), max_tokens=4)).waiting
    assert load.num_blocks == config.reach.resting(12) + len(windows)


def test_an_answer_that_may_end_is_expected_to_be_as_long_as_its_flow_s_are() -> None:
    harness = Harness(a_config(max_num_seqs=1, max_model_len=400, num_blocks=200))
    for number in range(60):
        harness.add(a_request(f"{number}", max_tokens=5))
        harness.finish()

    def expected(max_tokens: int, **fields: object) -> list[int]:
        unread = a_request("unread", max_tokens=max_tokens, **{"ignore_eos": False} | fields)
        return lengths(backlog(harness, unread).waiting)

    assert expected(300) == [5]
    assert expected(3) == [3]
    assert expected(300, min_tokens=70) == [70]
    assert expected(300, ignore_eos=True) == [300]
    assert expected(10**6, ignore_eos=True) == [400 - 3]
    assert expected(300, tenant="unknown") > [5]
    # What was drawn before it was lost counts as drawn; one token at least is left.
    assert expected(300, prior_output_ids=(1, 2)) == [3]
    assert expected(300, prior_output_ids=(1,) * 8) == [1]


def test_who_has_drawn_more_than_is_expected_has_a_token_left() -> None:
    harness = Harness(a_config(max_num_seqs=1))
    for number in range(60):
        harness.add(a_request(f"{number}", max_tokens=2))
        harness.finish()
    harness.add(a_request("runs", ignore_eos=False, max_tokens=40))
    for _ in range(8):
        harness.step()
    assert lengths(backlog(harness).running) == [1]


def test_who_asks_to_be_let_in_is_held_to_its_bound_unless_that_is_only_the_context() -> None:
    harness = Harness(a_config(max_num_seqs=1))
    for number in range(60):
        harness.add(a_request(f"{number}", max_tokens=2))
        harness.finish()
    for max_tokens, expected in ((60, 60), (61, 2)):
        request = a_request("asks", max_tokens=max_tokens, ignore_eos=False)
        outlook = harness.scheduler.expected_hits.look(request)
        assert harness.scheduler.admission.reader.asking_load(request, outlook).output_tokens == expected


def test_of_a_prompt_that_waits_what_the_cache_holds_does_not_count() -> None:
    """Every prompt was expected to find as much as those before it: new documents after a day of chats a thirtieth."""
    harness = Harness(ONE_ROW)
    harness.add(a_request("past", range(1, 18), max_tokens=1))
    harness.finish()
    harness.add(a_request("runs", (7,) * 17, max_tokens=20), a_request("waits", (8,) * 17))
    harness.step()
    turn, short = a_request("turn", (*range(1, 18), 1, 2)), a_request("short", (9,))
    found = backlog(harness, turn, a_request("whole", range(1, 18)), short, a_request("new", (9,) * 20))
    assert [load.prompt_tokens for load in found.running] == [1]
    assert [load.prompt_tokens for load in found.waiting] == [17, 3, 1, 1, 20]


def test_of_prompts_with_a_common_beginning_the_first_computes_it() -> None:
    """It counted once for each: most of a burst with one system prompt was refused that would have been in time."""
    harness = busy()
    common = range(1, 13)
    harness.add(a_request("first", (*common, 1, 2)), a_request("second", (*common, 3, 4)))
    unread = a_request("third", (*common, 5, 6)), a_request("other", (*range(1, 12), 9, 9))
    assert prompt_tokens(harness, *unread) == [14, 2, 2, 13 - 8]
    # What it has in common with the asking request is no wait of that one, which would compute it all the same.
    assert prompt_tokens(harness, *unread, prompt=(*common, 7)) == [2, 2, 2, 13 - 8]
    asks = a_request("asks", (*common, 7))
    outlook = harness.scheduler.expected_hits.look(asks)
    assert harness.scheduler.admission.reader.asking_load(asks, outlook).prompt_tokens == 13
    assert outlook.num_own == 1


def test_who_has_ended_leaves_nothing_to_be_expected() -> None:
    harness = busy()
    harness.add(a_request("first", range(1, 13)))
    harness.scheduler.cancel(RequestId("first"))
    asks = a_request("asks", range(1, 13))
    assert harness.scheduler.expected_hits.look(asks).num_own == 12
    harness.finish()
    assert not harness.scheduler.expected_hits._coming


def test_a_prompt_under_way_is_left_as_it_is() -> None:
    harness = Harness(a_config(max_num_seqs=1, max_batched_tokens=10))
    for name in "ab":
        harness.add(a_request(name, range(1, 18), max_tokens=1))
        harness.finish()
    harness.add(a_request("runs", (7,) * 17, max_tokens=20))
    harness.step()
    assert [load.prompt_tokens for load in backlog(harness).running] == [7]


def a_flood(num_running: int, *waiting: Request) -> Harness:
    """Of one tenant, whose requests have all four rows, or less."""
    harness = Harness()
    harness.add(*(a_request(f"flood{i}", tenant="flood", max_tokens=20) for i in range(num_running)))
    harness.step()
    harness.add(*waiting)
    return harness


def test_a_row_is_given_up_for_who_has_less_than_its_share() -> None:
    own = [a_request(f"own{i}", tenant="own") for i in range(2)]
    others = [a_request(f"other{i}", tenant=f"other{i}") for i in range(2)]
    assert backlog(a_flood(4), tenant="own").takes_row
    assert not backlog(a_flood(4), tenant="flood").takes_row
    assert backlog(a_flood(4, own[0]), tenant="own").takes_row
    # Two of four rows are its share, whether those who ask for them wait or have not been read yet.
    assert not backlog(a_flood(4, *own), tenant="own").takes_row
    assert not backlog(a_flood(4), *own, tenant="own").takes_row
    assert not backlog(a_flood(4, own[0]), own[1], tenant="own").takes_row
    # Of four flows each has one.
    assert not backlog(a_flood(4, own[0], *others), tenant="own").takes_row
    assert backlog(a_flood(4, *others), tenant="own").takes_row
    # Who runs has what it has.
    harness = a_flood(2)
    harness.add(*own)
    harness.step()
    assert not backlog(harness, tenant="own").takes_row


def test_a_row_is_not_given_up_for_who_has_less_priority() -> None:
    assert backlog(a_flood(4), tenant="own", priority=0).takes_row
    assert not backlog(a_flood(4), tenant="own", priority=1).takes_row


def test_everybody_s_share_is_a_row_at_least() -> None:
    crowd = [a_request(f"other{i}", tenant=f"other{i}") for i in range(7)]
    assert backlog(a_flood(4, *crowd), tenant="own").takes_row
    assert not backlog(a_flood(4, *crowd), tenant="other3").takes_row


def test_nobody_gives_a_row_up_where_all_are_of_one_flow() -> None:
    assert not backlog(a_flood(0), tenant="flood").takes_row
    assert not backlog(a_flood(3), tenant="flood").takes_row


def prompt_tokens(harness: Harness, *unread: Request, **fields: object) -> list[float]:
    """What is left of the prompts of those who wait before a request that comes now."""
    return [load.prompt_tokens for load in backlog(harness, *unread, **fields).waiting]


def test_a_prompt_that_several_have_is_computed_once_and_is_no_wait_for_who_has_it_too() -> None:
    harness = busy()
    harness.add(*(a_request(f"choice{number}", range(1, 13)) for number in range(2)))
    choices = [a_request(f"choice{number}", range(1, 13)) for number in range(2, 4)]
    # Blocks are of 4 tokens, and the last token is always computed.
    assert prompt_tokens(harness, *choices) == [12, 4, 4, 4]
    assert prompt_tokens(harness, *choices, prompt=range(1, 13)) == [1, 1, 1, 1]
    assert prompt_tokens(harness, *choices, prompt=(2, *range(2, 13))) == [12, 4, 4, 4]


@pytest.mark.parametrize(
    "fields", [{"salt": "s"}, {"adapter": "a"}, {"num_prompt_logprobs": 0}, {"pooling": Pooling.MEAN}]
)
def test_who_does_not_find_it_computes_it_again(fields: dict[str, object]) -> None:
    harness = busy()
    harness.add(a_request("plain", range(1, 13)), a_request("other", range(1, 13), **fields))
    assert prompt_tokens(harness) == [12, 12]


def test_without_a_prefix_cache_each_computes_its_own() -> None:
    harness = Harness(a_config(max_num_seqs=1, enable_prefix_cache=False))
    unread = [a_request(f"{number}", range(1, 13)) for number in range(2)]
    assert prompt_tokens(harness, *unread, prompt=range(1, 13)) == [12, 12]
