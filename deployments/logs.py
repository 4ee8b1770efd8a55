"""Logging: this application's records go to Ray Serve's log, with one line per answer.

Serve's `logging_config` then controls destination, level and format for all of them; in JSON, each figure of an answer
is a field of its own.
"""

from __future__ import annotations

import builtins
import errno
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from adapters.errors import AdapterError
from deployments.generation import ChatPrompt, GenerationRequest, TextPrompt
from deployments.timeline import Timeline
from engine.errors import OverloadError, RequestError

_OURS = ("adapters", "app", "deployments", "engine", "kernels")
_TO_FILE = {"log_to_stderr": False}
"""Makes Serve write a record to the log file only: like its access log, there is one per answer."""

_POLLS = re.compile(r"CALL (?:catalogue|settle) OK ")
"""Serve's lines for calls that every gateway makes each second, even if the server is idle."""

_logger = logging.getLogger(__name__)
_dropped: Counter[str] = Counter()


def join_serve_log() -> None:
    """Route the records of this application's packages to the log of `ray.serve`. Every deployment calls it.

    A line that cannot be written is dropped and counted. Errors that refuse a request are not logged at all.
    """
    # By default `logging` reports the failure on stderr, which Serve sends to the same log, and so on until the request
    # that logged it fails.
    logging.Handler.handleError = _drop  # type: ignore[assignment, method-assign]
    # For output to a file, Serve's own replacement passes all objects on as one tuple; a traceback's lines go that way.
    builtins.print = _print
    serve_logger = logging.getLogger("ray.serve")
    serve_logger.addFilter(_is_no_refusal)
    serve_logger.addFilter(_is_no_poll)
    for package in _OURS:
        logging.getLogger(package).parent = serve_logger


def dropped_lines() -> Mapping[str, int]:
    """Return how many lines this process could not write, by reason: "disk_full", or the name of an exception.

    The last few thousand bytes of these lines may still be written once there is room.
    """
    return {"disk_full": 0} | _dropped


def _print(
    *objects: object, sep: str | None = None, end: str | None = None, file: Any = None, flush: bool = False
) -> None:
    """Do what the built-in `print` does; a replica's stdout still goes to the log."""
    stream = sys.stdout if file is None else file
    stream.write((" " if sep is None else sep).join(map(str, objects)) + ("\n" if end is None else end))
    if flush:
        stream.flush()


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """Tell whether Serve may log `record`. Serve logs every exception of a call as an error with its traceback.

    A client error, a full queue or an adapter at fault needs no investigation, and any client could fill the disk with
    such records. The access log still has a line for the failed call.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (RequestError, OverloadError, AdapterError))


def _is_no_poll(record: logging.LogRecord) -> bool:
    """Tell whether `record` is not a successful poll: five million of these a month would hide everything else."""
    return not (hasattr(record, "serve_access_log") and _POLLS.match(record.getMessage()))


def _drop(handler: logging.Handler, record: logging.LogRecord) -> None:
    error = sys.exception()
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    _dropped["disk_full" if is_full else type(error).__name__] += 1


def log_answer(timeline: Timeline) -> None:
    """Log one line for an answer that has ended, without any of its text."""
    if not _logger.isEnabledFor(logging.INFO):
        return
    fields = _fields(timeline)
    told = " ".join(f"{name}={value}" for name, value in fields.items())
    _logger.info("answer %s", told, extra=fields | _TO_FILE)


def log_prompt(request: GenerationRequest) -> None:
    """Log the text of a prompt; called only if `log_prompts` is set."""
    fields = {"answer_id": request.request_id, "prompt": _text(request)}
    _logger.info("prompt answer_id=%s %s", request.request_id, json.dumps(fields["prompt"]), extra=fields | _TO_FILE)


def _fields(timeline: Timeline) -> dict[str, Any]:
    times = {"ttft_s": timeline.first_text_s, "tpot_s": timeline.tpot_s, "duration_s": timeline.end_s}
    return {
        "answer_id": timeline.request_id,
        "tenant": timeline.tenant,
        "model": timeline.model,
        "adapter": timeline.adapter,
        "outcome": timeline.outcome,
        "prompt_tokens": timeline.num_prompt_tokens,
        "cached_tokens": timeline.num_cached_tokens,
        "output_tokens": timeline.num_tokens,
        "attempts": len(timeline.called_s_by_attempt),
    } | {name: None if seconds is None else round(seconds, 6) for name, seconds in times.items()}


def _text(request: GenerationRequest) -> Any:
    match request.prompt:
        case ChatPrompt(messages=messages):
            return [asdict(message) for message in messages]
        case TextPrompt(text=text):
            return text
        case tokens:
            return list(tokens.token_ids)
