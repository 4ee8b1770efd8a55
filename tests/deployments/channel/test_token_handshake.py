from __future__ import annotations

import asyncio
import hmac
import socket

import pytest

from deployments.channel.token_handshake import GREETING, MAC_BYTES, NONCE_BYTES, ChannelError, accept, introduce

SECRET = b"0123456789abcdef"


async def shake(listener_secret: bytes, dialer_secret: bytes, meant: str = "g") -> list[object]:
    """Let both parts meet; return what each ended with."""
    ours, theirs = socket.socketpair()
    left, right = await asyncio.open_connection(sock=ours), await asyncio.open_connection(sock=theirs)

    async def part(handshake: asyncio.Future[None] | object, writer: asyncio.StreamWriter) -> None:
        try:
            await handshake  # type: ignore[misc]
        finally:
            writer.close()

    return await asyncio.gather(
        part(accept(*left, listener_secret, "g"), left[1]),
        part(introduce(*right, dialer_secret, meant), right[1]),
        return_exceptions=True,
    )


async def test_two_that_know_the_secret_agree() -> None:
    assert await shake(SECRET, SECRET) == [None, None]


async def test_a_proof_is_over_both_nonces_so_that_none_serves_twice() -> None:
    ours, theirs = socket.socketpair()
    listener, dialer = await asyncio.open_connection(sock=ours), await asyncio.open_connection(sock=theirs)
    accepting = asyncio.create_task(accept(*listener, SECRET, "g"))
    greeting, own = await dialer[0].readexactly(len(GREETING) + NONCE_BYTES), bytes(range(NONCE_BYTES))
    proven = greeting[len(GREETING) :] + own + b"g"
    dialer[1].write(own + hmac.digest(SECRET, b"dialer\0" + proven, "sha256"))
    await accepting
    assert await dialer[0].readexactly(MAC_BYTES) == hmac.digest(SECRET, b"listener\0" + proven, "sha256")
    for _, writer in (listener, dialer):
        writer.close()


async def test_a_peer_with_another_secret_learns_nothing_but_the_end() -> None:
    refused, ended = await shake(SECRET, b"fedcba9876543210")
    assert isinstance(refused, ChannelError)
    assert isinstance(ended, EOFError)


async def test_an_answer_for_another_gateway_is_refused() -> None:
    refused, ended = await shake(SECRET, SECRET, meant="another")
    assert isinstance(refused, ChannelError)
    assert isinstance(ended, EOFError)


async def test_what_greets_otherwise_is_refused_before_anything_is_sent_to_it() -> None:
    ours, theirs = socket.socketpair()
    left, right = await asyncio.open_connection(sock=ours), await asyncio.open_connection(sock=theirs)
    left[1].write(b"ANTIPHN0" + bytes(NONCE_BYTES))
    with pytest.raises(ChannelError, match="version"):
        await introduce(*right, SECRET, "g")
    right[1].close()
    assert await left[0].read() == b""
    left[1].close()
