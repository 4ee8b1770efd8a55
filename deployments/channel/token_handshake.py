"""Handshake in which the two ends of a token channel prove to each other that they know the shared secret.

The secret never travels. `mac(role)` is HMAC-SHA256(secret, role | 0 | nonce_l | nonce_d | gateway id):

    listener -> dialer   b"ANTIPHN1" | nonce_l (32 bytes)
    dialer -> listener   nonce_d (32 bytes) | mac(b"dialer")
    listener -> dialer   mac(b"listener")

Nothing else is read before it succeeds. What follows is neither encrypted nor signed: the channel belongs on a network
that nobody else can write to.
**Source:** RFC 2104 (HMAC). The role prevents reflection of a peer's own MAC; the gateway's id keeps a replica from
talking to another gateway that now listens on the same port.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets

GREETING = b"ANTIPHN1"
NONCE_BYTES = 32
MAC_BYTES = 32


class ChannelError(ConnectionError):
    """The peer cannot be reached, or has not authenticated as the intended one."""


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, gateway_id: str) -> None:
    """Perform the listener's side.

    Raises:
        ChannelError: the peer does not know the secret, or dialed another gateway.
        OSError, EOFError: the connection has ended.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    writer.write(GREETING + nonce)
    answer = await reader.readexactly(NONCE_BYTES + MAC_BYTES)
    nonces = nonce + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _mac(secret, b"dialer", nonces, gateway_id)):
        raise ChannelError("the peer does not know the secret, or meant another gateway")
    writer.write(_mac(secret, b"listener", nonces, gateway_id))


async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, gateway_id: str) -> None:
    """Perform the dialer's side; `gateway_id` names the intended gateway.

    Raises:
        ChannelError: this is not a token channel, or the gateway does not know the secret.
        OSError, EOFError: the connection has ended, which is how a listener refuses.
    """
    greeting = await reader.readexactly(len(GREETING) + NONCE_BYTES)
    if not greeting.startswith(GREETING):
        raise ChannelError("not a token channel of this version")
    nonce = secrets.token_bytes(NONCE_BYTES)
    nonces = greeting[len(GREETING) :] + nonce
    writer.write(nonce + _mac(secret, b"dialer", nonces, gateway_id))
    answer = await reader.readexactly(MAC_BYTES)
    if not hmac.compare_digest(answer, _mac(secret, b"listener", nonces, gateway_id)):
        raise ChannelError("the gateway does not know the secret")


def reason_of(error: OSError | EOFError) -> str:
    """Return in a few words why a dial has failed."""
    if isinstance(error, EOFError):
        return "it closed the connection, and logs why if it refused"
    return str(error) or "it does not answer"


def _mac(secret: bytes, role: bytes, nonces: bytes, gateway_id: str) -> bytes:
    return hmac.digest(secret, role + b"\0" + nonces + gateway_id.encode(), "sha256")
