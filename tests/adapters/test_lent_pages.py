from __future__ import annotations

import pytest

from adapters.lent_pages import LentPages

FIRST, SECOND = range(8, 12), range(4, 8)


def test_fuller_loans_are_taken_from_first_so_that_others_can_end() -> None:
    pages = LentPages()
    pages.add(FIRST, 3)
    pages.add(SECOND, 3)
    one = pages.take(1)
    two = pages.take(2)
    assert {page.run for page in (*one, *two)} == {one[0].run}
    other = SECOND if one[0].run == FIRST else FIRST
    assert pages.emptiest(unless=set()) == other
    assert pages.emptiest(unless={other}) == one[0].run
    assert pages.emptiest(unless={FIRST, SECOND}) is None
    pages.end(other)
    assert pages.num_free == 0
    pages.check([*one, *two])


def test_an_adapter_may_lie_in_two_loans() -> None:
    pages = LentPages()
    pages.add(FIRST, 2)
    pages.add(SECOND, 2)
    taken = pages.take(3)
    assert {page.run for page in taken} == {FIRST, SECOND}
    pages.release(taken)
    assert pages.num_free == 4
    pages.check([])


def test_wrong_use_is_an_error() -> None:
    pages = LentPages()
    pages.add(FIRST, 2)
    with pytest.raises(AssertionError, match="3 pages are taken where 2 are free"):
        pages.take(3)
    pages = LentPages()
    pages.add(FIRST, 2)
    pages.take(1)
    with pytest.raises(AssertionError, match="an adapter in it"):
        pages.end(FIRST)
