"""The token channel: gateways listen, model replicas dial, and each step's tokens for a gateway travel as one frame.

There is one persistent TCP connection per (replica, gateway) pair. After the handshake
(`deployments.channel.token_handshake`) the replica sends frames (`deployments.channel.token_frames`) and the gateway
nothing. Both sides treat the end of a connection as the death of the peer, and the gateway a replica's silence too
(`deployments.channel.heartbeat`): the replica frees the gateway's requests, and the streams that the replica served end
with `ReplicaLostError`. A request whose output is long in coming is claimed by an emission without tokens, so that it
ends with its connection, too. Between frames, a replica sends load reports (`deployments.routing.report`) to the
gateways that watch it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from deployments.channel.heartbeat import BEAT, HEARTBEAT_S, SilenceError, end_unless_acknowledged, heard
from deployments.channel.outbox import Outbox
from deployments.channel.token_frames import (
    LENGTH,
    FrameError,
    coalesce,
    decode_body,
    decode_length,
    encode_frame,
    payload_bytes,
)
from deployments.channel.token_handshake import ChannelError, accept, introduce, reason_of
from deployments.config import ChannelConfig
from deployments.errors import ReplicaLostError
from deployments.generation_calls import TokenAddress
from deployments.routing.report import LoadReport, decode_report, is_report
from engine.errors import ConfigError, RequestError
from engine.request import Emission, RequestId

HANDSHAKE_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 30.0
"""A gateway that reads nothing for so long while output waits for it counts as gone, as does one whose machine is."""
MAX_HANDSHAKES = 64
MAX_PENDING_BYTES = 64 << 20
"""Bound on the output that waits for one gateway, over all its streams."""
MAX_FRAME_PAYLOAD_BYTES = 4 << 20

_logger = logging.getLogger(__name__)


class SlowReaderError(RequestError):
    """A client does not read: emissions of over `ChannelConfig.max_buffered_bytes` wait, not just a large one."""


class Subscription:
    """The gateway's end of one request's output, for a single reader."""

    def __init__(self, max_buffered_bytes: int) -> None:
        self._max_buffered_bytes = max_buffered_bytes
        self._unread: list[Emission] = []
        self._unread_bytes = 0
        self._error: Exception | None = None
        self._has_ended = False
        self._wake = asyncio.Event()

    async def get(self) -> Emission:
        """Wait for output and return everything that has come since the last call as one emission.

        Raises:
            ReplicaLostError: the connection that fed this stream has ended.
            SlowReaderError: too much was left unread.
            Exception: the error passed to `fail`.
        """
        while not self._unread:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        unread, self._unread, self._unread_bytes = self._unread, [], 0
        return unread[0] if len(unread) == 1 else coalesce(unread)[0]

    def put(self, emission: Emission) -> None:
        """Append one emission, or drop it if the stream has failed or finished, or if it only claims the request."""
        is_claim = not emission.token_ids and emission.finish_reason is None
        if self._error is not None or self._has_ended or is_claim:
            return
        self._unread_bytes += payload_bytes(emission)
        if self._unread and self._unread_bytes > self._max_buffered_bytes:
            self._unread = []
            self.fail(SlowReaderError(f"More than {self._max_buffered_bytes} bytes of the answer were left unread."))
            return
        self._unread.append(emission)
        self._has_ended = emission.finish_reason is not None
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after the output that has already come. Only the first error counts."""
        if self._error is None:
            self._error = error
            self._wake.set()


class ChannelListener:
    """A gateway's end: accepts replicas and hands each request's emissions to its subscription.

    Args:
        gateway_id: unique to this process.
        node_host: address to listen on and to advertise if the configuration names none.
        on_report: called with every report and the connection it came over.
        on_end: called when a connection ends; returns the requests sent to its replica, with or without output so far.
    """

    def __init__(
        self,
        config: ChannelConfig,
        gateway_id: str,
        *,
        node_host: str = "127.0.0.1",
        on_report: Callable[[LoadReport, object], None] = lambda report, connection: None,
        on_end: Callable[[object], Iterable[RequestId]] = lambda connection: (),
    ) -> None:
        self._on_report, self._on_end = on_report, on_end
        self._secret = config.secret
        self._host = config.host or node_host
        self._gateway_id = gateway_id
        self._max_buffered_bytes = config.max_buffered_bytes
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._handshakes = OrderedDict[asyncio.StreamWriter, None]()
        self._subscriptions: dict[RequestId, Subscription] = {}
        self._feeders: dict[RequestId, asyncio.StreamReader] = {}

    async def start(self) -> TokenAddress:
        """Listen on a free port and return the address that replicas dial.

        Raises:
            ConfigError: this node cannot listen on the address.
        """
        try:
            self._server = await asyncio.start_server(self._serve_connection, self._host, 0)
        except OSError as error:
            raise ConfigError(f"args.channel.host: cannot listen on '{self._host}': {error.strerror}") from error
        port = self._server.sockets[0].getsockname()[1]
        return TokenAddress(gateway_id=self._gateway_id, host=self._host, port=port)

    def subscribe(self, request_id: RequestId) -> Subscription:
        """Return the subscription to a request's output. Call it once per id, before sending the request."""
        assert request_id not in self._subscriptions, "request ids are unique"
        subscription = Subscription(self._max_buffered_bytes)
        self._subscriptions[request_id] = subscription
        return subscription

    def unsubscribe(self, request_id: RequestId) -> None:
        """Drop a request and ignore its further output. Idempotent."""
        self._subscriptions.pop(request_id, None)
        self._feeders.pop(request_id, None)

    def fail_all(self, error: Exception) -> None:
        """End every open stream with an error, after the output that has already come."""
        for subscription in self._subscriptions.values():
            subscription.fail(error)

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if await self._is_authenticated(reader, writer):
                await self._read_frames(reader)
        except (FrameError, SilenceError) as error:
            _logger.warning("token channel: closed a connection: %s", error)
        except (asyncio.IncompleteReadError, OSError):
            pass  # The connection has ended; its streams are failed below.
        except asyncio.CancelledError:
            pass  # Only `close` cancels, and asyncio's server would log the cancellation as an error.
        finally:
            self._fail_streams_of(reader, self._on_end(reader))
            writer.close()
            self._connections.discard(task)

    async def _is_authenticated(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if len(self._handshakes) >= MAX_HANDSHAKES:
            # A replica's takes one round trip: the oldest is that of a stranger who says nothing.
            self._handshakes.popitem(last=False)[0].close()
            _logger.warning("token channel: closed a connection: more than %d handshakes are open", MAX_HANDSHAKES)
        self._handshakes[writer] = None
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await accept(reader, writer, self._secret, self._gateway_id)
            return True
        except (ChannelError, TimeoutError) as error:
            _logger.warning("token channel: refused a connection: %s", str(error) or "its handshake took too long")
            return False
        finally:
            self._handshakes.pop(writer, None)

    async def _read_frames(self, reader: asyncio.StreamReader) -> None:
        while True:
            length = decode_length(await heard(reader, LENGTH.size))
            body = await heard(reader, length)
            if is_report(body):
                self._on_report(decode_report(body), reader)
                continue
            for emission in decode_body(body):
                subscription = self._subscriptions.get(emission.request_id)
                # A stream that switched connections would have a gap.
                if subscription is not None and self._feeders.setdefault(emission.request_id, reader) is reader:
                    subscription.put(emission)

    def _fail_streams_of(self, reader: asyncio.StreamReader, sent: Iterable[RequestId]) -> None:
        fed = [request_id for request_id, feeder in self._feeders.items() if feeder is reader]
        for request_id in {*fed, *sent} & self._subscriptions.keys():
            self._subscriptions[request_id].fail(ReplicaLostError("the replica's token channel has ended"))


class ChannelDialer:
    """A replica's end: one connection to each gateway, shared by all its requests. Bound to one event loop.

    Args:
        on_lost: called on the event loop, once, when a connection has ended by itself. It must forget the gateway's
            requests at once: output for it may already have been dropped.
    """

    def __init__(self, config: ChannelConfig, on_lost: Callable[[TokenAddress], None]) -> None:
        self._secret = config.secret
        self._spacing_s = config.stream_spacing_s
        self._on_lost = on_lost
        self._dials: dict[TokenAddress, asyncio.Task[None]] = {}
        self._links: dict[TokenAddress, _Link] = {}

    async def connect(self, address: TokenAddress) -> None:
        """Connect to a gateway unless there is a connection.

        Raises:
            ChannelError: the address does not answer, or another gateway does.
        """
        if address in self._links:
            return
        dial = self._dials.get(address)
        if dial is None:
            dial = self._dials[address] = asyncio.create_task(self._dial(address))
            dial.add_done_callback(lambda _: self._dials.pop(address, None))
        # Others may wait for the same dial: a caller that gives up must not cancel it.
        await asyncio.shield(dial)

    def send(self, address: TokenAddress, emissions: Sequence[Emission], begun: Collection[RequestId] = ()) -> None:
        """Send one step's emissions when due (`outbox`); `begun` holds the requests whose first tokens these are.

        No-op if there is no connection to the gateway (any more).
        """
        link = self._links.get(address)
        if link is not None and emissions:
            link.send(emissions, begun)

    def send_report(self, address: TokenAddress, report: bytes) -> None:
        """Send an encoded report. No-op if there is no connection to the gateway (any more)."""
        link = self._links.get(address)
        if link is not None:
            link.send_report(report)

    async def close(self) -> None:
        """Flush pending output and close all connections; `on_lost` is not called."""
        for dial in tuple(self._dials.values()):
            dial.cancel()
        links = tuple(self._links.values())
        self._links.clear()
        await asyncio.gather(*(link.finish() for link in links))

    async def _dial(self, address: TokenAddress) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                try:
                    await introduce(reader, writer, self._secret, address.gateway_id)
                except BaseException:
                    writer.close()
                    raise
        except (OSError, EOFError) as error:  # TimeoutError is an OSError.
            place = f"{address.host}:{address.port}"
            raise ChannelError(f"no token channel to the gateway at {place}: {reason_of(error)}") from error
        end_unless_acknowledged(writer, STALL_TIMEOUT_S)
        self._links[address] = _Link(reader, writer, Outbox(self._spacing_s), partial(self._lose, address))

    def _lose(self, address: TokenAddress, link: _Link) -> None:
        if self._links.get(address) is link:
            del self._links[address]
            self._on_lost(address)


class _Link:
    """One open connection to a gateway. Output that comes while the socket is busy is merged into one larger frame."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        outbox: Outbox,
        on_end: Callable[[_Link], None],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._outbox = outbox
        self._reports: list[bytes] = []
        self._num_report_bytes = 0
        self._clock = asyncio.get_running_loop().time
        self._wake = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._rung_s = 0.0
        self._is_finishing = False
        self._run = asyncio.create_task(self._run_until_end())
        self._run.add_done_callback(lambda _: on_end(self))

    def send(self, emissions: Sequence[Emission], begun: Collection[RequestId]) -> None:
        self._outbox.put(emissions, begun)
        self._wake_when_due()
        self._end_if_unread()

    def send_report(self, report: bytes) -> None:
        self._reports.append(report)
        self._num_report_bytes += len(report)
        self._wake.set()
        self._end_if_unread()

    def _wake_when_due(self) -> None:
        due_s = self._outbox.due_s()
        if due_s is not None and due_s <= self._clock():
            self._wake.set()
        elif due_s is not None and self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_at(due_s, self._ring, due_s)

    def _ring(self, due_s: float) -> None:
        # This may be early: uvloop fires timers due within half a millisecond at once. Waiting again would spin.
        self._alarm, self._rung_s = None, due_s
        self._wake.set()

    def _end_if_unread(self) -> None:
        num_bytes = self._outbox.num_bytes + self._num_report_bytes
        # A second cancellation would interrupt what the first one cleans up.
        if num_bytes > MAX_PENDING_BYTES and not self._run.cancelling():
            _logger.warning("token channel: a gateway does not read; %d bytes wait for it", num_bytes)
            self._run.cancel()

    async def finish(self) -> None:
        """Flush pending output and close."""
        self._is_finishing = True
        self._wake.set()
        await asyncio.wait([self._run])

    async def _run_until_end(self) -> None:
        writing = asyncio.create_task(self._write())
        watching = asyncio.create_task(self._reader.read(1))  # The gateway sends nothing: this returns at EOF.
        try:
            await asyncio.wait((writing, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, watching):
                task.cancel()
            fault, _ = await asyncio.gather(writing, watching, return_exceptions=True)
            if isinstance(fault, FrameError | TimeoutError):
                _logger.warning("token channel: dropped a gateway: %s", str(fault) or "it does not read")
            self._outbox.take_all()
            self._writer.close()

    async def _write(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._wake.wait()
            beats = () if self._wake.is_set() else (BEAT,)
            self._wake.clear()
            due = self._outbox.take_all() if self._is_finishing else self._outbox.take(max(self._clock(), self._rung_s))
            reports, self._reports, self._num_report_bytes = self._reports, [], 0
            for frame in (*_frames(due), *reports) or beats:
                self._writer.write(frame)
                async with asyncio.timeout(STALL_TIMEOUT_S):
                    await self._writer.drain()
            if self._is_finishing and self._outbox.due_s() is None:
                return
            self._wake_when_due()


def _frames(emissions: Sequence[Emission]) -> Iterator[bytes]:
    """Yield the frames for all emissions, normally one."""
    part: list[Emission] = []
    part_bytes = 0
    for emission in coalesce(emissions):
        if part and part_bytes + payload_bytes(emission) > MAX_FRAME_PAYLOAD_BYTES:
            yield encode_frame(part)
            part, part_bytes = [], 0
        part.append(emission)
        part_bytes += payload_bytes(emission)
    if part:
        yield encode_frame(part)
