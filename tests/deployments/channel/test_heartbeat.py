"""A stopped process's socket stays open; only its silence tells. A machine that vanished leaves sockets open, too."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest

from deployments.channel import heartbeat
from deployments.channel.heartbeat import BEAT, MAX_SILENT_S, SilenceError, end_unless_acknowledged, heard
from deployments.channel.token_frames import LENGTH, decode_body, decode_length


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.001)


def test_a_beat_is_a_frame_of_nothing() -> None:
    assert decode_length(BEAT[: LENGTH.size]) == len(BEAT) - LENGTH.size
    assert decode_body(BEAT[LENGTH.size :]) == ()


async def test_what_comes_in_parts_is_whole_and_what_follows_is_left() -> None:
    reader = asyncio.StreamReader()

    async def send() -> None:
        for part in (b"a", b"bc", b"de"):
            await asyncio.sleep(0.002)
            reader.feed_data(part)

    sending = asyncio.create_task(send())
    assert await heard(reader, 4) == b"abcd"
    await sending
    assert await heard(reader, 1) == b"e"


async def test_silence_is_told_after_so_many_waits() -> None:
    with pytest.raises(SilenceError, match=f"{MAX_SILENT_S} seconds"):
        await heard(asyncio.StreamReader(), 1)


async def test_who_was_held_up_itself_reads_what_has_come_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a stop of this process: every timer is overdue, and the bytes are there."""
    reader, waits = asyncio.StreamReader(), 0
    timeout = asyncio.timeout

    def held_up(delay_s: float) -> asyncio.Timeout:
        nonlocal waits
        waits += 1
        if waits == 1:
            asyncio.get_running_loop().call_soon(reader.feed_data, b"x")
        return timeout(0.0 if waits == 1 else delay_s)

    monkeypatch.setattr(asyncio, "timeout", held_up)
    assert await heard(reader, 1) == b"x"
    assert waits <= 2


async def test_an_end_is_an_end_at_once() -> None:
    reader = asyncio.StreamReader()
    reader.feed_eof()
    with pytest.raises(asyncio.IncompleteReadError):
        await heard(reader, 1)


async def test_what_is_not_acknowledged_is_given_up_after_the_seconds_that_were_asked_for() -> None:
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("this system has no such limit")
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    end_unless_acknowledged(writer, 1.5)
    assert writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500
    writer.close()
    server.close()


_VANISHING = """
import asyncio, fcntl, socket, struct
from deployments.channel import token_channel
from deployments.config import ChannelConfig

UP, DOWN, SIOCSIFFLAGS = 1, 0, 0x8914
token_channel.STALL_TIMEOUT_S = 1.0


def set_network(flags):
    with socket.socket() as one:
        fcntl.ioctl(one, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))


async def main():
    set_network(UP)
    config = ChannelConfig(secret=bytes(32), host="127.0.0.1")
    address = await token_channel.ChannelListener(config, "gateway").start()
    lost = asyncio.Event()
    await token_channel.ChannelDialer(config, lambda address: lost.set()).connect(address)
    set_network(DOWN)
    await lost.wait()
    print("lost")


asyncio.run(main())
"""


def test_a_replica_notices_that_a_gateway_s_machine_has_vanished() -> None:
    """It computed all answers to their ends for a gateway whose machine had lost its network."""
    alone = ["unshare", "--map-root-user", "--net"]
    if sys.platform != "linux" or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a process can have no network of its own here")
    told = subprocess.run([*alone, sys.executable, "-c", _VANISHING], capture_output=True, text=True, timeout=60)
    assert told.stdout == "lost\n", told.stderr
