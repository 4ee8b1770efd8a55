from __future__ import annotations

import pytest

from deployments import patience
from deployments.errors import UnavailableError
from deployments.patience import patiently


class Away:
    """Somebody who is not there for so many calls."""

    def __init__(self, num_calls: int) -> None:
        self.num_left = num_calls

    async def answer(self) -> str:
        if self.num_left:
            self.num_left -= 1
            raise UnavailableError("Nobody is there.", retry_after_s=1.0)
        return "here"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "POLL_S", 0.001)


async def test_who_comes_in_time_is_waited_for() -> None:
    assert await patiently(Away(3).answer, 5.0) == "here"


async def test_who_does_not_is_given_up() -> None:
    away = Away(10**6)
    with pytest.raises(UnavailableError):
        await patiently(away.answer, 0.01)
    assert away.num_left < 10**6 - 1


async def test_an_answer_that_is_an_error_is_not_asked_for_again() -> None:
    calls = []

    async def fail() -> None:
        calls.append(1)
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        await patiently(fail, 5.0)
    assert calls == [1]
