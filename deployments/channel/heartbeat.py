"""How a gateway knows that a replica runs, and not only the kernel, which keeps a stopped process's sockets open.

A replica with nothing to send sends an empty frame every second. One that stays silent has hung, whatever its engine
is doing: the frames come from its event loop, which no step blocks.

The replica in turn learns from its kernel that a gateway's machine has vanished: nobody acknowledges what it sends.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from deployments.channel.token_frames import encode_frame

HEARTBEAT_S = 1.0
MAX_SILENT_S = 10
BEAT = encode_frame(())


class SilenceError(OSError):
    """The other end has sent nothing for `MAX_SILENT_S` seconds."""


async def heard(reader: asyncio.StreamReader, num_bytes: int) -> bytes:
    """Read exactly `num_bytes` bytes from a replica.

    Raises:
        SilenceError: they did not all arrive within `MAX_SILENT_S` seconds.
        asyncio.IncompleteReadError, OSError: the connection has ended.
    """
    # Wait in slices of a second: a stall of this process counts as one slice, and the data that came meanwhile is read.
    for _ in range(MAX_SILENT_S):
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                return await reader.readexactly(num_bytes)
    raise SilenceError(f"a replica has said nothing for {MAX_SILENT_S} seconds")


def end_unless_acknowledged(writer: asyncio.StreamWriter, limit_s: float) -> None:
    """End a connection once what was sent has not been acknowledged, or not been taken, for so long.

    By itself, Linux takes fifteen minutes to give up a machine that has vanished. There is always something to
    acknowledge: a replica with nothing to send sends heartbeats. No-op on other systems.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        own: socket.socket = writer.get_extra_info("socket")
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * limit_s))
