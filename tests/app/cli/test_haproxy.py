from __future__ import annotations

import contextlib
import ctypes
import errno
import http.client
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jinja2 import Template
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from app.cli.preflight import answers, free_ports, has_haproxy

CONFIG = """
defaults
    mode http
    option abortonclose
    option splice-request
    errorfile 502 /a/file/that/is/not/there
    errorfile 503 /a/file/that/is/not/there
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend in
    bind 127.0.0.1:{front}
    default_backend out
backend out
    http-reuse always
    default-server fall 2 rise 2 inter 1s
    server one 127.0.0.1:{back}
"""

WAIT_S = 60.0


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
    with started(tmp_path, front, back), socket.create_server(("127.0.0.1", back)) as behind:
        behind.settimeout(WAIT_S)
        ask_and_leave(wait_for(front), behind)


@pytest.mark.skipif(not has_haproxy(), reason="ray[serve] brings no HAProxy here")
@pytest.mark.skipif(sys.platform != "linux", reason="it looks at another process's sockets")
def test_a_gateway_whose_machine_is_gone_is_waited_for_no_longer_than_fifteen_seconds(tmp_path: Path) -> None:
    """Whether HAProxy waits for what it says, or for a word that it has got what it was sent."""
    front, back = free_ports(2)
    with started(tmp_path, front, back) as haproxy, socket.create_server(("127.0.0.1", back)) as behind:
        behind.settimeout(WAIT_S)
        with socket.create_connection(("127.0.0.1", wait_for(front)), WAIT_S) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            served, _ = behind.accept()
            with served, connection_to(back, haproxy.pid) as connection:
                options = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT]
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                idle, interval, count, timeout_ms = (connection.getsockopt(socket.SOL_TCP, name) for name in options)
                assert idle + interval * count == 15
                assert timeout_ms == 15_000


@pytest.mark.skipif(not has_haproxy(), reason="ray[serve] brings no HAProxy here")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel tells a process of its parent's end")
def test_its_port_is_free_once_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    """After `ray stop --force` it went on, and the next server's could not listen."""
    front, back = free_ports(2)
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG.format(front=front, back=back))
    starting = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    command = [sys.executable, "-m", "app.cli.haproxy", "-db", "-f", str(config)]
    parent = subprocess.Popen([sys.executable, "-c", starting, *command], stderr=subprocess.DEVNULL)
    try:
        wait_for(front)
    finally:
        parent.kill()
        parent.wait()
    deadline_s = time.monotonic() + WAIT_S
    while answers(f"127.0.0.1:{front}"):
        assert time.monotonic() < deadline_s, "it still listens"
        time.sleep(0.05)


@pytest.mark.skipif(not has_haproxy(), reason="ray[serve] brings no HAProxy here")
def test_without_a_gateway_the_answer_has_the_format_of_our_errors(tmp_path: Path) -> None:
    """It was a plain "Internal Server Error", also under overload."""
    front, back = free_ports(2)
    with started(tmp_path, front, back), socket.create_connection(("127.0.0.1", wait_for(front)), WAIT_S) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert json.load(answer)["error"]["code"] == "server_overloaded"


@pytest.mark.skipif(not has_haproxy(), reason="ray[serve] brings no HAProxy here")
@pytest.mark.parametrize(
    ("is_proxy", "kind", "status"),
    [(True, "text/plain; charset=utf-8", 502), (True, "application/json", 500), (False, "text/plain", 500)],
)
def test_of_a_gateway_that_serve_s_proxy_loses_the_answer_has_the_format_of_our_errors(
    tmp_path: Path, is_proxy: bool, kind: str, status: int
) -> None:
    """Who had waited there for a gateway, which was lost as well, got a plain "Internal Server Error"."""
    front, back = free_ports(2)
    text = CONFIG
    if is_proxy:
        line = next(line for line in HAPROXY_CONFIG_TEMPLATE.splitlines() if line.endswith("}} check backup"))
        proxy = {"name": "SERVE_PROXY_ACTOR-1", "host": "127.0.0.1", "port": back}
        text = text.replace(
            "    server one 127.0.0.1:{back}", Template(line).render(backend={"fallback_server": proxy})
        )
    with started(tmp_path, front, back, text), socket.create_server(("127.0.0.1", back)) as behind:
        behind.settimeout(WAIT_S)
        with ask(wait_for(front)) as client, asked(behind) as served:
            served.sendall(f"HTTP/1.1 500 Error\r\ncontent-type: {kind}\r\ncontent-length: 2\r\n\r\n{{}}".encode())
            answer = http.client.HTTPResponse(client)
            answer.begin()
            assert answer.status == status
            if status == 502:
                assert answer.headers["retry-after"] == "1"
                assert json.load(answer)["error"]["message"] == "The gateway was lost before it answered."


@pytest.mark.skipif(not has_haproxy(), reason="ray[serve] brings no HAProxy here")
@pytest.mark.parametrize(("rule", "status"), [("", 503), ("use_backend out if { path_beg /app/ }", 404)])
def test_only_a_server_that_has_its_application_knows_what_is_not_there(tmp_path: Path, rule: str, status: int) -> None:
    """A client that asked a starting server got a 404, and did not try again."""
    front, back = free_ports(2)
    answer = next(line for line in HAPROXY_CONFIG_TEMPLATE.splitlines() if "status 404" in line)
    text = CONFIG.replace("default_backend out", f"{rule}\n    default_backend default_backend", 1)
    text += f"backend default_backend\n{answer}\n"
    with started(tmp_path, front, back, text), socket.create_connection(("127.0.0.1", wait_for(front))) as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        told = http.client.HTTPResponse(client)
        told.begin()
        assert told.status == status
        if status == 503:
            assert told.headers["retry-after"] == "1"
            assert json.load(told)["error"]["code"] == "server_overloaded"


@pytest.mark.skipif(not has_haproxy(), reason="ray[serve] brings no HAProxy here")
def test_a_client_whose_gateway_dies_is_told_so_though_others_have_used_the_connection(tmp_path: Path) -> None:
    """Its own connection was closed without a word."""
    front, back = free_ports(2)
    with started(tmp_path, front, back), socket.create_server(("127.0.0.1", back)) as behind:
        behind.settimeout(WAIT_S)
        with ask(wait_for(front)) as client:
            first, _ = behind.accept()
            first.recv(4096)
            first.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
            assert status_of(client) == 204
        with first, ask(front) as client:
            ready, _, _ = select.select([first, behind], [], [], WAIT_S)
            served = behind.accept()[0] if behind in ready else first
            served.recv(4096)
            served.close()
            assert status_of(client) == 502


@pytest.mark.skipif(not has_haproxy(), reason="ray[serve] brings no HAProxy here")
def test_a_connection_without_a_request_is_closed(tmp_path: Path) -> None:
    """Each held one of HAProxy's places for an hour, and with all places taken nobody else got in."""
    front, back = free_ports(2)
    with started(tmp_path, front, back), contextlib.ExitStack() as clients:
        wait_for(front)
        silent, half = (clients.enter_context(socket.create_connection(("127.0.0.1", front), WAIT_S)) for _ in range(2))
        half.sendall(b"GET / HTTP/1.1\r\nhost: ")
        assert silent.recv(100) == b""
        assert half.recv(100).startswith((b"HTTP/1.1 408", b"HTTP/1.0 408"))


@contextlib.contextmanager
def started(folder: Path, front: int, back: int, text: str = CONFIG) -> Iterator[subprocess.Popen[bytes]]:
    """HAProxy between two ports, as Serve starts it."""
    config = folder / "haproxy.cfg"
    config.write_text(text.replace("{front}", str(front)).replace("{back}", str(back)))
    with subprocess.Popen([sys.executable, "-m", "app.cli.haproxy", "-db", "-f", str(config)]) as haproxy:
        try:
            yield haproxy
        finally:
            haproxy.terminate()


def ask(port: int) -> socket.socket:
    """Return a new connection on which a request has been sent."""
    client = socket.create_connection(("127.0.0.1", port), WAIT_S)
    client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    return client


def asked(behind: socket.socket) -> socket.socket:
    """Return the connection on which a request comes; health checks say nothing on theirs."""
    while True:
        served, _ = behind.accept()
        if served.recv(4096):
            return served
        served.close()


def status_of(client: socket.socket) -> int:
    answer = http.client.HTTPResponse(client)
    answer.begin()
    return answer.status


def connection_to(port: int, pid: int) -> socket.socket:
    """Return a process's own connection to a port."""
    pidfd_getfd = 438
    libc = ctypes.CDLL(None, use_errno=True)
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            is_socket = os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
        except FileNotFoundError:  # The process has closed it since.
            continue
        if is_socket:
            copied = libc.syscall(pidfd_getfd, os.pidfd_open(pid), int(name), 0)
            if copied < 0 and ctypes.get_errno() == errno.EBADF:
                continue
            if copied < 0:
                pytest.skip("another process's sockets may not be looked at here")
            found = socket.socket(fileno=copied)
            with contextlib.suppress(OSError, IndexError):
                if found.getpeername()[1] == port:
                    return found
            found.close()
    raise AssertionError("there is no such connection")


def wait_for(port: int) -> int:
    """Return the port once somebody listens there."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return port
        time.sleep(0.02)
    raise AssertionError("nobody listens")
