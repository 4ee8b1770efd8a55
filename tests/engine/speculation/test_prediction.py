from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.prediction import Prediction

IDS = st.lists(st.integers(0, 3), max_size=30)


def after(prediction_ids: Sequence[int], *answer: int) -> Prediction:
    prediction = Prediction(prediction_ids)
    for token_id in answer:
        prediction.push(token_id)
    return prediction


def test_it_begins_with_the_answer_and_goes_on_as_far_as_it_is_right() -> None:
    assert after(range(9)).draft(3) == [0, 1, 2]
    assert after(range(9), 0, 1).draft(3) == [2, 3, 4]
    assert after(range(4), 0, 1, 2).draft(3) == [3]
    assert after(range(4), 0, 1, 2, 3).draft(3) == []


def test_behind_a_change_it_is_found_again_by_two_of_its_tokens() -> None:
    changed, inserted, left_out = (0, 1, 77, 3), (0, 1, 77, 78, 2), (0, 1, 5)
    for answer, following in ((changed, 4), (inserted, 3), (left_out, 6)):
        assert after(range(9), *answer).draft(3) == []
        assert after(range(9), *answer, following).draft(2) == [following + 1, following + 2]


def test_of_several_places_it_is_the_next_one_and_at_its_end_the_last() -> None:
    ids = [1, 2, 3, 1, 2, 4, 1, 2, 5]
    assert after(ids, 1, 2, 3, 9, 1, 2).draft(1) == [4]
    assert after(ids, *ids, 9, 1, 2).draft(1) == [5]


@given(IDS, IDS, st.integers(1, 9))
def test_a_draft_is_always_a_piece_of_it(ids: list[int], answer: list[int], count: int) -> None:
    draft = after(ids, *answer).draft(count)
    assert len(draft) <= count
    assert not draft or any(ids[at : at + len(draft)] == draft for at in range(len(ids)))
