from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.drafter import MAX_PROMPT_TOKENS, NUM_GRAM, Drafter, Prediction, PromptLookup
from tests.engine.scripted import a_request

NO_STOPS = frozenset[int]()
IDS = st.lists(st.integers(0, 3), max_size=60)


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


def slow_draft(ids: list[int], count: int) -> list[int]:
    """Go backwards through the text for the last tokens, and on from there."""
    gram = ids[-NUM_GRAM:]
    for end in range(len(ids) - 1, NUM_GRAM - 1, -1):
        if ids[end - NUM_GRAM : end] == gram:
            draft = list(ids)
            for at in range(count):
                draft.append(draft[end + at])
            return draft[len(ids) :]
    return []


@given(IDS, IDS, st.integers(1, 9))
def test_a_draft_is_what_followed_the_newest_place_like_the_end(prompt: list[int], output: list[int], n: int) -> None:
    lookup = PromptLookup(prompt, len(output))
    for count in range(len(output) + 1):
        # Two n-grams may share a place of the table; then the older one is not found.
        found = lookup.draft(n)
        assert found in ([], slow_draft(prompt + output[:count], n))
        if count < len(output):
            lookup.push(output[count])


def test_nearly_all_that_is_quoted_is_found() -> None:
    prompt = [i * 7919 % 49152 for i in range(3000)]
    lookup = PromptLookup(prompt, 2000)
    hits = 0
    for token_id in prompt[1000:2000]:
        hits += lookup.draft(4)[:1] == [token_id]
        lookup.push(token_id)
    assert hits > 850


def test_a_repeat_under_way_goes_on() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 2, 3, 4], 10)
    assert lookup.draft(8) == [2, 3, 4, 2, 3, 4, 2, 3]


def test_of_a_long_text_the_table_stays_small_and_the_end_is_known() -> None:
    lookup = PromptLookup(range(10 * MAX_PROMPT_TOKENS), 10**6)
    assert len(lookup._end_by_hash) <= 8 * MAX_PROMPT_TOKENS
    for token_id in (10 * MAX_PROMPT_TOKENS - 9, 10 * MAX_PROMPT_TOKENS - 8, 10 * MAX_PROMPT_TOKENS - 7):
        lookup.push(token_id)
    assert lookup.draft(2) == [10 * MAX_PROMPT_TOKENS - 6, 10 * MAX_PROMPT_TOKENS - 5]


def test_short_texts_have_no_drafts() -> None:
    for length in range(NUM_GRAM + 1):
        assert PromptLookup([7] * length, 5).draft(4) == []
    assert PromptLookup([7] * (NUM_GRAM + 1), 5).draft(4) == [7] * 4


def after(prediction_ids: Sequence[int], *answer: int) -> Prediction:
    prediction = Prediction(prediction_ids)
    for token_id in answer:
        prediction.push(token_id)
    return prediction


def test_a_prediction_begins_with_the_answer_and_goes_on_as_far_as_it_is_right() -> None:
    assert after(range(9)).draft(3) == [0, 1, 2]
    assert after(range(9), 0, 1).draft(3) == [2, 3, 4]
    assert after(range(4), 0, 1, 2).draft(3) == [3]
    assert after(range(4), 0, 1, 2, 3).draft(3) == []


def test_behind_a_change_a_prediction_is_found_again_by_two_of_its_tokens() -> None:
    changed, inserted, left_out = (0, 1, 77, 3), (0, 1, 77, 78, 2), (0, 1, 5)
    for answer, following in ((changed, 4), (inserted, 3), (left_out, 6)):
        assert after(range(9), *answer).draft(3) == []
        assert after(range(9), *answer, following).draft(2) == [following + 1, following + 2]


def test_of_several_places_in_a_prediction_it_is_the_next_one_and_at_its_end_the_last() -> None:
    ids = [1, 2, 3, 1, 2, 4, 1, 2, 5]
    assert after(ids, 1, 2, 3, 9, 1, 2).draft(1) == [4]
    assert after(ids, *ids, 9, 1, 2).draft(1) == [5]


@given(IDS, IDS, st.integers(1, 9))
def test_a_draft_is_always_a_piece_of_its_prediction(ids: list[int], answer: list[int], count: int) -> None:
    draft = after(ids, *answer).draft(count)
    assert len(draft) <= count
    assert not draft or any(ids[at : at + len(draft)] == draft for at in range(len(ids)))
