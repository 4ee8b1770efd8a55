from __future__ import annotations

import asyncio
import socket

import pytest

from deployments.channel.token_handshake import ChannelError, accept, introduce

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


@pytest.fixture(autouse=True)
def unix_sockets_have_no_tcp_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.channel.token_handshake.tune_socket", lambda _: None)


async def test_two_that_know_the_secret_agree() -> None:
    assert await shake(SECRET, SECRET) == [None, None]


async def test_a_peer_with_another_secret_learns_nothing_but_the_end() -> None:
    refused, ended = await shake(SECRET, b"fedcba9876543210")
    assert isinstance(refused, ChannelError)
    assert isinstance(ended, EOFError)


async def test_an_answer_for_another_gateway_is_refused() -> None:
    refused, ended = await shake(SECRET, SECRET, meant="another")
    assert isinstance(refused, ChannelError)
    assert isinstance(ended, EOFError)
