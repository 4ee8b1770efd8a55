"""Error handling for calls over Serve handles: the actor's own error arrives wrapped, or there is no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from deployments.errors import UnavailableError
from engine.errors import OverloadError, RequestError

UNREACHED = (RayError, RayServeException, TimeoutError)
"""Errors raised if an actor is gone or does not answer in time."""
UNAVAILABLE = (*UNREACHED, UnavailableError)
"""Errors raised if an actor cannot do the work now: it is unreached, or its disk is full."""


def connected_handle(deployment: str) -> DeploymentHandle:
    """Return a handle of a deployment of this application, ready for calls. Call it at startup.

    To get a handle, and to call it for the first time, takes Serve's controller and Ray's head. While they are gone,
    either would stop the caller's event loop until they are back.
    """
    handle: DeploymentHandle = serve.get_deployment_handle(deployment, serve.get_replica_context().app_name)
    # This connects the handle that it copies.
    return handle.options()


def unwrap(error: BaseException) -> BaseException:
    """Return the exception as the actor raised it, with its fields; return other exceptions unchanged.

    Ray raises an instance of a class derived from its own and the original class; `cause` holds the original.
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
    """Call a method of a singleton actor.

    Raises:
        UnavailableError: it is gone or does not answer in time; `absence` is the message.
        RequestError, OverloadError: as the actor raised them.
    """
    try:
        with canceled_as_lost():
            async with asyncio.timeout(timeout_s):
                return await getattr(actor, method).remote(*args)
    except (RequestError, OverloadError) as error:
        raise unwrap(error) from None
    except UNREACHED as error:
        raise UnavailableError(absence, retry_after_s=retry_after_s) from error


async def until_answered(response: DeploymentResponse) -> Any:
    """Await a call; cancelling the coroutine cancels the call.

    Raises:
        RayError, RayServeException: there is no answer; also if the call was canceled on its replica.
    """
    try:
        with canceled_as_lost():
            return await response
    except asyncio.CancelledError:
        response.cancel()
        raise


@contextmanager
def canceled_as_lost() -> Iterator[None]:
    """Raise RequestCancelledError if a call was canceled on its replica.

    Serve raises CancelledError for that, as if the task that waits for the answer were canceled.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RequestCancelledError from None
