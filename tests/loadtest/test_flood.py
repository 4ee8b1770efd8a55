from __future__ import annotations

import threading

import pytest

from loadtest.flood import flooding
from tests.loadtest.scripted_server import answer, scripted_server


def test_a_flood_has_begun_when_the_block_begins_asks_again_and_again_and_ends_with_it() -> None:
    prompts: set[str] = set()
    has_asked_again = threading.Event()

    def script(body: dict[str, object]) -> list[bytes]:
        prompts.add(str(body["prompt"]))
        if len(prompts) > 4:
            has_asked_again.set()
        return answer(body)

    with scripted_server(script) as url:
        with flooding(url, "base", 4):
            assert len(prompts) >= 4
            assert has_asked_again.wait(30)
        num_asked = len(prompts)
    # What was on its way as the flood ended may be read later.
    assert len(prompts) <= num_asked + 4


def test_a_flood_has_the_api_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had none, and no server that wants one could be flooded."""
    monkeypatch.setenv("ANTIPHON_API_KEY", "k")
    with scripted_server(key="k") as url, flooding(url, "base", 1):
        pass


def test_a_stream_that_fails_is_not_taken_for_a_flood() -> None:
    refusing = scripted_server(lambda _: (429, b"{}"))
    with refusing as url, pytest.raises(RuntimeError, match="before it began"), flooding(url, "base", 1):
        raise AssertionError("it has not begun")
