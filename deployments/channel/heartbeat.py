"""How a gateway knows that a replica runs, and not only the kernel under it, which keeps a stopped process's sockets.

A replica that has nothing to say sends an empty frame every second; one that is silent for long has hung, whatever its
engine was doing: the frames come from its event loop, which no step holds up.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from deployments.channel.token_frames import encode_frame

HEARTBEAT_S = 1.0
MAX_SILENT_S = 10
BEAT = encode_frame(())


class SilenceError(OSError):
    """The other end has said nothing for `MAX_SILENT_S`."""


async def heard(reader: asyncio.StreamReader, num_bytes: int) -> bytes:
    """Read so many bytes from a replica.

    Raises:
        SilenceError: nothing came, or not enough.
        asyncio.IncompleteReadError, OSError: the connection has ended.
    """
    # One second after another: what this process was itself held up counts as one, and what came meanwhile is read.
    for _ in range(MAX_SILENT_S):
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                return await reader.readexactly(num_bytes)
    raise SilenceError(f"a replica has said nothing for {MAX_SILENT_S} seconds")
