from __future__ import annotations

import socket

from app.cli import readiness


def test_readiness_is_a_200_and_nothing_else() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        assert readiness.unready_state(f"http://127.0.0.1:{silent.getsockname()[1]}/health")
