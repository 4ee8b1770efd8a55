from __future__ import annotations

import errno
import json
import multiprocessing
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from app.checkpoint_source import HubUnreachableError
from app.cli import main as cli
from app.cli import readiness
from app.cli.config_lint import overlooked_adapters
from app.cli.server_process import kill_session
from loadtest.geometries import CONFIG_BY_NAME
from tests.app.cli.test_config_lint import good_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(good_config(tmp_path))
    return path


class FakeServer:
    """A child that is up, or fails as it is told."""

    fails: str | None = None
    started: ClassVar[list[FakeServer]] = []

    def __init__(
        self, config: Path, environment: Mapping[str, str], *, address: str, drain_s: float, has_dashboard: bool
    ) -> None:
        self.environment, self.address, self.is_stopped = dict(environment), address, False
        self.drain_s, self.has_dashboard = drain_s, has_dashboard
        FakeServer.started.append(self)

    def failure(self) -> str | None:
        return self.fails

    def has_ended(self) -> bool:
        raise KeyboardInterrupt  # as a Ctrl-C while it serves

    def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeServer]:
    monkeypatch.setattr(cli, "ServerProcess", FakeServer)
    monkeypatch.setattr(cli.compiling, "begin", lambda: None)
    monkeypatch.setattr(cli.preflight, "listen_error", lambda host, port: None)
    monkeypatch.setattr(cli.signal, "signal", lambda number, handler: None)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(FakeServer, "started", [])
    monkeypatch.setattr(FakeServer, "fails", None)
    return FakeServer


def test_a_good_file_validates(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", str(config)]) == 0
    assert "is valid" in capsys.readouterr().out


def test_an_adapter_that_lies_too_deep_to_be_found_is_noted(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was ignored without a word, until the log of a running server."""
    for nested in ("team/mine", "team2/named"):
        (tmp_path / "drop-in" / nested).mkdir(parents=True)
        (tmp_path / "drop-in" / nested / "adapter_config.json").write_text("{}")
    text, model = config.read_text(), f"{{name: base, path: {tmp_path}"
    assert model in text
    more = f"{model}, adapter_folder: {tmp_path}/drop-in"
    config.write_text(text.replace(model, more))
    assert cli.main(["check", str(config)]) == 0
    place = "note: applications[0].args.models[0].adapter_folder: the adapter in"
    notes = capsys.readouterr().out.splitlines()[:-1]
    assert [note.split("'")[:2] for note in notes] == [
        [f"{place} ", f"{tmp_path}/drop-in/{nested}"] for nested in ("team/mine", "team2/named")
    ]
    config.write_text(text.replace(model, f"{more}, adapters: [{{name: a, path: {tmp_path}/drop-in/team2/named}}]"))
    (line,) = overlooked_adapters(config)
    assert "team/mine" in line
    config.write_text(text.replace(model, f"{more}/team/mine"))
    (line,) = overlooked_adapters(config)
    assert f"the adapter in '{tmp_path}/drop-in/team/mine' is not loaded" in line


@pytest.mark.parametrize("command", ["validate", "serve"])
def test_mistakes_are_listed_and_nothing_is_started(
    config: Path, server: type[FakeServer], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    config.write_text(config.read_text().replace("models:", "modles:"))
    assert cli.main([command, str(config)]) == 2
    assert "applications[0].args.modles: unknown key; did you mean 'models'?" in capsys.readouterr().err
    assert server.started == []


def unreachable(config: str, reads_all: bool, fetches: bool) -> tuple[list[str], list[str]]:
    raise HubUnreachableError(f"{config}: models[0].path: no network")


def test_a_start_without_a_network_may_succeed_later(
    config: Path, monkeypatch: pytest.MonkeyPatch, server: type[FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended as a wrong configuration does, after which systemd starts no other one."""
    monkeypatch.setattr(cli, "_mistakes", unreachable)
    assert cli.main(["serve", str(config)]) == 1
    assert capsys.readouterr().err == f"error: {config}: models[0].path: no network\n"
    assert server.started == []


def check_for_ever(config: str, reads_all: bool, fetches: bool) -> tuple[list[str], list[str]]:
    os.write(int(config), b"checks")
    signal.pause()
    return [], []


def test_nobody_checks_on_once_the_command_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGTERM in the first second left a process that waited forever, and held the output open."""
    monkeypatch.setattr(cli, "_mistakes", check_for_ever)
    read_end, write_end = os.pipe()
    command = os.fork()
    if command == 0:
        os.setsid()
        cli._check(str(write_end), reads_all=False)
    os.close(write_end)
    assert os.read(read_end, 100) == b"checks"
    os.kill(command, signal.SIGTERM)
    os.waitpid(command, 0)
    try:
        # It ends once nobody can write any more.
        assert select.select([read_end], [], [], 30)[0]
        assert os.read(read_end, 100) == b""
    finally:
        kill_session(command)
        os.close(read_end)


def interrupt_and_check_for_ever(config: str, reads_all: bool, fetches: bool) -> tuple[list[str], list[str]]:
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()
    return [], []


def test_no_check_is_waited_for_once_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C waited for the end of the check, and of downloads; a second one left both processes waiting for ever."""
    monkeypatch.setattr(cli, "_mistakes", interrupt_and_check_for_ever)
    with pytest.raises(KeyboardInterrupt):
        cli._check("config", reads_all=False)
    assert multiprocessing.active_children() == []


def die(config: str, reads_all: bool, fetches: bool) -> tuple[list[str], list[str]]:
    os._exit(7)


def test_a_check_that_is_killed_has_failed(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for want of memory."""
    monkeypatch.setattr(cli, "_mistakes", die)
    assert cli.main(["check", str(config)]) == 1
    assert capsys.readouterr().err == f"error: {config} could not be checked: the process for it has died\n"


def test_env_prints_lines_for_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--drain-s", "45"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("export ") and "  # " in line for line in lines)
    assert any(line.startswith("export RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S=45 ") for line in lines)
    # Without it, a minute without the head ended every node of a cluster.
    assert any(line.startswith("export RAY_gcs_rpc_server_reconnect_timeout_s=600 ") for line in lines)


def test_serve_sets_the_environment_tells_what_it_keeps_and_says_when_it_is_ready(
    config: Path, server: type[FakeServer], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    answers = iter(["status 503", None])
    monkeypatch.setattr(readiness, "unready_state", lambda url: asked.append(url) or next(answers))
    monkeypatch.setattr(readiness, "_POLL_S", 0)
    monkeypatch.setattr(cli.preflight, "has_haproxy", lambda: True)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_NBTHREAD", "3")
    monkeypatch.setattr(cli.os, "cpu_count", lambda: 2)
    assert cli.main(["serve", str(config), "--drain-s", "7"]) == 0
    output = capsys.readouterr().out
    (started,) = server.started
    assert started.is_stopped
    assert (started.address, started.drain_s, started.has_dashboard) == ("local", 7.0, False)
    assert started.environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert started.environment["RAY_AUTH_MODE"] == "token"
    assert started.environment["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] == "2"
    assert started.environment["RAY_SERVE_HAPROXY_NBTHREAD"] == "3"
    assert started.environment["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    [kept] = [line for line in output.splitlines() if "RAY_" in line]
    assert kept.startswith("note: RAY_SERVE_HAPROXY_NBTHREAD=3 is kept; ")
    assert asked == ["http://127.0.0.1:8000/health"] * 2
    assert "at http://127.0.0.1:8000" in output
    assert "curl -N http://127.0.0.1:8000/v1/chat/completions" in output


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Ray heeds TMPDIR on Linux only")
def test_a_long_path_to_temporary_files_keeps_no_server_from_starting(
    config: Path, server: type[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv("TMPDIR", "/scratch/" + "x" * 60)
    monkeypatch.setattr(readiness, "unready_state", lambda url: None)
    assert cli.main(["serve", str(config)]) == 0
    assert server.started[0].environment["RAY_TMPDIR"] == "/tmp"


def test_nobody_else_reaches_the_socket_that_rules_haproxy_and_nothing_is_left_of_it(
    config: Path, server: type[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[tuple[Path, int]] = []

    def look(url: str) -> None:
        folder = Path(server.started[0].environment["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent
        folders.append((folder, stat.S_IMODE(folder.stat().st_mode)))

    monkeypatch.setattr(readiness, "unready_state", look)
    monkeypatch.setattr(cli.preflight, "has_haproxy", lambda: True)
    assert cli.main(["serve", str(config)]) == 0
    [(folder, mode)] = folders
    assert mode == 0o700
    assert not folder.exists()


def test_where_few_files_may_be_open_haproxy_takes_fewer_connections_and_that_is_told(
    config: Path, server: type[FakeServer], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "unready_state", lambda url: None)
    monkeypatch.setattr(cli.preflight, "has_haproxy", lambda: True)
    monkeypatch.setattr(cli.resource, "getrlimit", lambda limit: (1024, 4096))
    assert cli.main(["serve", str(config)]) == 0
    assert server.started[0].environment["RAY_SERVE_HAPROXY_MAXCONN"] == "1598"
    assert (
        "note: the limit of 4096 open files (ulimit -Hn) limits HAProxy to 1598 connections" in capsys.readouterr().out
    )


def test_without_haproxy_pythons_proxy_stands_in(
    config: Path, server: type[FakeServer], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "unready_state", lambda url: None)
    monkeypatch.setattr(cli.preflight, "has_haproxy", lambda: False)
    assert cli.main(["serve", str(config)]) == 0
    assert server.started[0].environment["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert "HAProxy is not available" in capsys.readouterr().out


def test_a_failed_deployment_is_an_error_with_its_reason(
    config: Path, server: type[FakeServer], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "fails", "application 'default' failed to deploy: no such checkpoint")
    assert cli.main(["serve", str(config)]) == 1
    assert capsys.readouterr().err == "error: application 'default' failed to deploy: no such checkpoint\n"
    assert server.started[0].is_stopped


def test_who_loses_the_port_to_one_that_started_meanwhile_is_told_so(
    config: Path, server: type[FakeServer], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last line was HAProxy's that some protocols failed to start their listeners."""

    def lose(self: FakeServer) -> str:
        taken = OSError(errno.EADDRINUSE, "Address already in use")
        monkeypatch.setattr(cli.preflight, "listen_error", lambda host, port: taken)
        return "some protocols failed"

    monkeypatch.setattr(server, "failure", lose)
    assert cli.main(["serve", str(config)]) == 1
    told = "error: port 8000 on 127.0.0.1 is in use by another process that started meanwhile; some protocols failed\n"
    assert capsys.readouterr().err == told


class Unready(BaseHTTPRequestHandler):
    """Whose only answer is that its model still loads."""

    def do_GET(self) -> None:
        self.send_response(503)
        self.end_headers()
        self.wfile.write(b'{"models":\n {"base": "starting"}}')

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_server_that_never_gets_ready_is_given_up_with_its_last_answer(
    config: Path, server: type[FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    with HTTPServer(("127.0.0.1", 0), Unready) as unready:
        threading.Thread(target=unready.serve_forever, daemon=True).start()
        config.write_text(config.read_text().replace("8000", str(unready.server_port)))
        assert cli.main(["serve", str(config), "--ready-timeout-s", "0"]) == 1
        unready.shutdown()
    told = f"http://127.0.0.1:{unready.server_port}/health did not return 200, but status 503: "
    assert told + '{"models": {"base": "starting"}}' in capsys.readouterr().err
    assert cli.main(["serve", str(config), "--ready-timeout-s", "0"]) == 1
    assert "did not return 200, but no answer ([Errno" in capsys.readouterr().err
    # It started a server only to stop it, and with "nan" would have waited for one forever.
    assert cli.main(["serve", str(config), "--ready-timeout-s", "-1"]) == 2


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EADDRINUSE, "Address already in use"), "port 8000 on 127.0.0.1 is in use"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "127.0.0.1, port 8000: Name or service not"),
    ],
)
def test_a_place_where_nothing_can_listen_is_one_line(
    config: Path,
    server: type[FakeServer],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: OSError,
    told: str,
) -> None:
    monkeypatch.setattr(cli.preflight, "listen_error", lambda host, port: error)
    # It may be free at the next start, unlike a wrong configuration.
    assert cli.main(["serve", str(config)]) == 1
    assert told in capsys.readouterr().err
    assert server.started == []


@pytest.mark.parametrize(
    ("host", "args", "starts"),
    [
        ("0.0.0.0", {}, False),
        ("10.0.0.5", {"tenants": []}, False),
        ("0.0.0.0", {"allow_anonymous": True}, True),
        ("0.0.0.0", {"tenants": [{"name": "a", "keys_sha256": ["a" * 64]}]}, True),
        ("localhost", {}, True),
        ("::1", {}, True),
    ],
)
def test_nobody_listens_to_strangers_by_accident(
    config: Path,
    server: type[FakeServer],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    args: dict[str, object],
    starts: bool,
) -> None:
    monkeypatch.setattr(readiness, "unready_state", lambda url: None)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    tree = yaml.safe_load(config.read_text())
    tree["http_options"]["host"] = host
    tree["applications"][0]["args"] |= args
    config.write_text(yaml.safe_dump(tree))
    assert cli.main(["serve", str(config)]) == (0 if starts else 2)
    assert bool(server.started) == starts
    assert starts or "tenants" in capsys.readouterr().err


@pytest.mark.parametrize("has_haproxy", [True, False])
def test_by_the_sixth_version_of_ip_only_pythons_proxy_serves(
    config: Path,
    server: type[FakeServer],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    has_haproxy: bool,
) -> None:
    """HAProxy found no gateway, and a quarter of an hour later the start was given up."""
    monkeypatch.setattr(readiness, "unready_state", lambda url: None)
    monkeypatch.setattr(cli.preflight, "has_haproxy", lambda: has_haproxy)
    config.write_text(config.read_text().replace("host: 127.0.0.1", "host: '::1'"))
    assert cli.main(["serve", str(config)]) == (2 if has_haproxy else 0)
    told = capsys.readouterr()
    assert ("RAY_SERVE_ENABLE_HA_PROXY=0" in told.err) == has_haproxy
    assert ("Ready after 0 s at http://[::1]:8000\n" in told.out) == (not has_haproxy)


def test_a_cluster_that_is_gone_is_named(
    config: Path,
    server: type[FakeServer],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    note = tmp_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    monkeypatch.setattr(readiness, "unready_state", lambda url: None)
    # Held and not listened on: nobody answers there, and nobody else can begin to.
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        note.write_text(f"127.0.0.1:{held.getsockname()[1]}")
        assert cli.main(["serve", str(config)]) == 0
        assert f"note: {note} is left from a cluster that is gone" in capsys.readouterr().out
        assert cli.main(["serve", str(config), "--address", "auto"]) == 1
        assert f"{note} is stale: remove it" in capsys.readouterr().err
        note.unlink()
        assert cli.main(["serve", str(config), "--address", f"127.0.0.1:{held.getsockname()[1]}"]) == 1
        assert "no Ray cluster responds at 127.0.0.1:" in capsys.readouterr().err
        # Ray ended with a traceback.
        assert cli.main(["serve", str(config), "--address", "head-node"]) == 2
        assert "error: --address: 'head-node' is neither" in capsys.readouterr().err


def test_every_command_needs_only_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["nope"], ["serve", "--nope"]):
        assert cli.main(arguments) == 2


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["models/stdlib-chat", "--device", "h100", "--price-per-hour", "2"], 0, ["weights", "0.01 GB", "3,072 bytes"]),
        (["models/stdlib-chat", "--device", "abacus"], 2, ["abacus", "h200", "bfloat16"]),
        (["nowhere"], 2, ["nowhere"]),
    ],
)
def test_a_plan_says_what_fits(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, words: list[str]
) -> None:
    assert cli.main(["plan", *arguments]) == status
    told = capsys.readouterr()
    assert all(word in told.out + told.err for word in words)


def test_a_plan_counts_weights_of_few_bits_as_they_are_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of Llama 3.1 8B the layers' 6.98 billion weights have 4 bits and a share of a scale, the others two bytes."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    fields = CONFIG_BY_NAME["llama-3.1-8b"] | {"eos_token_id": 2, "quantization_config": awq}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert cli.main(["plan", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "4-bit" in told
    assert "5.81 GB" in told


def test_a_benchmark_gets_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def run(module: str, **_: object) -> None:
        given.append([module, *sys.argv[1:]])
        sys.exit(3)

    monkeypatch.setattr(sys, "argv", ["antiphon", "bench"])
    monkeypatch.setattr(cli.runpy, "run_module", run)
    assert cli.main(["bench", "models/stdlib-chat", "--batches", "1"]) == 3
    assert given == [["loadtest.bench_engine", "models/stdlib-chat", "--batches", "1"]]


def test_a_benchmark_is_interrupted_without_a_traceback(tmp_path: Path) -> None:
    """Its child printed one."""
    command = [sys.executable, "-m", "app.cli.entry", "bench", str(tmp_path)]
    # Reading this checkpoint waits for a writer.
    os.mkfifo(tmp_path / "config.json")
    bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    with (tmp_path / "config.json").open("wb"):
        os.killpg(bench.pid, signal.SIGINT)
        told = bench.communicate()[0].decode()
    assert bench.returncode != 0
    assert "Traceback" not in told


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{version('antiphon')}\n"
