"""A gateway and its replicas in one process and on one event loop: everything is real but Ray between them.

The stand-ins below have the parts of Serve's handles that the product calls; a call is a task of this loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorDiedError
from starlette.types import ASGIApp

from deployments.answer_events import Finished, GenerationEvent, Started, TextDelta, Verdict
from deployments.channel.token_channel import ChannelDialer
from deployments.config import ChannelConfig, GatewayConfig, ModelConfig, SafetyConfig
from deployments.gateway.gateway import Gateway
from deployments.generation import ChatMessage, ChatPrompt, GenerationRequest, Prompt
from deployments.generation_calls import GenerationCall, GenerationResult
from deployments.replica.replica_server import ReplicaServer
from deployments.routing.reporter import ReplicaName
from engine.engine import Engine
from engine.request import Emission, RequestId, SamplingParams
from engine.scheduling.step_costs import StepCosts

SECRET = bytes(range(32))


class Response:
    """A `DeploymentResponse`: a call goes on when nobody awaits it any more, unless it is canceled."""

    def __init__(self, call: Awaitable[Any]) -> None:
        self.task = asyncio.ensure_future(call)

    def __await__(self) -> Any:
        return asyncio.shield(self.task).__await__()

    def cancel(self) -> None:
        self.task.cancel()


class StreamResponse:
    """A `DeploymentResponseGenerator`: a task of its own runs the replica's side, as it does in another process."""

    def __init__(self, batches: AsyncIterator[Emission | GenerationResult]) -> None:
        self._queue: asyncio.Queue[Emission | GenerationResult | BaseException | None] = asyncio.Queue()
        self.task = asyncio.ensure_future(self._run(batches))

    async def _run(self, batches: AsyncIterator[Emission | GenerationResult]) -> None:
        try:
            async for batch in batches:
                self._queue.put_nowait(batch)
            self._queue.put_nowait(None)
        except BaseException as error:
            self._queue.put_nowait(error)
            raise
        finally:
            await batches.aclose()  # type: ignore[attr-defined]

    def __aiter__(self) -> StreamResponse:
        return self

    async def __anext__(self) -> Emission | GenerationResult:
        item = await self._queue.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, asyncio.CancelledError):
            raise ActorDiedError
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self.task.cancel()


class Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def remote(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class HeldEngine:
    """An engine that can be told to stand still after some steps, until anything is cancelled or stopped.

    A tiny model answers whole before anyone can interrupt it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._released = threading.Event()
        self.hold_after_steps: int | None = None
        self.config = engine.config
        self.add, self.snapshot, self.compile_grammar = engine.add, engine.snapshot, engine.compile_grammar
        self.adapters, self.load = engine.adapters, engine.load

    def learn_costs(self, costs: StepCosts) -> None:
        """Let the engine's door believe that steps cost so much."""
        self._engine._scheduler.admission.costs = costs

    @property
    def is_alive(self) -> bool:
        return self._engine.is_alive

    @property
    def has_failed(self) -> bool:
        return self._engine.has_failed

    def run(self, on_emissions: Callable[[list[Emission]], None]) -> None:
        def held(emissions: list[Emission]) -> None:
            on_emissions(emissions)
            # Read once: another thread may release it meanwhile.
            if (count := self.hold_after_steps) is not None and self._engine.snapshot().num_steps >= count:
                self._released.wait()

        self._engine.run(held)

    def release(self) -> None:
        """Go on, and hold no more."""
        self.hold_after_steps = None
        self._released.set()

    def cancel(self, request_id: RequestId) -> None:
        self._engine.cancel(request_id)
        self._released.set()

    def stop(self) -> None:
        self._engine.stop()
        self._released.set()


class Replicas:
    """The handle of one base model's deployment, and its one replica, which can die and be replaced."""

    def __init__(self, make_engine: Callable[[], Engine], channel: ChannelConfig) -> None:
        self._make_engine = make_engine
        self._channel = channel
        self._open: set[Response | StreamResponse] = set()
        self.calls: list[GenerationCall] = []
        self.refusal: Exception | None = None
        self.delivers_twice = False
        self.generate = Method(self._generate)
        self.generate_stream = Method(self._generate_stream)
        self.start()

    def start(self) -> None:
        self.engine = HeldEngine(self._make_engine())
        name, dial = ReplicaName("chat", "only"), partial(ChannelDialer, self._channel)
        self.server = ReplicaServer(self.engine, name, dial)

    async def kill(self) -> None:
        """End the replica as SIGKILL does: its calls fail, its channel closes, nobody is told anything else."""
        dying = self._open
        self._open = set()
        server = self.server
        self.start()
        # A task that is cancelled before it has begun would tell nobody.
        await asyncio.sleep(0)
        for response in dying:
            response.cancel()
        await server.stop()

    def options(self, *, stream: bool) -> Replicas:
        return self

    def _generate(self, call: GenerationCall) -> Response:
        self.calls.append(call)
        return self._track(Response(self._guarded(call)))

    async def _guarded(self, call: GenerationCall) -> Any:
        if self.refusal is not None:
            raise self.refusal
        try:
            if self.delivers_twice:
                self.delivers_twice = False
                self._track(Response(self.server.generate(call)))
                while not self.server._generations:
                    await asyncio.sleep(0)
            return await self.server.generate(call)
        except asyncio.CancelledError:
            raise ActorDiedError from None

    def _generate_stream(self, call: GenerationCall) -> StreamResponse:
        self.calls.append(call)
        if self.refusal is not None:
            return self._track(StreamResponse(raising(self.refusal)))
        if self.delivers_twice:
            self.delivers_twice = False
            self._track(StreamResponse(self.server.generate_stream(call)))
        return self._track(StreamResponse(self.server.generate_stream(call)))

    def _track(self, response: Any) -> Any:
        self._open.add(response)
        response.task.add_done_callback(lambda _: self._open.discard(response))
        return response

    async def until_idle(self) -> None:
        """Wait until the engine works on nothing."""
        while (snapshot := self.engine.snapshot()).num_running + snapshot.num_waiting:
            await asyncio.sleep(0.01)


class Broadcasted:
    """A `DeploymentBroadcastResponse`: what each replica answers, raises or never comes to."""

    def __init__(self, *answers: Awaitable[Any]) -> None:
        self.answers = answers

    async def _fetch_replica_results_async(self) -> list[Any]:
        return [SimpleNamespace(get_async=lambda answer=answer: answer) for answer in self.answers]


async def at_once(answer: Any) -> Any:
    """Answer as a replica does, or raise what is to be raised."""
    if isinstance(answer, Exception):
        raise answer
    return answer


async def raising(error: Exception) -> AsyncIterator[Any]:
    """Raise it where the first item would be."""
    raise error
    yield


class Judge:
    """The handle of a classifier that finds `words` and can be slow or gone."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.texts: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.calls: list[Response] = []
        self.judge = Method(self._called)

    def broadcast(self, method: str) -> Broadcasted:
        """Answer that it is there; a gateway asks before it starts."""
        return Broadcasted(at_once(None))

    def _called(self, texts: Sequence[str], is_urgent: bool) -> Response:
        self.calls.append(Response(self._judge(texts)))
        return self.calls[-1]

    async def _judge(self, texts: Sequence[str]) -> list[Verdict]:
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.texts += texts
        return [
            Verdict(score_by_hazard={"hate": 1.0}, flagged=("hate",) if any(w in text for w in self.words) else ())
            for text in texts
        ]


async def open_gateway(
    model: ModelConfig, replicas: Replicas, channel: ChannelConfig, *, judge: Judge | None = None, **options: Any
) -> Gateway:
    safety = options.pop("safety", None) or (None if judge is None else SafetyConfig(model_path="unused"))
    config = GatewayConfig(models=(model,), channel=channel, safety=safety, **options)
    gateway = Gateway(config, _no_app, {model.name: replicas}, None, judge)  # type: ignore[dict-item, arg-type]
    await gateway.__serve_build_asgi_app__()
    return gateway


def _no_app(gateway: Gateway) -> ASGIApp:
    async def answer(*_: object) -> None:
        raise AssertionError("these tests call the gateway itself")

    return answer


def ask(text: str | Prompt = "Where am I?", *, max_tokens: int | None = 24, **changes: Any) -> GenerationRequest:
    params = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True} | changes.pop("params", {})
    prompt = ChatPrompt(messages=(ChatMessage(role="user", content=text),)) if isinstance(text, str) else text
    fields = {"request_id": "r", "model": "chat"} | changes
    return GenerationRequest(prompt=prompt, params=SamplingParams(**params), max_tokens=max_tokens, **fields)


async def events_of(gateway: Gateway, request: GenerationRequest) -> list[GenerationEvent]:
    return [event async for event in gateway.generate(request)]


def text_of(events: Sequence[GenerationEvent]) -> str:
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    return "".join(event.text for event in events if isinstance(event, TextDelta))
