"""A cluster of two nodes on one machine, of which one is lost, or the head's memory, while streams run."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from adapters.identity import adapter_digest
from app.cli import serve_environment
from app.cli.preflight import answers, free_ports, haproxy_places
from app.cli.server_process import kill_session, session_members
from deployments.actor_process import MAX_MISSES, PERIOD_S
from tests.e2e.server import ADMIN_KEY, ROOT, Server, config_on_a_free_port, end_shared, until
from tests.e2e.streams import BASE, NUM_STREAMS, Streamed, follow, has_replicas, is_idle, undisturbed, while_streaming

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

PATIENCE_S = 240.0
NUM_ASKERS = 32
MAX_LOSSES = 5
QUESTION: list[Any] = [{"role": "user", "content": "What does os.getcwd do?"}]


class Nodes:
    """Nodes of one cluster, each in a session of its own, as on machines of their own."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.port = free_ports(1)[0]
        self.address = f"127.0.0.1:{self.port}"
        self.dashboard = f"http://127.0.0.1:{free_ports(1)[0]}"
        self.environment = environment
        self._sessions: list[int] = []

    def start(
        self,
        *options: str,
        inside: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        is_watched: bool = True,
    ) -> int:
        """Start a node; returns its session. One that is watched ends with the first of its processes that does."""
        ray = Path(sys.executable).with_name("ray")
        ports = ("--dashboard-agent-listen-port", str(free_ports(1)[0]), "--min-worker-port=0", "--max-worker-port=0")
        block = ["--block"] * is_watched
        process = subprocess.Popen(
            [*inside, ray, "start", *block, "--disable-usage-stats", "--num-cpus=4", *ports, *options],
            env=self.environment | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._sessions.append(process.pid)
        return process.pid

    def start_head(self, **options: Any) -> int:
        """Start the head and wait until it listens: a server is not started without one."""
        dashboard = f"--dashboard-port={self.dashboard.rpartition(':')[2]}"
        session = self.start("--head", f"--port={self.port}", "--resources", '{"head": 1}', dashboard, **options)
        until(lambda: answers(self.address), "the head to listen", patience_s=PATIENCE_S)
        return session

    def go_on_with(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a process anew."""
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._sessions.append(process.pid)

    def start_second(self, hidden: Path | None = None) -> int:
        """Start a node on which a folder is empty, where one is named."""
        if hidden is None:
            return self.start(f"--address={self.address}")
        script = 'mount -t tmpfs none "$1" && shift && exec "$@"'
        inside = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", str(hidden))
        return self.start(f"--address={self.address}", inside=inside)

    def stop(self) -> None:
        for session in reversed(self._sessions):
            kill_session(session)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    recommended = serve_environment.recommended(num_cores=os.cpu_count() or 1, drain_s=0)
    variables = {v.name: v.value for v in (*recommended, serve_environment.CLUSTER_ONLY)}
    # Its path is a part of sockets' names, which must be short.
    with tempfile.TemporaryDirectory(prefix="n") as folder:
        places = haproxy_places(Path(folder), {}) | {"RAY_TMPDIR": folder}
        nodes = Nodes(os.environ | variables | places)
        try:
            yield nodes
        finally:
            nodes.stop()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = config_on_a_free_port(ROOT / "serve_config.yaml", tmp_path)
    tree = yaml.safe_load(path.read_text())
    [application] = tree["applications"]
    application["args"]["models"][0]["engine"] = {"dtype": "float32", "num_threads": 1}
    folders = {"folder": tmp_path / "registry", "cache_folder": tmp_path / "cache"}
    application["args"]["registry"] |= {name: str(folder) for name, folder in folders.items()}
    on_head: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.1, "resources": {"head": 0.01}}}
    parts = ("Gateway", "Tokenizer", "Safety", "Registry", "Accounts", "Batches")
    application["deployments"] = [{"name": name, "num_replicas": 1} | on_head for name in parts]
    application["deployments"].append({"name": f"Model-{BASE}", "num_replicas": 2, "max_replicas_per_node": 1})
    tree["proxy_location"] = "HeadOnly"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def server(nodes: Nodes, config: Path) -> Iterator[Server]:
    nodes.start_head()
    server = Server(config, "--address", nodes.address)
    try:
        yield server
    finally:
        server.stop()


def test_a_lost_node_takes_no_stream_along_and_a_new_one_serves(nodes: Nodes, server: Server) -> None:
    second = nodes.start_second()
    server.wait_until_ready()
    until(lambda: has_replicas(server, 2), "a replica on each node", patience_s=PATIENCE_S)
    expected = undisturbed(server)
    # Now and then all streams run on the node that stays.
    for _ in range(MAX_LOSSES):
        told = while_streaming(server, partial(kill_session, second), patience_s=PATIENCE_S)
        assert [seen.error for seen in told] == [None] * NUM_STREAMS
        assert [seen.text for seen in told] == expected
        second = nodes.start_second()
        until(lambda: has_replicas(server, 2), "a replica on the new node", patience_s=PATIENCE_S)
        if server.metric("antiphon:resumed_total") > 0:
            break
    else:
        pytest.fail("no stream ran on a node that was lost")
    until(lambda: is_idle(server), "the engines to be idle")


def gateway_beside(server: Server, session: int) -> Server:
    """The server as clients see it that ask the gateway of a node itself."""
    [pid] = [pid for pid in replicas_of(session) if "Gateway" in " ".join(psutil.Process(pid).cmdline())]
    beside = copy.copy(server)

    def answers() -> bool:
        for end in psutil.Process(pid).net_connections("tcp"):
            if end.status == psutil.CONN_LISTEN:
                beside.url = f"http://127.0.0.1:{end.laddr.port}"
                with suppress(httpx.HTTPError):
                    if httpx.get(f"{beside.url}/health", timeout=10).status_code == 200:
                        return True
        return False

    until(answers, "a port of the gateway's that answers", patience_s=PATIENCE_S)
    return beside


def test_a_node_serves_without_the_head_and_the_gateway_that_was_there(nodes: Nodes, config: Path) -> None:
    """Model replicas asked Serve's controller how to record what the lost gateway had not, and waited for it."""
    head = nodes.start_head()
    second = nodes.start(f"--address={nodes.address}", "--resources", '{"second": 1}')
    tree = yaml.safe_load(config.read_text())
    [application] = tree["applications"]
    del application["args"]["safety"]
    parts = {part["name"]: part for part in application["deployments"]}
    parts["Gateway"] |= {"num_replicas": 2, "max_replicas_per_node": 1, "ray_actor_options": {"num_cpus": 0.1}}
    parts["Tokenizer"]["ray_actor_options"]["resources"] = {"second": 0.01}
    application["deployments"] = [part for name, part in parts.items() if name != "Safety"]
    config.write_text(yaml.safe_dump(tree))
    server = Server(config, "--address", nodes.address)
    try:
        server.wait_until_ready()
        until(lambda: has_replicas(server, 2), "a replica on each node", patience_s=PATIENCE_S)
        beside = gateway_beside(server, second)
        expected = undisturbed(server)
        # So that each gateway has answered by each replica.
        assert [seen.text for seen in while_streaming(server, lambda: None, patience_s=PATIENCE_S)] == expected
        told = while_streaming(beside, partial(kill_session, head), patience_s=PATIENCE_S)
        assert [(seen.error, seen.text) for seen in told] == [(None, text) for text in expected]
        assert expected == undisturbed(beside)
    finally:
        server.stop()


def test_what_is_deployed_by_the_dashboard_stays(nodes: Nodes, config: Path) -> None:
    """As KubeRay does it, and `serve deploy`: no process of ours has started Serve."""
    end_shared()
    head = nodes.start_head()
    tree = yaml.safe_load(config.read_text())
    tree["applications"][0]["deployments"][-1] |= {"num_replicas": 1}
    config.write_text(yaml.safe_dump(tree))
    program = Path(sys.executable).with_name("serve")
    deploy = [program, "deploy", "--address", nodes.dashboard, config]

    def is_told() -> bool:
        return subprocess.run(deploy, env=nodes.environment, capture_output=True, check=False).returncode == 0

    until(is_told, "the dashboard", patience_s=PATIENCE_S)
    url = f"http://127.0.0.1:{tree['http_options']['port']}"

    def is_healthy() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/health", timeout=10).status_code == 200
        return False

    until(is_healthy, "the application", patience_s=PATIENCE_S)
    first = replicas_of(head)
    # What the cluster does not know ends after so many looks.
    youngest_s = max(first.values())
    until(lambda: time.time() > youngest_s + (MAX_MISSES + 1) * PERIOD_S, "that", patience_s=PATIENCE_S)
    assert replicas_of(head) == first
    assert is_healthy()


def replicas_of(session: int) -> dict[int, float]:
    """Return when each replica of a node has begun, by its process."""
    members = map(psutil.Process, session_members(session))
    return {process.pid: process.create_time() for process in members if "ServeReplica" in " ".join(process.cmdline())}


def test_a_node_without_the_registry_s_folder_is_given_what_it_needs(
    nodes: Nodes, server: Server, tmp_path: Path
) -> None:
    folder = tmp_path / "registry"
    folder.mkdir()
    if subprocess.run(["unshare", "--map-root-user", "--mount", "true"], check=False).returncode:
        pytest.skip("folders cannot be hidden from a process here")
    nodes.start_second(hidden=folder)
    server.wait_until_ready()
    until(lambda: has_replicas(server, 2), "a replica on each node", patience_s=PATIENCE_S)
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    with server.http() as http, server.client() as client:
        body = {"lora_name": "far", "lora_path": "markdown"}
        assert http.post("/v1/load_lora_adapter", json=body, headers=headers).status_code == 200

        def has_been_fetched() -> bool:
            """So many ask at once that both replicas are needed."""
            with ThreadPoolExecutor(NUM_ASKERS) as pool:
                ask = partial(client.chat.completions.create, model="far", messages=QUESTION, max_tokens=40)
                answers = [pool.submit(ask, temperature=0) for _ in range(NUM_ASKERS)]
                assert {answer.result().choices[0].message.content[:4] for answer in answers} == {"**os"}
            return (tmp_path / "cache").exists()

        until(has_been_fetched, "both replicas to be asked", patience_s=PATIENCE_S)
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.name == adapter_digest(str(ROOT / "adapters" / "library" / "markdown"))


def kill_a_replica(head: int) -> None:
    """Of those in a session."""
    members = map(psutil.Process, session_members(head))
    replicas = [process for process in members if f"Model-{BASE}" in " ".join(process.cmdline())]
    replicas[0].kill()


@pytest.fixture(params=["redis", "rocksdb"])
def memory_of_the_head(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """What the head of a cluster is started with so that what it knows outlives it."""
    if request.param == "rocksdb":
        yield {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path / "gcs")}
        return
    program, port = shutil.which("redis-server"), str(free_ports(1)[0])
    if program is None:
        pytest.skip("there is no redis-server")
    with subprocess.Popen(
        [program, "--port", port, "--save", "", "--dir", tmp_path], stdout=subprocess.DEVNULL
    ) as redis:
        yield {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}"}
        redis.terminate()


def test_without_the_head_s_memory_streams_go_on_and_with_it_what_died_meanwhile_comes_back(
    nodes: Nodes, config: Path, memory_of_the_head: dict[str, str]
) -> None:
    head = nodes.start_head(environment=memory_of_the_head, is_watched=False)
    tree = yaml.safe_load(config.read_text())
    # Both replicas are on the head: another node has nothing to do with this.
    tree["applications"][0]["deployments"][-1].pop("max_replicas_per_node")
    config.write_text(yaml.safe_dump(tree))
    server = Server(config, "--address", nodes.address)
    try:
        server.wait_until_ready()
        until(lambda: has_replicas(server, 2), "two replicas", patience_s=PATIENCE_S)
        expected = undisturbed(server)
        members = [psutil.Process(pid) for pid in session_members(head)]
        [memory] = [process for process in members if process.name() == "gcs_server"]
        command, environment = memory.cmdline(), memory.environ()
        memory.kill()
        told = while_streaming(server, partial(kill_a_replica, head), patience_s=PATIENCE_S)
        assert [(seen.error, seen.text) for seen in told] == [(None, text) for text in expected]
        nodes.go_on_with(command, environment)
        back_at_s = time.monotonic()
        until(lambda: has_replicas(server, 2), "what died meanwhile to come back", patience_s=PATIENCE_S)
        print(f"repaired {time.monotonic() - back_at_s:.1f} s after the head's memory came back")
        assert follow(server, 0, Streamed()).text == expected[0]
    finally:
        server.stop()
