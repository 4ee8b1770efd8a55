"""Report that a full or failing disk, or a process without free file descriptors, cannot store something now."""

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
        _logger.warning("cannot use the disk: %s", error)
        message = "The server cannot use its disk now; it may be full."
        raise UnavailableError(message, retry_after_s=RETRY_S) from error
