"""Calls over Serve handles: to one actor, to all replicas of a deployment, and what their failures mean.

An actor's own error arrives wrapped, or there is no answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import grpc
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from deployments.errors import ReplicaLostError, UnavailableError
from engine.errors import EngineError, OverloadError, RequestError

P = ParamSpec("P")
T = TypeVar("T")

_logger = logging.getLogger(__name__)

CALL_ERRORS = (RayError, RayServeException, grpc.RpcError)
"""Errors raised for a call that Serve could not make. Of gRPC's it translates only those of a connection that is lost
before the replica has accepted the call.
"""
UNREACHED = (*CALL_ERRORS, TimeoutError)
"""Errors raised if an actor is gone or does not answer in time."""
UNAVAILABLE = (*UNREACHED, UnavailableError)
"""Errors raised if an actor cannot do the work now: it is unreached, or its disk is full."""
RETRY_AFTER_S = 5.0
"""About as long as it takes to notice that a replica has died and to start another one."""
TELL_TIMEOUT_S = 5.0


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


async def ask_all(
    handle: DeploymentHandle, method: str, *args: Any, timeout_s: float, needs_all: bool = False
) -> list[Any]:
    """Return the answers of those of a deployment's replicas that answer in time. Errors are left out.

    Raises:
        UnavailableError: `needs_all`, and not all answer in time.
    """
    calls: list[asyncio.Future[Any]] = []
    try:
        async with asyncio.timeout(timeout_s):
            # Serve's `results_async` has no answer at all until the last replica has answered.
            results = await handle.broadcast(method, *args)._fetch_replica_results_async()
            calls += [asyncio.ensure_future(result.get_async()) for result in results]
            await asyncio.gather(*calls, return_exceptions=True)
    except UNREACHED as error:
        if needs_all:
            message = f"Not every replica of {handle.deployment_name} has answered within {timeout_s:g} seconds."
            raise UnavailableError(message, retry_after_s=RETRY_AFTER_S) from error
    return [c.result() for c in calls if not c.cancelled() and c.exception() is None]


async def until_answered(response: DeploymentResponse) -> Any:
    """Await a call; cancelling the coroutine cancels the call.

    Raises:
        CALL_ERRORS: there is no answer; also if the call was canceled on its replica.
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


def serve_error(error: Exception) -> Exception:
    """Return the error that one of `CALL_ERRORS` means for a generation; a replica's own becomes an EngineError."""
    match error:
        case BackPressureError():
            wait_s = error.retry_after_s or RETRY_AFTER_S
            message = "Too many requests are waiting for this model."
            return OverloadError(message, retry_after_s=wait_s, reason="replicas_full")
        case DeploymentUnavailableError():
            return UnavailableError("No replica of this model is running now.", retry_after_s=RETRY_AFTER_S)
        case RayTaskError(cause=Exception() as cause) if not isinstance(cause, RayError | RayServeException):
            _logger.error("a replica raised an error", exc_info=error)
            return EngineError(f"The replica has failed ({type(cause).__name__}).")
        case RayActorError() | RayServeException():
            # This covers cancellations by the replica, which cancels its remaining calls when it shuts down.
            return ReplicaLostError(str(error) or type(error).__name__)
    return ReplicaLostError(f"{type(error).__name__}: {error}")


async def reached(part: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Await a call to a part of the server, in another actor or in this process; `part` names it in messages.

    Raises:
        UnavailableError: it cannot be reached.
        RequestError: as the part raised it.
        Exception: otherwise, as `serve_error`; in this process, too, an error of the part's own becomes an EngineError.
    """
    try:
        return await call(*args, **kwargs)
    except RequestError as error:
        raise unwrap(error) from None
    except CALL_ERRORS as error:
        found = serve_error(error)
        if isinstance(found, ReplicaLostError | UnavailableError):
            raise UnavailableError(f"The {part} cannot be reached.", retry_after_s=RETRY_AFTER_S) from error
        raise found from error
    except (OverloadError, EngineError):
        raise
    except Exception as error:
        _logger.exception("the %s has failed", part)
        raise EngineError(f"The {part} has failed ({type(error).__name__}).") from error
