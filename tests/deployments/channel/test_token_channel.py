"""Over loopback sockets; every wait is for a state, under the time limit of the whole test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from deployments.channel import heartbeat, outbox, token_channel
from deployments.channel.token_channel import ChannelDialer, ChannelListener, SlowReaderError, Subscription
from deployments.channel.token_frames import encode_frame, payload_bytes
from deployments.channel.token_handshake import GREETING, MAC_BYTES, NONCE_BYTES, ChannelError, introduce
from deployments.config import ChannelConfig
from deployments.errors import ReplicaLostError
from deployments.generation_calls import TokenAddress
from engine.errors import ConfigError, RequestError
from engine.request import Emission, FinishReason, RequestId

CONFIG = ChannelConfig(secret=b"0123456789abcdef")


@pytest.fixture(autouse=True)
def no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat would send, a second late, what has woken nobody."""
    monkeypatch.setattr(token_channel, "HEARTBEAT_S", 1000.0)


def tokens(request_id: str, *token_ids: int, finish: FinishReason | None = None) -> Emission:
    return Emission(request_id=RequestId(request_id), token_ids=token_ids, finish_reason=finish)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for a state that other tasks bring about."""
    while not is_so():
        await asyncio.sleep(0.001)


def count_frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of emissions of each frame."""
    frames: list[int] = []

    def counted(emissions: list[Emission]) -> bytes:
        frames.append(len(emissions))
        return encode_frame(emissions)

    monkeypatch.setattr(token_channel, "encode_frame", counted)
    return frames


async def all_of(subscription: Subscription) -> list[int]:
    """Read a stream to its finish."""
    token_ids: list[int] = []
    while True:
        emission = await subscription.get()
        token_ids.extend(emission.token_ids)
        if emission.finish_reason is not None:
            return token_ids


@dataclass
class Ends:
    listener: ChannelListener
    address: TokenAddress
    dialer: ChannelDialer
    lost: list[TokenAddress] = field(default_factory=list)


@asynccontextmanager
async def both_ends(config: ChannelConfig = CONFIG) -> AsyncIterator[Ends]:
    listener = ChannelListener(config, "gateway-1")
    address = await listener.start()
    lost: list[TokenAddress] = []
    dialer = ChannelDialer(config, lost.append)
    try:
        yield Ends(listener, address, dialer, lost)
    finally:
        await dialer.close()
        await listener.close()


async def test_every_stream_gets_its_own_tokens_in_order_over_one_connection() -> None:
    async with both_ends() as ends:
        names = [f"request-{i}" for i in range(100)]
        streams = {name: ends.listener.subscribe(RequestId(name)) for name in names}
        await asyncio.gather(*(ends.dialer.connect(ends.address) for _ in names))
        for step in range(20):
            finish = FinishReason.LENGTH if step == 19 else None
            ends.dialer.send(ends.address, [tokens(name, i, step, finish=finish) for i, name in enumerate(names)])
        got = await asyncio.gather(*map(all_of, streams.values()))
        await ends.dialer.connect(ends.address)
        assert got == [[part for step in range(20) for part in (i, step)] for i in range(100)]
        assert len(ends.listener._connections) == 1


async def test_an_address_that_is_not_this_node_s_is_named() -> None:
    listener = ChannelListener(replace(CONFIG, host="256.1.1.1"), "g1")
    with pytest.raises(ConfigError, match=r"^args\.channel\.host: cannot listen on '256\.1\.1\.1': "):
        await listener.start()


async def test_two_gateways_get_only_what_is_theirs() -> None:
    async with both_ends() as ends:
        other = ChannelListener(CONFIG, "gateway-2")
        other_address = await other.start()
        first, second = ends.listener.subscribe(RequestId("a")), other.subscribe(RequestId("b"))
        await ends.dialer.connect(ends.address)
        await ends.dialer.connect(other_address)
        ends.dialer.send(ends.address, [tokens("a", 1, finish=FinishReason.STOP)])
        ends.dialer.send(other_address, [tokens("b", 2, finish=FinishReason.STOP)])
        assert [await all_of(first), await all_of(second)] == [[1], [2]]
        await other.close()


async def test_tokens_of_an_unknown_or_dropped_request_are_ignored() -> None:
    async with both_ends() as ends:
        ends.listener.subscribe(RequestId("dropped"))
        kept = ends.listener.subscribe(RequestId("kept"))
        ends.listener.unsubscribe(RequestId("dropped"))
        ends.listener.unsubscribe(RequestId("dropped"))
        await ends.dialer.connect(ends.address)
        ends.dialer.send(ends.address, [tokens("unknown", 1), tokens("dropped", 2), tokens("kept", 3)])
        assert (await kept.get()).token_ids == (3,)


async def test_an_id_whose_request_was_dropped_is_free_for_another_replica_s() -> None:
    async with both_ends() as ends:
        second = ChannelDialer(CONFIG, lambda _: None)
        for dialer, token_id in ((ends.dialer, 1), (second, 2)):
            stream = ends.listener.subscribe(RequestId("r"))
            await dialer.connect(ends.address)
            dialer.send(ends.address, [tokens("r", token_id)])
            assert (await stream.get()).token_ids == (token_id,)
            ends.listener.unsubscribe(RequestId("r"))
        await second.close()


async def test_what_comes_after_a_stream_s_end_is_dropped_and_its_first_error_stays() -> None:
    finished, failed = Subscription(4000), Subscription(4000)
    finished.put(tokens("r", 1, finish=FinishReason.STOP))
    finished.put(tokens("r", 2))
    finished.fail(ReplicaLostError("after its end"))
    assert await finished.get() == tokens("r", 1, finish=FinishReason.STOP)
    failed.put(tokens("r", 1))
    failed.fail(ReplicaLostError("the first"))
    failed.put(tokens("r", 2))
    failed.fail(ReplicaLostError("the second"))
    assert (await failed.get()).token_ids == (1,)
    with pytest.raises(ReplicaLostError, match="the first"):
        await failed.get()


async def test_a_stream_holds_what_it_may_and_once_that_is_exceeded_nothing() -> None:
    part = tokens("r", *range(10))
    stream = Subscription(2 * payload_bytes(part))
    for num_parts in (2, 2, 3):
        for _ in range(num_parts):
            stream.put(part)
        if num_parts == 2:
            assert (await stream.get()).token_ids == 2 * part.token_ids
    with pytest.raises(SlowReaderError):
        await stream.get()


async def test_one_emission_of_any_size_is_no_sign_of_a_slow_reader() -> None:
    """A vector, or a long prompt's log-probabilities, would have ended a stream that somebody reads."""
    stream, whole = Subscription(1024), tokens("r", *range(1000))
    stream.put(whole)
    assert await stream.get() == whole


async def test_a_reader_that_comes_late_gets_everything_as_one_emission() -> None:
    async with both_ends() as ends:
        stream = ends.listener.subscribe(RequestId("r"))
        await ends.dialer.connect(ends.address)
        for step in range(50):
            ends.dialer.send(ends.address, [tokens("r", step)])
        ends.dialer.send(ends.address, [tokens("r", finish=FinishReason.STOP)])
        await until(lambda: stream._has_ended)
        assert await stream.get() == tokens("r", *range(50), finish=FinishReason.STOP)


async def test_steps_that_a_busy_socket_cannot_take_become_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = count_frames(monkeypatch)
    async with both_ends() as ends:
        stream = ends.listener.subscribe(RequestId("r"))
        await ends.dialer.connect(ends.address)
        # The loop gets no turn in between, as under a socket that is busy.
        for step in range(500):
            ends.dialer.send(ends.address, [tokens("r", step)])
        ends.dialer.send(ends.address, [tokens("r", finish=FinishReason.STOP)])
        assert await all_of(stream) == list(range(500))
    assert frames == [1]


async def test_output_over_the_bound_of_a_frame_goes_in_as_few_as_it_fits_in(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = count_frames(monkeypatch)
    async with both_ends() as ends:
        long = tokens("r0", *range(100), finish=FinishReason.STOP)
        short = [tokens(f"r{i}", i, finish=FinishReason.STOP) for i in range(1, 6)]
        monkeypatch.setattr(token_channel, "MAX_FRAME_PAYLOAD_BYTES", 2 * payload_bytes(short[0]))
        streams = [ends.listener.subscribe(emission.request_id) for emission in (long, *short)]
        await ends.dialer.connect(ends.address)
        ends.dialer.send(ends.address, [long, *short])
        assert [await all_of(stream) for stream in streams] == [list(range(100)), *([i] for i in range(1, 6))]
    assert frames == [1, 2, 2, 1]


async def test_a_stream_that_nobody_reads_ends_with_an_error_and_leaves_the_others() -> None:
    async with both_ends(replace(CONFIG, max_buffered_bytes=4000)) as ends:
        slow, quick = ends.listener.subscribe(RequestId("slow")), ends.listener.subscribe(RequestId("quick"))
        await ends.dialer.connect(ends.address)
        ends.dialer.send(ends.address, [tokens("slow", 1), tokens("quick", 0)])
        assert (await quick.get()).token_ids == (0,)
        ends.dialer.send(ends.address, [tokens("slow", *range(2000)), tokens("quick", 1)])
        assert (await quick.get()).token_ids == (1,)
        with pytest.raises(SlowReaderError, match="4000 bytes") as told:
            await slow.get()
        assert isinstance(told.value, RequestError), "it is told, and counted, as the client's fault"
        ends.dialer.send(ends.address, [tokens("slow", 1), tokens("quick", 2)])
        assert (await quick.get()).token_ids == (2,)
        with pytest.raises(SlowReaderError):
            await slow.get()


async def test_a_dialer_with_another_secret_is_refused() -> None:
    async with both_ends() as ends:
        stranger = ChannelDialer(ChannelConfig(secret=b"fedcba9876543210"), ends.lost.append)
        with pytest.raises(ChannelError, match="it closed the connection"):
            await stranger.connect(ends.address)
        stranger.send(ends.address, [tokens("r", 1)])
        await until(lambda: len(ends.listener._connections) == 0)
        assert ends.lost == []


async def test_a_gateway_that_is_not_the_one_that_was_meant_is_refused() -> None:
    async with both_ends() as ends:
        with pytest.raises(ChannelError):
            await ends.dialer.connect(replace(ends.address, gateway_id="gateway-before-its-restart"))


async def test_a_listener_that_only_repeats_what_it_hears_is_refused_and_left() -> None:
    left = asyncio.Event()

    async def parrot(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + bytes(NONCE_BYTES))
        answer = await reader.readexactly(NONCE_BYTES + MAC_BYTES)
        writer.write(answer[NONCE_BYTES:])
        if await reader.read() == b"":
            left.set()

    server = await asyncio.start_server(parrot, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    dialer = ChannelDialer(CONFIG, lambda _: None)
    with pytest.raises(ChannelError, match="does not know the secret"):
        await dialer.connect(TokenAddress(gateway_id="gateway-1", host="127.0.0.1", port=port))
    await left.wait()
    server.close()


async def test_a_server_of_another_kind_is_refused() -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 100)

    server = await asyncio.start_server(other, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    dialer = ChannelDialer(CONFIG, lambda _: None)
    with pytest.raises(ChannelError, match=f"127.0.0.1:{port}"):
        await dialer.connect(TokenAddress(gateway_id="gateway-1", host="127.0.0.1", port=port))
    server.close()


async def test_nobody_listening_is_an_error_and_a_later_dial_succeeds() -> None:
    async with both_ends() as ends:
        nobody = replace(ends.address, port=1)
        for _ in range(2):
            with pytest.raises(ChannelError, match="Connect call failed"):
                await ends.dialer.connect(nobody)
        await ends.dialer.connect(ends.address)


async def test_silence_in_the_handshake_ends_it_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_channel, "HANDSHAKE_TIMEOUT_S", 0.01)
    listener = ChannelListener(CONFIG, "gateway-1")
    address = await listener.start()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    assert (await reader.read()).startswith(GREETING)  # And then the end.
    writer.close()
    await listener.close()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    dialer = ChannelDialer(CONFIG, lambda _: None)
    with pytest.raises(ChannelError, match="it does not answer"):
        await dialer.connect(replace(address, port=server.sockets[0].getsockname()[1]))
    server.close()


async def test_the_oldest_handshake_beyond_the_bound_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of a stranger who says nothing kept every new replica off a gateway."""
    monkeypatch.setattr(token_channel, "MAX_HANDSHAKES", 2)
    async with both_ends() as ends:
        strangers = [await asyncio.open_connection(ends.address.host, ends.address.port) for _ in range(3)]
        for reader, _ in strangers:
            await reader.readexactly(len(GREETING))
        await ends.dialer.connect(ends.address)
        for reader, _ in strangers[:2]:
            await reader.read()  # to its end
        await until(lambda: len(ends.listener._connections) == 2)
        assert len(ends.listener._handshakes) == 1
        for _, writer in strangers:
            writer.close()
        await until(lambda: len(ends.listener._connections) == 1)
        assert not ends.listener._handshakes


@pytest.mark.parametrize("garbage", [b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n" * 8, encode_frame([])[:6]])
async def test_garbage_ends_its_own_connection_only(garbage: bytes) -> None:
    async with both_ends() as ends:
        stream = ends.listener.subscribe(RequestId("r"))
        await ends.dialer.connect(ends.address)
        reader, writer = await asyncio.open_connection(ends.address.host, ends.address.port)
        await introduce(reader, writer, CONFIG.secret, ends.address.gateway_id)
        writer.write(garbage)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        ends.dialer.send(ends.address, [tokens("r", 1, finish=FinishReason.STOP)])
        assert await all_of(stream) == [1]


async def test_a_stream_does_not_change_its_connection() -> None:
    """A second replica that sends for the same request would leave a hole, or repeat tokens."""
    async with both_ends() as ends:
        stream, other = ends.listener.subscribe(RequestId("r")), ends.listener.subscribe(RequestId("other"))
        await ends.dialer.connect(ends.address)
        ends.dialer.send(ends.address, [tokens("r", 1)])
        assert (await stream.get()).token_ids == (1,)
        second = ChannelDialer(CONFIG, lambda _: None)
        await second.connect(ends.address)
        second.send(ends.address, [tokens("r", 99), tokens("other", 1)])
        assert (await other.get()).token_ids == (1,)
        ends.dialer.send(ends.address, [tokens("r", 2)])
        assert (await stream.get()).token_ids == (2,)
        await second.close()


async def test_the_end_of_a_replica_ends_the_streams_that_it_fed_after_what_it_sent() -> None:
    async with both_ends() as ends:
        fed, finished, unfed = (ends.listener.subscribe(RequestId(name)) for name in ("fed", "finished", "unfed"))
        await ends.dialer.connect(ends.address)
        ends.dialer.send(ends.address, [tokens("fed", 1), tokens("finished", 2, finish=FinishReason.STOP)])
        await ends.dialer.close()
        assert (await fed.get()).token_ids == (1,)
        with pytest.raises(ReplicaLostError):
            await fed.get()
        assert await all_of(finished) == [2]
        unfed.fail(ReplicaLostError("its call has failed"))
        with pytest.raises(ReplicaLostError, match="its call"):
            await unfed.get()
        assert ends.lost == []


async def test_a_replica_that_hangs_is_taken_for_dead_and_one_with_nothing_to_say_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_channel, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.02)
    told: list[object] = []

    def on_end(connection: object) -> list[RequestId]:
        told.append(connection)
        return [RequestId("sent")]

    listener = ChannelListener(CONFIG, "gateway-1", on_end=on_end)
    address = await listener.start()
    quiet, hung = ChannelDialer(CONFIG, lambda _: None), ChannelDialer(CONFIG, lambda _: None)
    await quiet.connect(address)
    await hung.connect(address)
    fed, sent, kept = (listener.subscribe(RequestId(name)) for name in ("fed", "sent", "kept"))
    hung.send(address, [tokens("fed", 1)])
    quiet.send(address, [tokens("kept", 2)])
    assert (await fed.get()).token_ids == (1,)
    # Its process stops: the connection stays open, and nothing comes any more.
    [link] = hung._links.values()
    monkeypatch.setattr(link._writer, "write", lambda frame: None)
    for stream in (fed, sent):
        with pytest.raises(ReplicaLostError):
            await stream.get()
    quiet.send(address, [tokens("kept", 3, finish=FinishReason.STOP)])
    assert await all_of(kept) == [2, 3]
    assert (len(told), len(listener._connections)) == (1, 1)
    for dialer in (quiet, hung):
        await dialer.close()
    await listener.close()


async def test_the_end_of_a_gateway_is_told_to_the_replica_once_and_its_tokens_go_nowhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with both_ends() as ends:
        await ends.dialer.connect(ends.address)
        await ends.listener.close()
        assert not ends.listener._connections
        await until(lambda: bool(ends.lost))
        ends.dialer.send(ends.address, [tokens("r", 1)])
        with pytest.raises(ChannelError):
            await ends.dialer.connect(ends.address)
        assert ends.lost == [ends.address]
        assert "dropped" not in caplog.text


async def _deaf_gateway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await token_channel.accept(reader, writer, CONFIG.secret, "gateway-1")
    writer.transport.pause_reading()
    # Since Python 3.12 a writer that nobody holds closes its connection.
    await writer.wait_closed()


@pytest.mark.parametrize("what", ["tokens", "reports"])
@pytest.mark.parametrize(("bound", "value"), [("STALL_TIMEOUT_S", 0.02), ("MAX_PENDING_BYTES", 30_000_000)])
async def test_a_gateway_that_reads_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bound: str, value: float, what: str
) -> None:
    monkeypatch.setattr(token_channel, bound, value)
    server = await asyncio.start_server(_deaf_gateway, "127.0.0.1", 0)
    lost: list[TokenAddress] = []
    dialer = ChannelDialer(CONFIG, lost.append)
    address = TokenAddress(gateway_id="gateway-1", host="127.0.0.1", port=server.sockets[0].getsockname()[1])
    await dialer.connect(address)
    [link] = dialer._links.values()
    step = [tokens(f"r{i}", *range(100_000)) for i in range(5)]
    while not lost:
        if what == "tokens":
            dialer.send(address, step)
        else:
            dialer.send_report(address, bytes(2_000_000))
        await asyncio.sleep(0)
    assert lost == [address]
    # What was sent while the link ended stopped it from closing its connection.
    assert link._writer.is_closing()
    # The kernel has the same timeout, and may be the first to notice.
    assert "does not read" in caplog.text or bound == "STALL_TIMEOUT_S"
    server.close()


async def test_one_that_gives_up_waiting_for_a_dial_does_not_end_it_for_the_others() -> None:
    async with both_ends() as ends:
        first = asyncio.create_task(ends.dialer.connect(ends.address))
        second = asyncio.create_task(ends.dialer.connect(ends.address))
        await asyncio.sleep(0)
        first.cancel()
        await second
        assert first.cancelled()
        await until(lambda: len(ends.listener._connections) == 1)


async def test_what_waits_is_sent_before_a_dialer_closes() -> None:
    async with both_ends() as ends:
        stream = ends.listener.subscribe(RequestId("r"))
        await ends.dialer.connect(ends.address)
        [link] = ends.dialer._links.values()
        ends.dialer.send(ends.address, [tokens("r", 1, finish=FinishReason.STOP)])
        await ends.dialer.close()
        assert link._writer.is_closing()
        assert await all_of(stream) == [1]


async def test_a_dialer_that_closes_gives_up_its_dials() -> None:
    dialed = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialed.set()
        await reader.read()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    dialer = ChannelDialer(CONFIG, lambda _: None)
    address = TokenAddress(gateway_id="gateway-1", host="127.0.0.1", port=server.sockets[0].getsockname()[1])
    dial = asyncio.create_task(dialer.connect(address))
    await dialed.wait()
    await dialer.close()
    with pytest.raises(asyncio.CancelledError):
        await dial
    server.close()


async def test_a_frame_that_is_not_due_wakes_nobody_and_leaves_without_it_what_may_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The writer would turn until it is due."""
    monkeypatch.setattr(outbox, "MAX_SPACING_S", 1000.0)
    async with both_ends(replace(CONFIG, stream_spacing_s=1000.0)) as ends:
        stream, other = ends.listener.subscribe(RequestId("r")), ends.listener.subscribe(RequestId("other"))
        await ends.dialer.connect(ends.address)
        [link] = ends.dialer._links.values()
        takes: list[float] = []
        take = link._outbox.take

        def counted(now_s: float) -> list[Emission]:
            takes.append(now_s)
            return take(now_s)

        monkeypatch.setattr(link._outbox, "take", counted)
        ends.dialer.send(ends.address, [tokens("r", 1)])
        assert (await stream.get()).token_ids == (1,)
        ends.dialer.send(ends.address, [tokens("r", 2)])
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(takes) == 1
        ends.dialer.send(ends.address, [tokens("other", 3)], {RequestId("other")})
        assert (await other.get()).token_ids == (3,)
        assert not stream._unread
        await ends.dialer.close()
        assert (await stream.get()).token_ids == (2,)


async def test_a_dialer_that_closes_while_a_frame_leaves_sends_what_was_not_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "MAX_SPACING_S", 1000.0)
    async with both_ends(replace(CONFIG, stream_spacing_s=1000.0)) as ends:
        stream = ends.listener.subscribe(RequestId("r"))
        await ends.dialer.connect(ends.address)
        [link] = ends.dialer._links.values()
        has_left = asyncio.Event()
        monkeypatch.setattr(link._writer, "drain", has_left.wait)
        ends.dialer.send(ends.address, [tokens("r", 1)])
        assert (await stream.get()).token_ids == (1,)
        ends.dialer.send(ends.address, [tokens("r", 2)])
        closing = asyncio.create_task(ends.dialer.close())
        await until(lambda: link._is_finishing)
        has_left.set()
        await closing
        assert (await stream.get()).token_ids == (2,)


async def test_an_alarm_that_rings_early_is_believed_and_no_frame_is_sent_without_anything_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # uvloop, on which Ray runs its actors, counts in milliseconds: what is due in less it calls at once.
    loop = asyncio.get_running_loop()
    call_at = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda when, *call, **kwargs: call_at(when - 0.02, *call, **kwargs))
    async with both_ends(replace(CONFIG, stream_spacing_s=0.02)) as ends:
        stream = ends.listener.subscribe(RequestId("r"))
        await ends.dialer.connect(ends.address)
        [link] = ends.dialer._links.values()
        frames: list[bytes] = []
        write = link._writer.write

        def note(frame: bytes) -> None:
            frames.append(frame)
            write(frame)

        monkeypatch.setattr(link._writer, "write", note)
        for step in range(5):
            ends.dialer.send(ends.address, [tokens("r", step)])
            assert (await stream.get()).token_ids == (step,)
        assert frames == [encode_frame([tokens("r", step)]) for step in range(5)]
