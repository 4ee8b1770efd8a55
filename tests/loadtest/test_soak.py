"""What a soak would call a failure, and a short one against our own application."""

from __future__ import annotations

import itertools
import random
import ssl
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import certifi
import httpx
import psutil
import pytest

from app.http.api import create_app
from engine.errors import EngineError
from loadtest.soak import NUM_QUESTIONS, Heard, Tally, ask, judge, keep_asking, kill_one, main, question, soak
from tests.app.scripted_gateway import ScriptedGateway
from tests.app.serving import serving
from tests.loadtest.scripted_server import Script, answer, frame, scripted_server


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
    with serving(create_app(gateway)) as url:
        yield url, gateway


def test_a_well_server_answers_the_same_all_the_time(served: tuple[str, ScriptedGateway]) -> None:
    found = soak(served[0], "base", minutes=0.01, streams=2, max_tokens=5, names=["no such process"])
    assert set(found["answers"]) == {"same"}
    assert found["answers"]["same"] >= 2
    assert found["last_answers"] == {"same": 2}
    assert found["kills"] == {}


@pytest.mark.parametrize(("ends_s", "num_asked"), [(0.0, 1), (5.0, 6)])
def test_a_stream_asks_at_least_once_and_until_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch, ends_s: float, num_asked: int
) -> None:
    """On a machine that stood still as they began no stream had asked at all, and there were no results."""
    clock = itertools.count()
    monkeypatch.setattr("loadtest.soak.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr("loadtest.soak.ask", lambda *_: Heard("abc", True, None, 1.0))
    tally = Tally()
    with httpx.Client() as client:
        keep_asking(client, [{}, {}], ["abc", "abc"], 0, ends_s, tally)
    assert tally.counts == {"same": num_asked}


@pytest.mark.parametrize(("last", "status"), [({"ConnectError": 2}, 1), ({"ConnectError": 1, "same": 1}, 0)])
def test_a_server_that_does_not_come_back_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], last: dict[str, int], status: int
) -> None:
    """All answers after a kill were refused connections, none of them was wrong, and the status was 0."""
    found = {"answers": {"same": 5, "ConnectError": 9}, "last_answers": last}
    monkeypatch.setattr("loadtest.soak.soak", lambda *_, **_options: found)
    monkeypatch.setattr("sys.argv", ["soak", "--url", "http://127.0.0.1:1"])
    assert main() == status
    assert ("no stream got a complete answer" in capsys.readouterr().err) == bool(status)


def heard(script: Script, key: str | None = None) -> Heard:
    with scripted_server(script, key) as url, httpx.Client(base_url=url) as client:
        return ask(client, question("base", 1, 5))


@pytest.mark.parametrize("odd", [b"data: {\n\n", b"data: null\n\n", frame({"choices": [3]})])
def test_an_odd_event_is_a_failure_of_its_answer_and_not_of_the_soak(odd: bytes) -> None:
    """It ended the thread of its stream, and after all the minutes the soak, with a traceback instead of results."""
    assert heard(lambda body: [odd, *answer(body)]).error == "odd event"


def test_fields_that_are_null_or_absent_are_no_failure() -> None:
    found = heard(lambda body: [frame({"error": None, "choices": [{"delta": {"content": "a "}}]}), *answer(body)])
    assert (found.error, found.text, found.is_done) == (None, "a word word word ", True)


def test_the_api_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_API_KEY", "k")
    with scripted_server(key="k") as url:
        found = soak(url, "base", minutes=0.002, streams=1, max_tokens=5, names=[])
    assert set(found["answers"]) == {"same"}


def test_a_certificate_of_the_environment_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other tools listed the server's models, and the soak said that the server gives no whole answers."""
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    (tmp_path / "mine.pem").write_text(first + end)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "mine.pem"))
    verified: list[Any] = []

    class Client(httpx.Client):
        def __init__(self, **options: Any) -> None:
            verified.append(options.get("verify"))
            super().__init__(**options)

    monkeypatch.setattr(httpx, "Client", Client)
    with scripted_server() as url:
        soak(url, "base", minutes=0.002, streams=1, max_tokens=5, names=[])
    (context,) = verified
    assert isinstance(context, ssl.SSLContext)
    assert context.cert_store_stats()["x509"] == 1


def test_only_complete_answers_are_timed() -> None:
    """Refusals, which take no time, made the median of a soak with many of them small."""
    tally = Tally()
    for verdict, took_s in (("same", 4.0), ("status 503", 0.1), ("different", 6.0), ("cut in silence", 0.2)):
        tally.add(verdict, took_s)
    assert tally.times_s == [4.0, 6.0]
    assert tally.counts.total() == 4


def test_a_soak_without_a_complete_answer_has_results_too() -> None:
    """The quantiles of fewer than two times ended it with a traceback."""
    num_asked = itertools.count()

    def script(body: dict[str, object]) -> list[bytes] | tuple[int, bytes]:
        return answer(body) if next(num_asked) < NUM_QUESTIONS else (503, b"")

    with scripted_server(script) as url:
        found = soak(url, "base", minutes=0.002, streams=1, max_tokens=5, names=[])
    assert set(found["answers"]) == set(found["last_answers"]) == {"status 503"}
    assert found["p50_s"] is found["longest_s"] is None


def test_a_process_that_ends_before_it_is_killed_is_no_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        info: ClassVar = {"cmdline": ["Model-x"]}

        def send_signal(self, _signal: int) -> None:
            raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(psutil, "process_iter", lambda _attributes: [Ended()])
    assert kill_one(["Model-"], random.Random(0)) is None


def test_a_process_of_another_user_is_refused_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill failed with a traceback after the first minute, and no results came."""

    class OfAnother:
        info: ClassVar = {"cmdline": ["Model-x"]}
        pid = 17

        def send_signal(self, _signal: int) -> None:
            raise psutil.AccessDenied(17)

    monkeypatch.setattr(psutil, "process_iter", lambda _attributes: [OfAnother()])
    monkeypatch.setattr("sys.argv", ["soak", "--url", "http://127.0.0.1:1", "--kill", "Model-"])
    with pytest.raises(SystemExit, match="process 17 belongs to another user"):
        main()
    assert kill_one(["Model-"], random.Random(0)) is None


def test_a_server_that_fails_undisturbed_is_not_soaked(served: tuple[str, ScriptedGateway]) -> None:
    served[1].error_after = EngineError("no")
    with pytest.raises(SystemExit, match=r"undisturbed \(error event\)"):
        soak(served[0], "base", minutes=0.01, streams=1, max_tokens=5, names=[])
