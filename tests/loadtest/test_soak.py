"""What a soak would call a failure, and a short one against our own application."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import uvicorn

from app.http.api import create_app
from engine.errors import EngineError
from loadtest.soak import Heard, judge, soak
from tests.app.scripted_gateway import ScriptedGateway


@pytest.mark.parametrize(
    ("heard", "verdict"),
    [
        (Heard("abc", True, None, 1.0), "same"),
        (Heard("abd", True, None, 1.0), "different"),
        (Heard("ab", False, None, 1.0), "cut in silence"),
        (Heard("ab", False, "ReadError", 1.0), "ReadError"),
        (Heard("abc", True, "error event", 1.0), "failed after its end"),
        (Heard("", False, "status 503", 1.0), "status 503"),
    ],
)
def test_an_answer_is_whole_or_says_that_it_is_not(heard: Heard, verdict: str) -> None:
    assert judge(heard, "abc") == verdict


@pytest.fixture
def served() -> Iterator[tuple[str, ScriptedGateway]]:
    gateway = ScriptedGateway()
    server = uvicorn.Server(uvicorn.Config(create_app(gateway), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", gateway
    server.should_exit = True
    thread.join()


def test_a_well_server_answers_the_same_all_the_time(served: tuple[str, ScriptedGateway]) -> None:
    found = soak(served[0], "base", minutes=0.01, streams=2, max_tokens=5, names=["no such process"])
    assert set(found["answers"]) == {"same"}
    assert found["answers"]["same"] > 2
    assert found["kills"] == {}


def test_a_server_that_fails_undisturbed_is_not_soaked(served: tuple[str, ScriptedGateway]) -> None:
    served[1].error_after = EngineError("no")
    with pytest.raises(SystemExit, match="undisturbed"):
        soak(served[0], "base", minutes=0.01, streams=1, max_tokens=5, names=[])
