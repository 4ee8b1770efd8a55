"""Gives back the error that an actor raised: across a Serve handle it arrives wrapped."""

from __future__ import annotations

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

UNREACHED = (RayError, RayServeException, TimeoutError)
"""What is raised where an actor is not there, or does not answer in time."""


def unwrap(error: BaseException) -> BaseException:
    """Return the exception as it was raised on the other side, with its fields; others as they are.

    Ray raises an instance of a class made of its own and the original one; the original hangs on it as `cause`.
    """
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error
