from __future__ import annotations

from dataclasses import replace

import pytest

from engine.speculation.drafter import Drafter
from tests.engine.scripted import a_request

NO_STOPS = frozenset[int]()


def read(drafter: Drafter, output_ids: list[int], stop_ids: frozenset[int] = NO_STOPS) -> list[int]:
    """Ask before each token of an output, as an engine does; returns the last draft."""
    for count in range(drafter._num_seen, len(output_ids)):
        drafter.look_up(output_ids[:count], 4, stop_ids)
    return drafter.look_up(output_ids, 4, stop_ids)


def test_a_draft_comes_of_the_prompt_or_the_prediction_whichever_is_right_more_often() -> None:
    request = replace(a_request("a", (1, 2, 3, 4, 5, 6)), prediction_ids=(9, 1, 2, 3, 8, 8))
    # The prediction fails from its first token on; the prompt is quoted.
    assert read(Drafter(request), [])[:2] == [9, 1]
    assert read(Drafter(request), [9, 1, 2, 3])[:2] == [8, 8]
    assert read(Drafter(request), [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3])[:2] == [4, 5]


def test_how_often_drafts_are_right_is_learned_from_all_that_were_looked_up() -> None:
    drafter = Drafter(a_request("a", (1, 2, 3, 4, 5, 6, 7, 8, 9)))
    read(drafter, [1, 2, 3])
    first = drafter.acceptance
    read(drafter, [1, 2, 3, 4, 5])
    assert drafter.acceptance > first
    better = drafter.acceptance
    read(drafter, [1, 2, 3, 4, 5, 7, 7, 7])
    assert drafter.acceptance < better


def test_several_tokens_at_once_count_as_far_as_the_first_that_was_wrong() -> None:
    drafter = Drafter(a_request("a", (1, 2, 3, 4, 5, 6, 7, 1, 2, 3)))
    drafter.look_up([], 4, NO_STOPS)
    # The last one follows another text, and is right by chance.
    drafter.look_up([4, 5, 8, 7], 4, NO_STOPS)
    assert drafter.acceptance == pytest.approx(((0.5 * 0.8 + 0.2) * 0.8 + 0.2) * 0.8)


def test_a_draft_ends_before_a_token_that_would_end_the_answer() -> None:
    drafter = Drafter(a_request("a", (1, 2, 3, 4, 0, 6, 1, 2, 3)))
    assert drafter.look_up([], 4, frozenset({0})) == [4]
    assert drafter.look_up([4], 4, frozenset({4, 0})) == []


def test_what_is_resumed_is_found_again() -> None:
    request = replace(a_request("a"), prediction_ids=tuple(range(10, 30)))
    assert Drafter(request).look_up(list(range(10, 20)), 3, NO_STOPS) == [20, 21, 22]


def test_only_drafts_of_the_prediction_are_counted_as_its() -> None:
    plain = Drafter(a_request("a", (1, 2, 3, 4, 1, 2, 3)))
    plain.look_up([], 4, NO_STOPS)
    plain.note(4, 1)
    assert (plain.num_accepted, plain.num_rejected) == (0, 0)
    predicted = Drafter(replace(a_request("a"), prediction_ids=(7, 8, 9)))
    predicted.look_up([], 4, NO_STOPS)
    predicted.note(3, 2)
    assert (predicted.num_accepted, predicted.num_rejected) == (2, 1)


def test_what_a_draft_model_guesses_has_its_own_acceptance() -> None:
    first = 0.6
    drafter = Drafter(a_request("a", (1, 2, 3, 4, 5, 6, 1, 2, 3)), first)
    assert drafter.look_up([], 4, NO_STOPS) == [4, 5, 6, 1]
    looked_up = drafter.acceptance
    assert not drafter.has_guessed
    assert drafter.guess([7, 8, 0, 9], frozenset({0})) == [7, 8]
    assert drafter.has_guessed
    assert drafter.acceptance == first
    # Two were right, of which the answer is told by one.
    drafter.look_up([7, 8, 1], 4, NO_STOPS)
    assert drafter.guesses.acceptance == pytest.approx(((first * 0.8 + 0.2) * 0.8 + 0.2) * 0.8)
    drafter.look_up([7, 8, 1, 2, 3], 4, NO_STOPS)
    assert drafter.acceptance == looked_up
