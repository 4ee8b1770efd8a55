from __future__ import annotations

from engine.scheduling.rows import Rows
from tests.engine.scheduling.test_row_shares import live
from tests.engine.scripted import a_config


def test_guests_are_those_who_find_every_row_taken_and_leave_theirs_to_other_guests() -> None:
    rows = Rows(a_config(max_num_seqs=2, num_guest_rows=1, max_batched_tokens=8))
    first, second, third, fourth = (live(name, name, place) for place, name in enumerate("abcd"))
    for request in (first, second, third):
        assert rows.is_left_for_newcomer
        rows.take(request)
    rows.check([first, second, third])
    assert sorted(rows.released()) == [0, 1, 2], "the runner may have rows of an earlier scheduler"
    assert [request.is_guest for request in (first, second, third)] == [False, False, True]
    assert not rows.is_left
    assert not rows.is_left_for_newcomer
    index = first.row
    rows.give_back(first)
    assert rows.is_left
    assert (rows.released(), rows.released()) == ((index,), ())
    rows.take(fourth)
    rows.give_back(third)
    assert not rows.is_left
    assert rows.is_left_for_newcomer
    rows.check([second, fourth])
