from __future__ import annotations

import resource
import socket
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from app.cli.preflight import (
    HAPROXY_PORTS,
    connections_within,
    find_cluster_file,
    folder_for_ray,
    folder_for_sockets,
    free_ports,
    haproxy_places,
    listen_address,
    listen_error,
    token_of_its_own,
    too_many_cpus,
    wanted_gpus,
)


@pytest.fixture
def listener() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


def test_a_port_with_a_listener_is_not_free(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert listen_error("127.0.0.1", port) is not None
    listener.close()
    assert listen_error("127.0.0.1", port) is None


def test_no_note_of_a_cluster_is_no_cluster(tmp_path: Path) -> None:
    assert find_cluster_file({"RAY_TMPDIR": str(tmp_path)}) is None


def test_a_note_is_alive_only_where_something_listens(tmp_path: Path, listener: socket.socket) -> None:
    note = tmp_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    for address, is_alive in (
        (f"127.0.0.1:{listener.getsockname()[1]}", True),
        (f"127.0.0.1:{free_ports(1)[0]}", False),
        ("nonsense", False),
        ("127.0.0.1:99999999", False),
    ):
        note.write_text(address)
        found = find_cluster_file({"RAY_TMPDIR": str(tmp_path)})
        assert found is not None
        assert (found.address, found.is_alive, found.path) == (address, is_alive, note)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Ray heeds TMPDIR on Linux only")
def test_a_note_is_looked_for_where_ray_leaves_it() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        note = Path(place, "ray", "ray_current_cluster")
        note.parent.mkdir()
        note.write_text("127.0.0.1:1")
        found = find_cluster_file({"TMPDIR": place})
        assert found is not None
        assert found.path == note
    assert folder_for_ray({"TMPDIR": "/tmp", "RAY_TMPDIR": "/else"}) == "/else"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Ray heeds TMPDIR on Linux only")
def test_ray_s_folder_is_where_its_sockets_have_short_enough_paths() -> None:
    """With a job's own folder for temporary files, as batch systems make it, Ray did not start."""
    from ray._private.utils import validate_socket_filepath

    for length in range(20, 60):
        usual = "/" + "x" * length
        socket_path = f"{usual}/ray/session_2026-11-24_04-19-50_535618_4194304/sockets/plasma_store"
        try:
            validate_socket_filepath(socket_path)
            fits = True
        except OSError:
            fits = False
        assert folder_for_ray({"TMPDIR": usual}) == (usual if fits else "/tmp"), length


def test_ports_are_free_and_no_two_the_same() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert all(listen_error("127.0.0.1", port) is None for port in ports)


def test_two_servers_on_one_machine_have_their_own_haproxy() -> None:
    first, second = haproxy_places(Path("/tmp/a"), {}), haproxy_places(Path("/tmp/b"), {})
    for name in (*HAPROXY_PORTS, "RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        assert first[name] != second[name]
    assert len({first[name] for name in HAPROXY_PORTS}) == len(HAPROXY_PORTS)
    assert "RAY_SERVE_HAPROXY_STATS_PORT" not in haproxy_places(Path("/tmp/a"), {"RAY_SERVE_HAPROXY_STATS_PORT": "1"})


@pytest.mark.parametrize(
    ("usual", "expected"), [("/tmp", "/tmp"), ("/var/tmp", "/var/tmp"), ("/tmp/user/1000", "/tmp"), ("/ä/öü", "/ä/öü")]
)
def test_sockets_lie_where_their_paths_are_short_enough(usual: str, expected: str) -> None:
    """With a folder of each user's for temporary files HAProxy, and so the server, did not start."""
    assert folder_for_sockets(usual) == expected


@pytest.mark.parametrize(
    ("max_files", "expected"),
    [(64, 1), (256, 62), (4096, 1598), (10_340, 4096), (524_288, 4096), (resource.RLIM_INFINITY, 4096)],
)
def test_haproxy_takes_no_more_connections_than_it_may_open_files_for(max_files: int, expected: int) -> None:
    """For 4,096 it wanted 10,267, and where it could not have them did not start."""
    assert connections_within(max_files) == expected


@pytest.mark.parametrize("port", [8001, "8001", "8001.0"])
def test_a_port_may_be_text(port: object) -> None:
    """Serve takes all of these; the last ended in a traceback."""
    assert listen_address({"http_options": {"host": "::1", "port": port}}) == ("::1", 8001)


@pytest.mark.parametrize(
    ("deployment", "expected"),
    [
        ("{}", 1),
        ("{num_replicas: 2}", 2),
        ("{num_replicas: auto}", 1),
        ("{num_replicas: 3, ray_actor_options: {num_gpus: 0.5}}", 1.5),
        ("{autoscaling_config: {min_replicas: 2}}", 2),
        ("{autoscaling_config: {min_replicas: 0}}", 0),
        ("{autoscaling_config: {min_replicas: 0, initial_replicas: 2}}", 2),
        ("{autoscaling_config: {min_replicas: '2'}, ray_actor_options: {num_gpus: '0.5'}}", 1),
    ],
)
def test_gpus_are_wanted_by_replicas_of_models_that_run_there(deployment: str, expected: float) -> None:
    models = [{"name": "a", "engine": {"device": "cuda"}}, {"name": "b", "engine": {"device": "cpu"}}, {"name": "c"}]
    deployments = [{"name": "Gateway", "num_replicas": 4}, {"name": "Model-a"} | yaml.safe_load(deployment)]
    ours = {"import_path": "app.builder:build", "args": {"models": models}, "deployments": deployments}
    assert wanted_gpus({"applications": [{"import_path": "other:app"}, ours]}) == expected


@pytest.mark.parametrize(
    ("deployments", "words"),
    [
        ("[]", None),
        ("[{name: Model-a, num_replicas: 7}]", None),
        ("[{name: Model-a, num_replicas: 8}]", "replicas request 4.2 CPUs ('Gateway' 0.2, 'Model-a' 4), but Ray found"),
        ("[{name: Model-a, ray_actor_options: {num_cpus: '64'}}]", "a replica of 'Model-a' requests 64 CPUs, but Ray"),
        ("[{name: Gateway, num_replicas: 3, ray_actor_options: {num_cpus: 2}}]", "replicas request 6.5 CPUs ('Gatew"),
        ("[{name: Gateway, num_replicas: 4, ray_actor_options: {num_gpus: 0}}]", "replicas request 4.5 CPUs ('Gatew"),
        ("[{name: Model-a, autoscaling_config: {min_replicas: 0}, ray_actor_options: {num_cpus: 64}}]", None),
        ("[{name: Model-a, autoscaling_config: {max_replicas: 9}, ray_actor_options: {num_cpus: 3.8}}]", None),
        ("[{name: Model-a, autoscaling_config: {initial_replicas: 9, max_replicas: 9}}]", "replicas request 4.7 CPUs"),
    ],
)  # fmt: skip
def test_more_cpus_than_there_are_are_not_waited_for(deployments: str, words: str | None) -> None:
    """Ray waits for them without a word, until the server's time to get ready is over."""
    ours = {"import_path": "app.builder:build", "args": {"models": [{"name": "a"}]}}
    tree = {"applications": [ours | {"deployments": yaml.safe_load(deployments)}]}
    found = too_many_cpus(tree, 4.0)
    assert found is None if words is None else (found or "").startswith(words), found


def test_below_full_capacity_fewer_cpus_are_wanted() -> None:
    deployments = [{"name": "Gateway", "num_replicas": 20}]
    ours = {"import_path": "app.builder:build", "args": {"models": [{"name": "a"}]}, "deployments": deployments}
    assert too_many_cpus({"applications": [ours]}, 2.0) is not None
    assert too_many_cpus({"applications": [ours], "target_capacity": 10}, 2.0) is None


def test_where_ray_cannot_keep_a_token_a_server_gets_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container of another user than root its home is `/`, and the server ended as Ray wrote its token there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert token_of_its_own({}) == {}
    assert list(tmp_path.rglob("auth_token")) == [], "Ray writes it"
    monkeypatch.setenv("HOME", str(tmp_path / "no_folder"))
    (tmp_path / "no_folder").write_text("")
    first, second = token_of_its_own({}), token_of_its_own({})
    assert len(first["RAY_AUTH_TOKEN"]) == 64
    assert first != second
    assert token_of_its_own({"RAY_AUTH_TOKEN_PATH": "/secrets/token"}) == {}
