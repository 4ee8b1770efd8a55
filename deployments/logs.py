"""What a server writes down: our log records in Ray Serve's log, and one line for each answer.

Serve's `logging_config` then decides on all of it: where it goes, from which level on, and whether as text or as JSON,
where every figure of an answer is a field of its own.
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

from deployments.generation import ChatPrompt, GenerationRequest, TextPrompt
from deployments.timeline import Timeline
from engine.errors import OverloadError, RequestError

_OURS = ("adapters", "app", "deployments", "engine", "kernels")
_TO_FILE = {"log_to_stderr": False}
"""Serve's mark of a record that goes to the log's file only: there is one for each answer, as of its access log."""

_POLLS = re.compile(r"CALL (?:catalogue|settle) OK ")
"""Serve's lines for calls that every gateway makes each second, whether or not anything is asked of the server."""

_logger = logging.getLogger(__name__)
_dropped: Counter[str] = Counter()


def join_serve_log() -> None:
    """Send the records of this process's own packages where those of `ray.serve` go; called by every deployment.

    A line that cannot be written is dropped, and counted. What is raised to refuse a request is no line at all.
    """
    # By itself `logging` tells of it on stderr, which Serve sends to the same log, and so on until the request that
    # logged it fails.
    logging.Handler.handleError = _drop  # type: ignore[assignment, method-assign]
    # Serve's own passes what it is to print on as one tuple, where that goes to a file: all of a traceback's lines do.
    builtins.print = _print
    serve_logger = logging.getLogger("ray.serve")
    serve_logger.addFilter(_is_no_refusal)
    serve_logger.addFilter(_is_no_poll)
    for package in _OURS:
        logging.getLogger(package).parent = serve_logger


def dropped_lines() -> Mapping[str, int]:
    """Return how many lines this process could not write, by reason: "disk_full", or the name of an exception.

    The last few thousand bytes of them may be written after all once there is room.
    """
    return {"disk_full": 0} | _dropped


def _print(
    *objects: object, sep: str | None = None, end: str | None = None, file: Any = None, flush: bool = False
) -> None:
    """Do as `print` does by itself; of a replica's process that goes to the log too, as all of its stdout."""
    stream = sys.stdout if file is None else file
    stream.write((" " if sep is None else sep).join(map(str, objects)) + ("\n" if end is None else end))
    if flush:
        stream.flush()


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """Tell whether Serve may log `record`: it has an error with its traceback for all that a call raises.

    A mistake of a client's, or a queue that is full, is nothing to look into, and any client could fill the disk with
    them. The call is told of in a line for calls, as one that failed.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (RequestError, OverloadError))


def _is_no_poll(record: logging.LogRecord) -> bool:
    """Tell whether `record` is more than a poll that went well: five million of them a month hide all else."""
    return not (hasattr(record, "serve_access_log") and _POLLS.match(record.getMessage()))


def _drop(handler: logging.Handler, record: logging.LogRecord) -> None:
    error = sys.exception()
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    _dropped["disk_full" if is_full else type(error).__name__] += 1


def log_answer(timeline: Timeline) -> None:
    """Write one line for an answer that has ended; nothing of its text."""
    if not _logger.isEnabledFor(logging.INFO):
        return
    fields = _fields(timeline)
    told = " ".join(f"{name}={value}" for name, value in fields.items())
    _logger.info("answer %s", told, extra=fields | _TO_FILE)


def log_prompt(request: GenerationRequest) -> None:
    """Write the text of a prompt, for who has asked for it by `log_prompts`."""
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
        "attempts": len(timeline.attempts),
    } | {name: None if seconds is None else round(seconds, 6) for name, seconds in times.items()}


def _text(request: GenerationRequest) -> Any:
    match request.prompt:
        case ChatPrompt(messages=messages):
            return [asdict(message) for message in messages]
        case TextPrompt(text=text):
            return text
        case tokens:
            return list(tokens.token_ids)
