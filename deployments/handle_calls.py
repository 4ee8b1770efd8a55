"""How calls over Serve handles end: with the actor's own error, which arrives wrapped, or without any answer."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from deployments.errors import UnavailableError
from engine.errors import OverloadError, RequestError

UNREACHED = (RayError, RayServeException, TimeoutError)
"""What is raised where an actor is not there, or does not answer in time."""


def unwrap(error: BaseException) -> BaseException:
    """Return the exception as it was raised on the other side, with its fields; others as they are.

    Ray raises an instance of a class made of its own and the original one; the original hangs on it as `cause`.
    """
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


async def ask_actor(
    actor: DeploymentHandle,
    method: str,
    *args: object,
    absence: str,
    retry_after_s: float,
    timeout_s: float | None = None,
) -> Any:
    """Ask the one actor of its kind.

    Raises:
        UnavailableError: it is not there, or does not answer in time; `absence` says so.
        RequestError, OverloadError: as the actor raised them.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await getattr(actor, method).remote(*args)
    except (RequestError, OverloadError) as error:
        raise unwrap(error) from None
    except UNREACHED as error:
        raise UnavailableError(absence, retry_after_s=retry_after_s) from error


async def until_answered(response: DeploymentResponse) -> Any:
    """Await a call; who ends the coroutine ends the call."""
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
