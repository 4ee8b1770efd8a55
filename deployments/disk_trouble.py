"""Report that a full or failing disk cannot store something now."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from deployments.errors import UnavailableError

RETRY_S = 5.0

_logger = logging.getLogger(__name__)


@contextmanager
def unavailable_on(*troubles: type[Exception]) -> Iterator[None]:
    """Log the given errors of a disk and raise UnavailableError instead."""
    try:
        yield
    except troubles as error:
        _logger.warning("the disk cannot take it: %s", error)
        message = "The server's disk cannot take it now; it may be full."
        raise UnavailableError(message, retry_after_s=RETRY_S) from error
