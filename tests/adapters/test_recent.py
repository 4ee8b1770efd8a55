from __future__ import annotations

import pytest

from adapters.recent import Recent


def never() -> int:
    raise AssertionError("a known value was made again")


def test_a_value_is_made_once_and_the_least_recently_used_goes_first() -> None:
    recent: Recent[str, int] = Recent(2)
    assert recent.get("a", lambda: 1) == 1
    assert recent.get("b", lambda: 2) == 2
    assert recent.get("a", never) == 1
    assert recent.get("c", lambda: 3) == 3
    assert recent.get("a", never) == 1
    assert recent.get("b", lambda: 4) == 4


def test_a_failure_is_not_remembered() -> None:
    recent: Recent[str, int] = Recent(2)

    def fail() -> int:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        recent.get("a", fail)
    assert recent.get("a", lambda: 1) == 1
