"""How a gateway knows that a replica runs, and not only the kernel, which keeps a stopped process's sockets open.

A replica with nothing to send sends an empty frame every second. One that stays silent has hung, whatever its engine
is doing: the frames come from its event loop, which no step blocks.
"""

from __future__ import annotations

import asyncio
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
