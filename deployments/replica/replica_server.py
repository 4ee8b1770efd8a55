"""One engine and one open call for each generation that it serves; `model_replica.py` is the actor around it.

A call stays open from admission to the last token, so Serve's count of ongoing requests matches the engine's work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adapters.identity import AdapterDigest
from deployments.accounts.orphans import OrphanRecorder
from deployments.channel.token_channel import ChannelDialer
from deployments.channel.token_frames import coalesce
from deployments.errors import ReplicaLostError, UnavailableError
from deployments.generation_calls import GenerationCall, GenerationResult, TokenAddress
from deployments.replica.engine_thread import EngineThread
from deployments.routing.report import FORMAT
from deployments.routing.reporter import ReplicaName, Reporter
from engine.errors import EngineError, FailedAloneError, GrammarError, OverloadError, RequestError
from engine.request import Emission, FinishReason, RequestId

if TYPE_CHECKING:
    from engine.engine import Engine

_logger = logging.getLogger(__name__)

CLAIM_AFTER_S = 0.25
"""A generation without output for so long is claimed: its gateway learns on which connection it depends."""
RELEASE_POLL_S = 0.01
RETRY_AFTER_S = 2.0
"""Retry-After for a request that needs adapter files from another node while the registry actor restarts."""
SETTLE_S = 2.0
"""For so long, gateways that missed an adapter's unloading may still send requests for it."""
_GATEWAY_GONE = ReplicaLostError("The gateway has closed its channel.")
_DELIVERED_TWICE = ReplicaLostError("The call was delivered twice.")
_GIVEN_UP = (_GATEWAY_GONE, _DELIVERED_TWICE)
"""Faults of generations that the engine still computes."""


@dataclass(eq=False, slots=True)
class _Generation:
    """One open call, and how it ended."""

    call: GenerationCall
    ended: asyncio.Future[GenerationResult]
    opened_s: float = field(default_factory=time.monotonic)
    unread: asyncio.Queue[Emission | GenerationResult] = field(default_factory=asyncio.Queue)
    num_tokens: int = 0


class ReplicaServer:
    """Serves the generations of one engine; a plain class that the actor inherits from.

    Bound to the event loop that it is created on.

    Args:
        name: the name by which gateways know this replica.
        dial: creates the dialer for token channels, given a callback for gateways that are gone.
        tokenizer_digest: of the model's tokenizer; calls with ids of another are refused.
        orphans: receives the usage that a gateway may die before recording; None if usage is not recorded.
    """

    def __init__(
        self,
        engine: Engine,
        name: ReplicaName,
        dial: Callable[[Callable[[TokenAddress], None]], ChannelDialer],
        *,
        tokenizer_digest: str = "",
        orphans: OrphanRecorder | None = None,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine = engine
        self._orphans = orphans
        self._tokenizer_digest = tokenizer_digest
        self._dialer = dial(self.forget_gateway)
        self._reporter = Reporter(name, engine.load, engine.adapters, self._dialer.send_report)
        self._generations: dict[RequestId, _Generation] = {}
        self._thread = EngineThread(engine, asyncio.get_running_loop(), self._on_step, on_failure)

    async def generate(self, call: GenerationCall) -> GenerationResult:
        """Serve one call whose output goes to `call.reply_to`; cancelling it frees the request in the engine."""
        assert call.reply_to is not None
        fault = await self._grammar_fault(call)
        if fault is not None:
            return GenerationResult(fault=fault)
        try:
            await self._dialer.connect(call.reply_to)
        except OSError as error:
            _logger.warning("request %s: its gateway cannot be reached: %s", call.request_id, error)
            lost = ReplicaLostError("The replica could not open its channel to the gateway.")
            return GenerationResult(fault=lost)
        claim = asyncio.get_running_loop().call_later(CLAIM_AFTER_S, self._claim, call.request_id, call.reply_to)
        generation = self._open(call)
        try:
            # Unshielded, cancelling this coroutine would cancel the future, and the request would count as ended.
            return await asyncio.shield(generation.ended)
        finally:
            claim.cancel()
            self._close(call.request_id, generation)

    async def generate_stream(self, call: GenerationCall) -> AsyncIterator[Emission | GenerationResult]:
        """Yield the output of one call, coalescing what has come since the last read; a failure's result is last."""
        fault = await self._grammar_fault(call)
        if fault is not None:
            yield GenerationResult(fault=fault)
            return
        generation = self._open(call)
        try:
            is_last = False
            while not is_last:
                waiting = [await generation.unread.get()]
                while not generation.unread.empty():
                    waiting.append(generation.unread.get_nowait())
                for emission in coalesce([item for item in waiting if isinstance(item, Emission)]):
                    is_last = emission.finish_reason is not None
                    yield emission
                if isinstance(waiting[-1], GenerationResult):
                    yield waiting[-1]
                    return
        finally:
            self._close(call.request_id, generation)

    async def watch(self, address: TokenAddress, report_format: str = "") -> None:
        """Send load reports to a gateway from now on, if it reads what this release reports."""
        if report_format != FORMAT:
            return
        try:
            await self._dialer.connect(address)
        except OSError as error:
            _logger.warning("a gateway that wants reports cannot be reached: %s", error)
            return
        self._reporter.watch(address)

    def forget_gateway(self, address: TokenAddress) -> None:
        """Free all requests of a gateway that is gone: its calls may never be canceled."""
        self._reporter.forget(address)
        left = [g for g in self._generations.values() if g.call.reply_to == address and not g.ended.done()]
        if self._orphans is not None:
            self._orphans.gateway_lost(address, [(generation.call, generation.num_tokens) for generation in left])
        for generation in left:
            generation.ended.set_result(GenerationResult(fault=_GATEWAY_GONE))

    async def trouble(self) -> str | None:
        """Return one sentence on why this replica is unhealthy, or None. Gateways call it."""
        return self._thread.trouble()

    def check_health(self) -> None:
        """Check for Serve that the engine makes progress.

        Raises:
            EngineError: it does not; Serve then replaces the replica.
        """
        trouble = self._thread.trouble()
        if trouble is not None:
            raise EngineError(trouble)

    def adapters_in_use(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the names of the adapters of open generations: of those on the device, and of those yet to come."""
        asked = {g.call.adapter.name: g.call.adapter.digest for g in self._generations.values() if g.call.adapter}
        places = self._engine.adapters.places()
        ready = frozenset(name for name, digest in asked.items() if places.get(digest) == "device")
        return ready, frozenset(asked) - ready

    async def retry_adapter(self, digest: AdapterDigest) -> None:
        """Forget that an adapter could not be loaded: its files have been repaired."""
        self._engine.adapters.forget_failure(digest)

    async def release_adapter(self, digest: AdapterDigest) -> int:
        """Wait for the generations that use an adapter, forget it, and return the number of bytes freed.

        Generations that begin more than `SETTLE_S` after this call mean that the adapter was loaded again: then it is
        kept, and 0 returned.
        """
        last_s = time.monotonic() + SETTLE_S
        while True:
            using = [
                g
                for g in self._generations.values()
                if g.call.adapter is not None and g.call.adapter.digest == digest and not g.ended.done()
            ]
            leaving = [g.ended for g in using if g.opened_s <= last_s]
            if leaving:
                await asyncio.wait(leaving)
                continue
            if using:
                return 0
            freed = self._engine.adapters.release(digest)
            if freed is not None:
                return freed
            # Its last request has been answered; the engine unpins it in its next step.
            await asyncio.sleep(RELEASE_POLL_S)

    async def stop(self) -> None:
        """Stop the engine, which ends every open call."""
        await self._thread.stop()
        self._reporter.close()
        await self._dialer.close()

    def _claim(self, request_id: RequestId, address: TokenAddress) -> None:
        generation = self._generations.get(request_id)
        if generation is not None and not generation.num_tokens and not generation.ended.done():
            self._dialer.send(address, [Emission(request_id=request_id)])

    async def _grammar_fault(self, call: GenerationCall) -> Exception | None:
        """Compile a call's grammar off the event loop and off the engine's thread; return the fault if it fails."""
        if call.params.grammar is None:
            return None
        try:
            await asyncio.to_thread(self._engine.compile_grammar, call.params.grammar)
        except RequestError as error:
            return _fault_of(error)
        return None

    def _open(self, call: GenerationCall) -> _Generation:
        generation = _Generation(call, asyncio.get_running_loop().create_future())
        if (first := self._generations.get(call.request_id)) is not None:
            # Serve repeats a call if it loses the connection before it knows that the call has arrived. Nobody waits
            # for the first one any more, and the gateway goes on under another id.
            for one in (first, generation):
                if not one.ended.done():
                    self._end(one, GenerationResult(fault=_DELIVERED_TWICE))
            return generation
        self._generations[call.request_id] = generation
        try:
            if call.tokenizer_digest != self._tokenizer_digest:
                # While a configuration is rolled out in which the model has another tokenizer.
                raise UnavailableError("The model is being replaced.", retry_after_s=RETRY_AFTER_S)
            if call.adapter is not None:
                self._engine.adapters.learn(call.adapter)
            self._engine.add(call.to_request(time.monotonic()))
            if call.reply_to is not None:
                self._reporter.note(call.reply_to, call.request_id)
        except (RequestError, OverloadError, EngineError) as error:
            self._end(generation, GenerationResult(fault=_fault_of(error)))
        except BaseException:
            # Otherwise whoever waits for the generations of its adapter would wait forever.
            del self._generations[call.request_id]
            raise
        return generation

    def _close(self, request_id: RequestId, generation: _Generation) -> None:
        if self._generations.get(request_id) is not generation:
            return
        del self._generations[request_id]
        if self._orphans is not None and not generation.ended.done():
            # The caller gave up: a live gateway records the usage itself, and a dead one is noticed by its channel.
            self._orphans.finished(generation.call, generation.num_tokens)
        if not generation.ended.done() or generation.ended.result().fault in _GIVEN_UP:
            self._engine.cancel(request_id)
        # Otherwise whoever still waits for it would wait forever.
        generation.ended.cancel()

    def _on_step(self, emissions: Sequence[Emission]) -> None:
        by_gateway: dict[TokenAddress, list[Emission]] = {}
        begun: set[RequestId] = set()
        ended: list[tuple[_Generation, GenerationResult]] = []
        for emission in emissions:
            generation = self._generations.get(emission.request_id)
            if generation is None or generation.ended.done():
                continue
            if not generation.num_tokens:
                begun.add(emission.request_id)
            generation.num_tokens += len(emission.token_ids)
            fault = self._fault(emission)
            if (address := generation.call.reply_to) is not None:
                by_gateway.setdefault(address, []).append(emission)
            elif fault is None:
                generation.unread.put_nowait(emission)
            if emission.finish_reason is not None:
                ended.append((generation, GenerationResult(fault=fault)))
        for address, frame in by_gateway.items():
            self._dialer.send(address, frame, begun)
        for generation, result in ended:
            self._end(generation, result)

    def _end(self, generation: _Generation, result: GenerationResult) -> None:
        if result.fault is not None:
            generation.unread.put_nowait(result)
        elif self._orphans is not None:
            self._orphans.finished(generation.call, generation.num_tokens)
        generation.ended.set_result(result)

    def _fault(self, emission: Emission) -> Exception | None:
        if emission.finish_reason is FinishReason.EXPIRED:
            return TimeoutError(emission.error or "The deadline has passed.")
        if emission.finish_reason is FinishReason.UNFOLLOWABLE:
            return GrammarError(emission.error or "It took too much.")
        if emission.finish_reason is FinishReason.UNAVAILABLE:
            return UnavailableError(emission.error or "It cannot be had now.", retry_after_s=RETRY_AFTER_S)
        if emission.finish_reason is FinishReason.FAILED:
            kind = FailedAloneError if self._engine.is_alive else ReplicaLostError
            return kind(emission.error or "The generation has failed.")
        return None


def _fault_of(error: RequestError | OverloadError | EngineError) -> Exception:
    """Return the fault to send to a gateway; an `EngineError` raised by a call means that the engine has ended."""
    # A gateway has no use for the traceback, which would also keep the frames' locals alive here.
    return ReplicaLostError(str(error)) if isinstance(error, EngineError) else error.with_traceback(None)
