from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.cli.preflight import free_ports, has_haproxy

CONFIG = """
defaults
    mode http
    option abortonclose
    option splice-request
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend in
    bind 127.0.0.1:{front}
    default_backend out
backend out
    server one 127.0.0.1:{back}
"""

WAIT_S = 10.0


def ask_and_leave(port: int, behind: socket.socket) -> None:
    """Ask as many clients do, the body after the headers, and leave; returns once the server hears of it."""
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\n\r\n")
        served, _ = behind.accept()
        with served:
            served.settimeout(WAIT_S)
            while not served.recv(4096).endswith(b"\r\n\r\n"):
                pass
            client.sendall(b"body")
            assert served.recv(4096) == b"body"
            client.close()
            with contextlib.suppress(ConnectionResetError):
                assert served.recv(4096) == b""


@pytest.mark.skipif(not has_haproxy(), reason="ray[serve] brings no HAProxy here")
def test_a_client_that_leaves_before_its_answer_is_seen_to_leave(tmp_path: Path) -> None:
    """With its body spliced nobody heard of it, and its answer was computed to the end."""
    front, back = free_ports(2)
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG.format(front=front, back=back))
    run = [sys.executable, "-c", "from app.cli.haproxy import main; main()", "-db", "-f", str(config)]
    with socket.create_server(("127.0.0.1", back)) as behind, subprocess.Popen(run) as haproxy:
        try:
            behind.settimeout(WAIT_S)
            ask_and_leave(wait_for(front), behind)
        finally:
            haproxy.terminate()


def wait_for(port: int) -> int:
    """Return the port once somebody listens there."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return port
        time.sleep(0.02)
    raise AssertionError("nobody listens")
