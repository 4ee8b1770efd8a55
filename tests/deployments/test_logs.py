"""What is written of an answer: all its figures, and its text only where that is asked for."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from ray.serve._private.logging_utils import access_log_msg

from deployments import logs
from deployments.exposition import join
from deployments.generation import ChatMessage, ChatPrompt, GenerationRequest, Prompt, TextPrompt, TokenPrompt
from deployments.logs import join_serve_log, log_answer, log_prompt
from deployments.metrics import GatewayMetrics, gateway_families
from deployments.timeline import Timeline
from engine.request import SamplingParams
from tests.architecture.source_tree import ROOT

LOGS_TO_A_FULL_DISK = """
import logging, sys
from ray.serve._private.logging_utils import StreamToLogger
if sys.argv[1] == "ours":
    from deployments.logs import dropped_lines, join_serve_log

    join_serve_log()
logger = logging.getLogger("ray.serve")
logger.propagate = False
logger.addHandler(logging.FileHandler("/dev/full"))
sys.stderr = StreamToLogger(logger, logging.INFO, sys.stderr)
try:
    logger.warning("what nobody will read")
except RecursionError:
    print("the request fails")
else:
    print("the line is dropped", dropped_lines() if sys.argv[1] == "ours" else "")
"""

LOGS_AS_A_REPLICA = """
import builtins, logging, sys
from ray.serve._private import logging_utils
from adapters.errors import AdapterError
from engine.errors import OverloadError, RequestError

target, logger, stdout = sys.argv[1], logging.getLogger("ray.serve"), sys.stdout
handler = logging.FileHandler(target)
forms = {"text": logging_utils.ServeFormatter("a", "b"), "json": logging_utils.JSONFormatter()}
handler.setFormatter(forms[sys.argv[2]])
logger.addHandler(handler)
logger.propagate = False
logger.setLevel(logging.INFO)
builtins.print = logging_utils.redirected_print
sys.stdout = logging_utils.StreamToLogger(logger, logging.INFO, stdout)
if sys.argv[3] == "ours":
    from deployments.logs import join_serve_log

    join_serve_log()
print("told", "twice", flush=True)
refusals = RequestError("no such thing"), OverloadError("full", retry_after_s=1.0), AdapterError("a", "it is unloaded")
for error in (*refusals, ValueError("a bug")):
    try:
        raise error
    except Exception:
        logger.exception("Request failed.")
logger.info("CALL encode ERROR 1.0ms")
"""


def _timeline() -> Timeline:
    return Timeline(
        request_id="mine.0",
        model="chat",
        base="chat",
        tenant="acme",
        arrived_unix_s=1.0,
        num_prompt_tokens=9,
        num_cached_tokens=4,
        num_tokens=3,
        first_token_s=0.25,
        first_text_s=0.5,
        end_s=1.25,
        outcome="stop",
    )


def test_an_answer_is_one_line_whose_figures_are_fields_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_answer(_timeline())
    (record,) = caplog.records
    fields = record.__dict__
    assert (fields["answer_id"], fields["tenant"], fields["outcome"]) == ("mine.0", "acme", "stop")
    assert fields["attempts"] == 0
    assert (fields["prompt_tokens"], fields["cached_tokens"], fields["output_tokens"]) == (9, 4, 3)
    assert (fields["ttft_s"], fields["tpot_s"], fields["duration_s"]) == (0.5, 0.5, 1.25)
    assert "outcome=stop" in record.getMessage()
    assert "ttft_s=0.5" in record.getMessage()


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (ChatPrompt(messages=(ChatMessage(role="user", content="a\nb"),)), "a\\nb"),
        (TextPrompt(text="once"), "once"),
        (TokenPrompt(token_ids=(1, 2)), "[1, 2]"),
    ],
)
def test_a_prompt_is_one_line_however_it_was_asked(prompt: Prompt, text: str, caplog: pytest.LogCaptureFixture) -> None:
    request = GenerationRequest(request_id="mine.0", model="chat", prompt=prompt, params=SamplingParams(max_tokens=1))
    with caplog.at_level(logging.INFO):
        log_prompt(request)
    (record,) = caplog.records
    assert text in record.getMessage()
    assert "\n" not in record.getMessage()


def test_our_records_go_where_those_of_serve_go(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []
    handler, serve_logger = logging.Handler(), logging.getLogger("ray.serve")
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(serve_logger, "handlers", [handler])
    monkeypatch.setattr(serve_logger, "level", logging.INFO)
    monkeypatch.setattr(logging.Handler, "handleError", logging.Handler.handleError)
    for package in ("adapters", "app", "deployments", "engine", "kernels"):
        monkeypatch.setattr(logging.getLogger(package), "parent", logging.root)
    join_serve_log()
    logging.getLogger("engine.build").info("told")
    assert [record.getMessage() for record in records] == ["told"]
    assert logging.getLogger("engine").getEffectiveLevel() == logging.INFO


@pytest.mark.parametrize(
    ("method", "status", "is_told"),
    [("catalogue", "OK", False), ("settle", "OK", False), ("catalogue", "ERROR", True), ("register", "OK", True)],
)
def test_polls_that_go_well_are_not_told(method: str, status: str, is_told: bool) -> None:
    """A server that nobody asks wrote two lines a second for each gateway, and a refused adapter was one among them."""
    join_serve_log()
    message = access_log_msg(method="CALL", route=method, status=status, latency_ms=0.2)
    record = logging.makeLogRecord({"msg": message, "serve_access_log": True})
    assert bool(logging.getLogger("ray.serve").filter(record)) is is_told


@pytest.mark.parametrize(
    ("kind", "told"), [("serve's", "the request fails"), ("ours", "the line is dropped {'disk_full': 1}")]
)
def test_a_line_that_a_full_disk_does_not_take_fails_no_request_and_is_counted(kind: str, told: str) -> None:
    """As Serve's replicas log, stderr included; the first case is what has to be kept from happening."""
    command = [sys.executable, "-c", LOGS_TO_A_FULL_DISK, kind]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told in run.stdout


def _log_of_a_replica(folder: Path, form: str, whose: str) -> str:
    command = [sys.executable, "-c", LOGS_AS_A_REPLICA, str(folder / "log"), form, whose]
    subprocess.run(command, cwd=ROOT, check=True)
    return (folder / "log").read_text()


def test_refusals_are_no_errors_and_tracebacks_can_be_read(tmp_path: Path) -> None:
    told, _, failure = _log_of_a_replica(tmp_path, "text", "ours").partition("Request failed.")
    assert told.count(" -- told twice\n") == 1
    assert failure.startswith('\nTraceback (most recent call last):\n  File "<string>", line ')
    assert "\nValueError: a bug\nINFO " in failure
    assert failure.endswith(" -- CALL encode ERROR 1.0ms\n")
    assert "Request failed." not in failure


def test_a_traceback_can_be_read_in_json_too(tmp_path: Path) -> None:
    lines = _log_of_a_replica(tmp_path, "json", "ours").splitlines()
    [told] = [line["exc_text"] for line in map(json.loads, lines) if "exc_text" in line]
    assert told.startswith("Traceback (most recent call last):\n  File ")


def test_serve_by_itself_writes_neither(tmp_path: Path) -> None:
    """What has to be kept from happening; once it does not, `join_serve_log` can do less."""
    log = _log_of_a_replica(tmp_path, "text", "serve's")
    assert log.count("Request failed.") == 4
    assert "('Traceback (most recent call last):\\n',)" in log


def test_what_is_dropped_is_told_by_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            try:
                raise UnicodeError
            except UnicodeError:
                self.handleError(record)

    monkeypatch.setattr(logging.Handler, "handleError", logging.Handler.handleError)
    monkeypatch.setattr(logs, "_dropped", Counter())
    join_serve_log()
    Broken().handle(logging.makeLogRecord({}))
    told = join([GatewayMetrics().text("g", gateway_families({}))]).decode()
    assert 'antiphon:log_lines_dropped_total{gateway="g",reason="UnicodeError"} 1.0' in told
    assert 'antiphon:log_lines_dropped_total{gateway="g",reason="disk_full"} 0.0' in told
