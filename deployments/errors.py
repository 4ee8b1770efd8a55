"""Errors of the layers between the routes and the engine; the engine's own are in `engine.errors`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from engine.errors import EngineError, OverloadError, RequestError

ABORTED = "The engine aborted the request."
"""Message for an answer that ends for no known reason."""
RETRY_S = 5.0
"""Seconds until what a disk could not do is tried again."""

_logger = logging.getLogger(__name__)


class UnavailableError(OverloadError):
    """A part that the answer needs cannot be reached now; `retry_after_s` (seconds) says when to retry."""

    def __reduce__(self) -> tuple[object, ...]:
        return partial(UnavailableError, self.message, retry_after_s=self.retry_after_s), ()


def unknown_model(name: str, *, field: str = "model") -> RequestError:
    """Return the error for a name that is not served, or not to this client; it does not reveal which."""
    return RequestError(f"The model '{name[:128]}' does not exist.", field=field, code="model_not_found")


class ReplicaLostError(EngineError):
    """The replica that served a generation is gone; another one can continue from the tokens so far."""


def error_body(message: str, *, kind: str, code: str | None = None) -> bytes:
    """Return the body of an answer that the server gives in place of a route, in OpenAI's error format."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


@contextmanager
def unavailable_on(*troubles: type[Exception]) -> Iterator[None]:
    """Log the given errors of a disk, which is full or failing, and raise UnavailableError instead."""
    try:
        yield
    except troubles as error:
        _logger.warning("cannot use the disk: %s", error)
        message = "The server cannot use its disk now; it may be full."
        raise UnavailableError(message, retry_after_s=RETRY_S) from error
