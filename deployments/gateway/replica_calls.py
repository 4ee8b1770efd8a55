"""How a gateway calls the replicas of one base model: a Serve handle for control, and one of two transports for tokens.

"tcp": a unary call stays open for the life of the generation, and the tokens come over the token channel. "handle": the
tokens return over Serve's streaming handle. Either way Serve sees one ongoing request per generation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial

from ray.serve.handle import DeploymentHandle, DeploymentResponse

from deployments.channel.token_channel import ChannelListener, Subscription
from deployments.errors import ABORTED, ReplicaLostError, UnavailableError
from deployments.generation_calls import GenerationCall, GenerationResult, TokenAddress
from deployments.handle_calls import CALL_ERRORS, RETRY_AFTER_S, canceled_as_lost, serve_error, until_answered
from deployments.routing.board import Board
from engine.errors import EngineError
from engine.request import Emission, FinishReason

LAST_FRAME_TIMEOUT_S = 10.0
"""A replica sends its last frame before its call returns; a frame later than this is lost."""
CHECK_S, NUM_CHECKS = 10.0, 60
"""Ten minutes, as OpenAI's clients wait: a large model that was scaled to zero may take that long to start."""

_WITHOUT_ANSWER = (
    FinishReason.FAILED,
    FinishReason.UNAVAILABLE,
    FinishReason.UNFOLLOWABLE,
    FinishReason.EXPIRED,
    FinishReason.CANCELLED,
)


class ChannelSource:
    """Calls replicas by a handle and receives their tokens over the token channel.

    Args:
        board: the state that replicas are chosen by; updated when a call ends.
    """

    def __init__(
        self, handle: DeploymentHandle, listener: ChannelListener, address: TokenAddress, board: Board
    ) -> None:
        self._board = board
        self._handle = handle
        self._listener = listener
        self._address = address
        self._controls: set[asyncio.Future[GenerationResult]] = set()

    async def tokens(self, call: GenerationCall) -> AsyncGenerator[Emission, None]:
        """Yield the output of one attempt; see `deployments.gateway.resumption.TokenSource`."""
        subscription = self._listener.subscribe(call.request_id)
        patience = Patience(self._board, subscription.fail)
        try:
            response = self._handle.generate.remote(replace(call, reply_to=self._address))
            control = self._watched(response, subscription)
            is_whole = False
            try:
                while not is_whole:
                    emission = await subscription.get()
                    patience.end()
                    if emission.finish_reason in _WITHOUT_ANSWER:
                        raise await self._fault(control, emission)
                    is_whole = emission.finish_reason is not None
                    yield emission
            finally:
                # The call of a complete answer returns by itself, and Serve then counts it as a success.
                if not is_whole and not control.done():
                    response.cancel()
                    control.cancel()
        except ReplicaLostError:
            self._board.lose_request(call.request_id, time.monotonic())
            raise
        finally:
            patience.end()
            self._board.end(call.request_id)
            self._listener.unsubscribe(call.request_id)

    def _watched(self, response: DeploymentResponse, subscription: Subscription) -> asyncio.Future[GenerationResult]:
        """Return the result of a stream's call, which ends the stream if its frames do not."""
        control = asyncio.ensure_future(_result(response))
        # The event loop keeps only weak references to tasks, and this one may outlive the reader.
        self._controls.add(control)
        control.add_done_callback(self._controls.discard)
        control.add_done_callback(partial(_settle, subscription))
        return control

    async def _fault(self, control: asyncio.Future[GenerationResult], emission: Emission) -> Exception:
        """Return the error of a failed attempt: the frame has only its message, the call's result also its type."""
        try:
            async with asyncio.timeout(LAST_FRAME_TIMEOUT_S):
                result = await asyncio.shield(control)
        except TimeoutError:
            result = None
        if result is not None and result.fault is not None:
            return result.fault
        return EngineError(emission.error or ABORTED)


class Patience:
    """Bounds how long a call waits while Serve lists no replica of its model: Serve's router would wait for ever.

    The call fails if `NUM_CHECKS` checks in a row find no replica; `end` it once the call has brought anything.

    Args:
        fail: called with an UnavailableError.
    """

    def __init__(self, board: Board, fail: Callable[[Exception], None]) -> None:
        self._board = board
        self._fail = fail
        self._num_absent = 0
        self._wait()

    def end(self) -> None:
        """Wait no longer, as the call has been answered or given up. Idempotent."""
        self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)

    def _check(self) -> None:
        self._num_absent = self._num_absent + 1 if self._board.is_deserted() else 0
        if self._num_absent < NUM_CHECKS:
            self._wait()
        else:
            self._fail(UnavailableError("No replica of this model is running now.", retry_after_s=RETRY_AFTER_S))


class HandleSource:
    """Calls replicas by a streaming handle; needs no listening port."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle.options(stream=True)

    async def tokens(self, call: GenerationCall) -> AsyncGenerator[Emission, None]:
        """Yield the output of one attempt; see `deployments.gateway.resumption.TokenSource`."""
        response = self._handle.generate_stream.remote(call)
        is_whole = False
        try:
            with canceled_as_lost():
                async for item in response:
                    if isinstance(item, GenerationResult):
                        raise item.fault or EngineError(ABORTED)
                    is_whole = item.finish_reason is not None
                    yield item
        except CALL_ERRORS as error:
            raise serve_error(error) from error
        finally:
            if not is_whole:
                response.cancel()


async def _result(response: DeploymentResponse) -> GenerationResult:
    try:
        result: GenerationResult = await until_answered(response)
    except CALL_ERRORS as error:
        raise serve_error(error) from error
    return result


def _settle(subscription: Subscription, control: asyncio.Future[GenerationResult]) -> None:
    """Fail a stream whose call has returned, unless its frames have ended it or do so in time."""
    if control.cancelled():
        # By its reader, who has gone.
        return
    error = control.exception()
    if error is not None:
        subscription.fail(error if isinstance(error, Exception) else EngineError("The call was interrupted."))
        return
    fault = control.result().fault
    if fault is not None:
        subscription.fail(fault)
        return
    lost = ReplicaLostError("The last tokens of the answer have not arrived.")
    control.get_loop().call_later(LAST_FRAME_TIMEOUT_S, subscription.fail, lost)
