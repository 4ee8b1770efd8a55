"""What users see while parts of a running server die: two gateways, two model replicas, everything else once.

Float32, so that a stream that goes on in another batch says what it would have said.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import psutil
import pytest
import yaml

from deployments.routing.estimate import REPORT_PERIOD_S
from tests.e2e.server import ROOT, Server, config_on_a_free_port, running, until
from tests.e2e.streams import (
    BASE,
    LONG,
    NUM_STREAMS,
    Streamed,
    follow,
    has_replicas,
    is_idle,
    options_of,
    prompts_seen,
    undisturbed,
    while_streaming,
)

pytestmark = pytest.mark.e2e

WAIT_S = 90.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = config_on_a_free_port(ROOT / "serve_config.yaml", tmp_path_factory.mktemp("faults"))
    tree = yaml.safe_load(path.read_text())
    [application] = tree["applications"]
    # A small cache, all of whose pages are soon touched: or else a replica grows with every client, up to its bound.
    engine = {"dtype": "float32", "num_threads": 1, "kv_cache_bytes": 64 << 20}
    application["args"]["models"][0]["engine"] = engine
    application["deployments"] = [
        # Little, so that two cores have room for what is started before its predecessor stops.
        {"name": "Gateway", "num_replicas": 2, "ray_actor_options": {"num_cpus": 0.1}},
        {"name": f"Model-{BASE}", "num_replicas": 2, "ray_actor_options": {"num_cpus": 0.25}},
    ]
    path.write_text(yaml.safe_dump(tree))
    with running(path, "--dashboard") as server:
        yield server


def kill_one(server: Server, title: str) -> None:
    os.kill(random.choice(server.processes(title)).pid, signal.SIGKILL)


def status_of(server: Server, content: str, **options: Any) -> int:
    """Return the status of an answer to a question; a 503 says when to come back."""
    body = {"model": BASE, "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    with server.http() as http:
        response = http.post("/v1/chat/completions", json=body, **options)
    if response.status_code == 503:
        assert int(response.headers["retry-after"]) >= 1
    return response.status_code


@pytest.fixture(scope="module")
def expected(server: Server) -> list[str]:
    """What each stream says when nobody dies."""
    return undisturbed(server)


def test_requests_with_one_prefix_meet_and_others_spread(server: Server) -> None:
    """Whichever gateway each comes to: without knowing, half of them would go where the prefix is not."""
    until(lambda: has_replicas(server, 2), "two replicas")
    names = itertools.count()

    def num_cached(prompt: str) -> int:
        # A client of its own each: connections are spread over the gateways.
        with server.client() as client:
            usage = client.completions.create(model=BASE, prompt=prompt, max_tokens=2).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    def meet() -> bool:
        # New each time: what had been asked for before might lie on both replicas.
        prefix = f"{next(names)}: " + "os.path.join joins parts of a path. " * 40
        assert num_cached(prefix) < 100
        # The other gateway is told with the next report.
        time.sleep(3 * REPORT_PERIOD_S)
        return num_cached(prefix + "And then?") > 300

    # The first ones may come before the replicas were asked to report.
    until(lambda: all(meet() for _ in range(8)), "those with one prefix to meet")

    before = prompts_seen(server)
    while_streaming(server, lambda: None, patience_s=WAIT_S)
    assert all(now > then for then, now in zip(before, prompts_seen(server), strict=True))


def test_a_killed_replica_loses_no_token_of_any_stream(server: Server, expected: list[str]) -> None:
    # On a busy machine the streams of the one that is killed may all have ended when the last ones begin.
    for _ in range(4):
        streams = while_streaming(server, lambda: kill_one(server, f"Model-{BASE}"), patience_s=WAIT_S)
        assert [seen.error for seen in streams] == [None] * NUM_STREAMS
        assert [seen.text for seen in streams] == expected
        until(lambda: has_replicas(server, 2), "the replica to come back", patience_s=WAIT_S)
        if server.metric("antiphon:resumed_total"):
            return
    pytest.fail("no stream was on a replica that was killed")


@pytest.fixture
def starve() -> Iterator[Callable[[psutil.Process], None]]:
    """Puts a process where the kernel has no more memory for it; skips where nobody may do that."""
    root = Path("/sys/fs/cgroup")
    is_v1 = (root / "memory").is_dir()
    group = root / ("memory" if is_v1 else "") / f"antiphon-{os.getpid()}"
    members = group / "cgroup.procs"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text("1M")
    except OSError as error:
        pytest.skip(f"no memory can be limited here: {error}")
    yield lambda process: members.write_text(str(process.pid)) and None
    until(lambda: not members.read_text(), "the limit to have nobody left")
    group.rmdir()


@pytest.mark.thorough
def test_a_replica_that_the_kernel_has_no_memory_for_takes_nobody_along(
    server: Server, expected: list[str], starve: Callable[[psutil.Process], None]
) -> None:
    until(lambda: has_replicas(server, 2), "two replicas", patience_s=WAIT_S)
    starved, *others = random.sample(server.processes(f"Model-{BASE}"), 2)
    others += [
        process for title in ("Gateway", "Tokenizer", "Safety", "haproxy") for process in server.processes(title)
    ]

    def is_gone() -> bool:
        # What has memory left over from earlier requests needs more for longer ones.
        with server.client() as client:
            prompt = f"{random.random():.9f} " * 100
            assert client.completions.create(model=BASE, prompt=prompt, max_tokens=1).choices
        return starved not in server.processes(f"Model-{BASE}")

    streams = while_streaming(server, lambda: starve(starved), patience_s=WAIT_S)
    assert [(seen.error, seen.text) for seen in streams] == [(None, text) for text in expected]
    until(is_gone, "the kernel to end it", patience_s=WAIT_S)
    until(lambda: has_replicas(server, 2), "another one", patience_s=WAIT_S)
    assert all(process.is_running() for process in others)


def until_replaced(server: Server, hung: psutil.Process, title: str) -> None:
    """Wait until two others are there in the place of one that hangs, and until it has gone."""
    until(lambda: len({*server.processes(title)} - {hung}) == 2, "another one", patience_s=WAIT_S)
    # Ray gives up an order to end that does not reach the process, and leaves it.
    if hung in server.processes(title):
        hung.resume()
    until(lambda: hung not in server.processes(title), "what was given up to go", patience_s=WAIT_S)


@pytest.mark.thorough
def test_a_replica_that_hangs_loses_no_token_and_is_replaced(server: Server, expected: list[str]) -> None:
    until(lambda: has_replicas(server, 2), "two replicas", patience_s=WAIT_S)
    hung = random.choice(server.processes(f"Model-{BASE}"))
    streams = while_streaming(server, lambda: os.kill(hung.pid, signal.SIGSTOP), patience_s=WAIT_S)
    assert [seen.error for seen in streams] == [None] * NUM_STREAMS
    assert [seen.text for seen in streams] == expected
    with server.client(timeout=10) as client:
        # Nobody is sent where nobody answers.
        for number in range(8):
            assert client.chat.completions.create(**options_of(number) | {"max_tokens": 3}).choices
    until_replaced(server, hung, f"Model-{BASE}")
    until(lambda: has_replicas(server, 2), "it to serve", patience_s=WAIT_S)


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["Safety", "Tokenizer"])
def test_a_helper_that_hangs_is_waited_for_no_longer_than_its_deadline(server: Server, part: str) -> None:
    def ask(number: int) -> int:
        return status_of(server, f"{number} {LONG}", timeout=20)

    until(lambda: ask(0) == 200, "an answer", patience_s=WAIT_S)
    [hung] = server.processes(part)
    os.kill(hung.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(8) as pool:
        statuses = pool.map(ask, range(8))
        if part == "Tokenizer":
            assert status_of(server, "Hi") == 200
        assert set(statuses) == {503}
    until(lambda: ask(99) == 200, f"another {part}", patience_s=WAIT_S)
    until(lambda: hung not in server.processes(part), "the hung one to go", patience_s=WAIT_S)


def only_some_are_lost(streams: Sequence[Streamed], expected: Sequence[str]) -> None:
    assert sum(seen.error is not None for seen in streams) < NUM_STREAMS
    for seen, text in zip(streams, expected, strict=True):
        # Nobody is told a whole answer that is not one.
        assert seen.text == text if seen.error is None else not seen.is_done


def test_a_killed_gateway_takes_only_its_own_clients_along(server: Server, expected: list[str]) -> None:
    streams = while_streaming(server, lambda: kill_one(server, "Gateway"), patience_s=WAIT_S)
    only_some_are_lost(streams, expected)
    until(lambda: is_idle(server), "the engines to let go")
    with server.client(max_retries=2) as client:
        assert client.chat.completions.create(**options_of(0) | {"max_tokens": 3}).choices


@pytest.mark.thorough
def test_a_gateway_that_hangs_keeps_only_its_own_clients_waiting_until_it_is_replaced(
    server: Server, expected: list[str]
) -> None:
    until(lambda: len(server.processes("Gateway")) == 2, "two gateways", patience_s=WAIT_S)
    hung = random.choice(server.processes("Gateway"))
    streams = while_streaming(server, lambda: os.kill(hung.pid, signal.SIGSTOP), patience_s=WAIT_S)
    only_some_are_lost(streams, expected)
    with server.client(timeout=10) as client:
        # The proxy has missed it by now.
        for number in range(8):
            assert client.chat.completions.create(**options_of(number) | {"max_tokens": 3}).choices
    until_replaced(server, hung, "Gateway")


@pytest.mark.parametrize("part", ["Tokenizer", "Safety", "Registry", "Accounts", "ServeController"])
def test_without_a_helper_requests_wait_or_are_told_to_come_back(server: Server, part: str) -> None:
    def ask(number: int) -> int:
        return status_of(server, f"{number} {LONG}")

    until(lambda: bool(server.processes(part)), f"{part} to be there", patience_s=WAIT_S)
    kill_one(server, part)
    with ThreadPoolExecutor(4) as pool:
        statuses = set(pool.map(ask, range(24)))
    assert statuses <= {200, 503}
    if part in ("Registry", "Accounts", "ServeController"):
        # What is not in the way of a request does not stop one.
        assert statuses == {200}
    until(lambda: ask(99) == 200, f"answers without {part}", patience_s=WAIT_S)


def test_a_killed_proxy_comes_back(server: Server) -> None:
    kill_one(server, "haproxy")
    started_s = time.monotonic()

    def answers() -> bool:
        try:
            with server.http() as http:
                return http.get("/v1/models").status_code == 200
        except httpx.HTTPError:
            return False

    until(answers, "the proxy to come back", patience_s=WAIT_S)
    print(f"the proxy was away for {time.monotonic() - started_s:.1f} s")


@contextmanager
def nobody_fails(server: Server, expected: list[str]) -> Iterator[None]:
    """Clients ask on and on, for long answers and short ones, and each gets its own."""
    is_over = threading.Event()

    def ask_on(number: int) -> list[Streamed]:
        seen = [follow(server, number, Streamed())]
        while not is_over.is_set():
            seen.append(follow(server, number, Streamed()))
        return seen

    def ask_shortly() -> set[int]:
        """On a new connection each time, which may be given to any gateway."""
        seen = set()
        while not is_over.is_set():
            seen.add(httpx.post(f"{server.url}/tokenize", json={"model": BASE, "prompt": "a"}, timeout=60).status_code)
        return seen

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(ask_on, number) for number in range(2)]
        short = [pool.submit(ask_shortly) for _ in range(2)]
        try:
            yield
        finally:
            is_over.set()
        for number, client in enumerate(clients):
            assert {(seen.error, seen.text) for seen in client.result(WAIT_S)} == {(None, expected[number])}
        assert [client.result(WAIT_S) for client in short] == [{200}] * len(short)


def test_a_changed_configuration_fails_no_request(server: Server, expected: list[str]) -> None:
    """All but the models is replaced, then they are too, then there is less of them."""

    def pids(*titles: str) -> set[int]:
        return {p.pid for title in titles for p in server.processes(title)}

    def are_fresh(old: set[int], *titles: str) -> bool:
        return not old & pids(*titles) and has_replicas(server, 2)

    others, models = ("Gateway", "Tokenizer", "Safety"), (f"Model-{BASE}",)
    old, kept = pids(*others), pids(*models)
    with nobody_fails(server, expected):
        server.redeploy(lambda application: application["args"].update(limits={"max_messages": 100}))
        until(lambda: are_fresh(old, *others), "what the change is for to be replaced", patience_s=2 * WAIT_S)
        assert pids(*models) == kept, "models that are told nothing new go on"
        server.redeploy(lambda application: application["args"]["models"][0]["engine"].update(max_queued_requests=511))
        until(lambda: are_fresh(kept, *models), "the model to be replaced", patience_s=2 * WAIT_S)
        server.redeploy(lambda application: application["deployments"][1].update(num_replicas=1))
        until(lambda: has_replicas(server, 1), "one replica to go", patience_s=WAIT_S)
        server.redeploy(lambda application: application["deployments"][1].update(num_replicas=2))
        until(lambda: has_replicas(server, 2), "it to come back", patience_s=WAIT_S)


@pytest.mark.thorough
def test_a_replica_that_is_killed_while_another_drains_costs_no_token(server: Server, expected: list[str]) -> None:
    def strike() -> None:
        server.redeploy(lambda application: application["deployments"][1].update(num_replicas=1))
        # Whichever it is: one that ends its streams and takes no more, or the only one that takes any.
        kill_one(server, f"Model-{BASE}")

    until(lambda: has_replicas(server, 2), "two replicas", patience_s=WAIT_S)
    streams = while_streaming(server, strike, patience_s=WAIT_S)
    assert [(seen.error, seen.text) for seen in streams] == [(None, text) for text in expected]
    server.redeploy(lambda application: application["deployments"][1].update(num_replicas=2))
    until(lambda: has_replicas(server, 2), "two replicas again", patience_s=WAIT_S)


@pytest.mark.thorough
def test_a_configuration_that_changes_again_and_again_fails_no_request_and_a_bad_one_changes_nothing(
    server: Server, expected: list[str]
) -> None:
    def limit(count: int) -> Callable[[dict[str, Any]], None]:
        return lambda application: application["args"].update(limits={"max_messages": count})

    def is_in_force(count: int) -> bool:
        messages = [{"role": "user", "content": "Hi"}] * (count + 1)
        with server.http() as http:
            answers = [http.post("/v1/chat/completions", json={"model": BASE, "messages": messages}) for _ in range(4)]
        return all(answer.status_code == 400 and f"{count}" in answer.text for answer in answers)

    with nobody_fails(server, expected):
        for count in range(50, 60):
            # Without waiting for the one before.
            server.redeploy(limit(count))
        until(lambda: is_in_force(59), "the last configuration", patience_s=2 * WAIT_S)
        server.redeploy(lambda application: application["args"]["models"][0].update(path="models/nowhere"))
        refused = "the bad configuration to be refused"
        until(lambda: server.deployment_status() == "DEPLOY_FAILED", refused, patience_s=WAIT_S)
        assert is_in_force(59)
        server.redeploy(lambda application: application["args"]["models"][0].update(path=f"models/{BASE}"))


def test_readers_that_do_not_read_hold_nobody_up(server: Server) -> None:
    address = urlparse(server.url)
    body = (
        b'{"model": "stdlib-chat", "stream": true, "max_tokens": 1500, "ignore_eos": true, '
        b'"messages": [{"role": "user", "content": "Hi"}]}'
    )
    slow = []
    for _ in range(4):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect((address.hostname, address.port))
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        slow.append(connection)
    with server.client() as client:
        for number in range(5):
            assert client.chat.completions.create(**options_of(number) | {"max_tokens": 20}).choices
    for connection in slow:
        connection.close()
    until(lambda: is_idle(server), "the engines to let go of readers that have gone", patience_s=WAIT_S)


@pytest.mark.parametrize("num_clients", [400, pytest.param(10_000, marks=pytest.mark.thorough)])
@pytest.mark.timeout(1800)
def test_clients_that_leave_at_any_moment_leave_nothing_behind(server: Server, num_clients: int) -> None:
    draw = random.Random(7)
    titles = ("Gateway", f"Model-{BASE}", "Tokenizer", "Safety", "Accounts")

    def leave_half_open() -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as half:
            half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n")

    def leave(number: int) -> None:
        if number % 20 == 0:
            leave_half_open()
            return
        timeout = httpx.Timeout(5.0, read=draw.choice([0.001, 0.01, 0.03, 0.1, 5.0]))
        with server.http(timeout) as http:
            try:
                body = options_of(number) | {"stream": True, "max_tokens": 60, "ignore_eos": True}
                body.pop("extra_body")
                with http.stream("POST", "/v1/chat/completions", json=body) as response:
                    for index, _ in enumerate(response.iter_lines()):
                        if index > number % 40:
                            return
            except httpx.HTTPError:
                return

    def held() -> tuple[int, int, int]:
        """Descriptors, threads and bytes."""
        processes = [process for title in titles for process in server.processes(title)]
        return (
            sum(process.num_fds() for process in processes),
            sum(process.num_threads() for process in processes),
            sum(process.memory_info().rss for process in processes),
        )

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(80)))
        until(lambda: is_idle(server), "the engines to let go")
        before = held()
        list(pool.map(leave, range(num_clients)))
    until(lambda: is_idle(server), "the engines to let go")
    # Some connections are kept open for a while, and some are pooled: not one for each request.
    until(lambda: held()[0] <= before[0] + 40, "connections to be closed", patience_s=WAIT_S)
    until(lambda: held()[1] <= before[1] + 20, "threads to end", patience_s=WAIT_S)
    print(f"held before and after {num_clients} clients: {before}, {held()}")
    # What is remembered of answers (timelines, records, prefixes) is bounded, and fills up first.
    assert held()[2] <= before[2] + (400 << 20)
    assert all(process.status() != psutil.STATUS_ZOMBIE for process in server.processes("ServeReplica"))
