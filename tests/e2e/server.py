"""A real server in a test: `antiphon serve` on a free port, ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from openai import DefaultHttpxClient, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from app.access.tenants import key_digest
from app.cli.preflight import free_ports
from app.cli.server_process import kill_session

ADMIN_KEY = "a key for tests"
ROOT = Path(__file__).parents[2]
PATIENCE_S = 150.0
"""Starting takes 15 to 25 seconds on two quiet cores; a test must not fail because the machine is busy."""


def key_of(tenant: str) -> str:
    """The key of a tenant of the server that tests share."""
    return f"k-{tenant}-7c1e"


class Server:
    """`antiphon serve`, with options, and all that it prints. No other one runs beside it."""

    def __init__(self, config: Path, *options: str) -> None:
        end_shared()
        self.config = config
        self.port = int(yaml.safe_load(config.read_text())["http_options"]["port"])
        self.url = f"http://127.0.0.1:{self.port}"
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-u",
                "-m",
                "app.cli.entry",
                "serve",
                str(config),
                "--ready-timeout-s",
                str(PATIENCE_S),
                *options,
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def whole_output(self) -> list[str]:
        """The lines of a server that has ended."""
        self._reader.join(10)
        return self.lines

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while "Ready after" not in self.output:
            is_waiting = self.process.poll() is None and time.monotonic() < deadline_s
            assert is_waiting, self.output
            time.sleep(0.05)

    def redeploy(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the application in the configuration and hand it over as `serve deploy` does, which does not wait.

        Of a server with `--dashboard`.
        """
        tree = yaml.safe_load(self.config.read_text())
        change(tree["applications"][0])
        self.config.write_text(yaml.safe_dump(tree))
        self._ask_serve("PUT", json=tree)

    def deployment_status(self) -> str:
        """What Serve says of the application, such as "RUNNING"."""
        [application] = self._ask_serve("GET").json()["applications"].values()
        return str(application["status"])

    def _ask_serve(self, method: str, **content: Any) -> httpx.Response:
        found = re.search(r"dashboard at\s+\S*(http://[\d.]+:\d+)", self.output)
        assert found is not None, self.output
        token = Path("~/.ray/auth_token").expanduser().read_text().strip()
        url, headers = f"{found[1]}/api/serve/applications/", {"authorization": f"Bearer {token}"}
        with httpx.Client(timeout=60, trust_env=False, verify=False) as http:
            return http.request(method, url, headers=headers, **content).raise_for_status()

    def stop(self) -> int:
        """Interrupt it as Ctrl-C does; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(60)
        finally:
            kill_session(self.process.pid)

    def kill(self) -> None:
        """End it and all that it started at once; how it ends by itself is for tests of that to see."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                kill_session(child.pid)
        kill_session(self.process.pid)
        self.process.wait()

    def processes(self, title: str) -> list[psutil.Process]:
        """The server's processes whose title contains `title`, as Ray writes it."""
        return [p for p in psutil.Process(self.process.pid).children(recursive=True) if title in _title_of(p)]

    def log_folder(self) -> Path:
        """Where the logs of Ray, Serve and all deployments are."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            found = re.search(r"--(?:log_dir|logs-dir|log-dir)=(\S+)", " ".join(process.cmdline()))
            if found:
                return Path(found.group(1))
        raise AssertionError("no process of Ray's names its folder of logs")

    def client(self, **options: Any) -> OpenAI:
        defaults = {"api_key": "unused", "max_retries": 0, "timeout": 60}
        return OpenAI(base_url=f"{self.url}/v1", http_client=DefaultHttpxClient(verify=False), **defaults | options)

    def http(self, timeout: httpx.Timeout | float = 60) -> httpx.Client:
        # There is nothing to verify, and to read the certificates takes longer than most of what is asked.
        return httpx.Client(base_url=self.url, timeout=timeout, trust_env=False, verify=False)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of a metric whose labels include `labels`."""
        with self.http() as http:
            text = http.get("/metrics").text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)


@contextlib.contextmanager
def running(config: Path, *options: str) -> Iterator[Server]:
    """A server that answers, for as long as the block lasts."""
    server = Server(config, *options)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


_shared: dict[str, Server] = {}


def shared(name: str, make_config: Callable[[], Path]) -> Server:
    """The server of that name, for every file that asks for it; it ends when another one is started."""
    server = _shared.get(name)
    if server is None or server.process.poll() is not None:
        server = _shared[name] = Server(make_config())
    server.wait_until_ready()
    return server


def end_shared() -> None:
    """End the server that files share, if there is one."""
    while _shared:
        _shared.popitem()[1].kill()


def _title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        # It has just ended.
        return ""


def config_on_a_free_port(source: Path, folder: Path, *, drafts: bool = False) -> Path:
    """A copy of a config file of ours, on a port of its own.

    Without drafts a stream lasts as long as it has tokens, whatever these repeat: tests do things in its midst.
    """
    tree = yaml.safe_load(source.read_text())
    tree["http_options"] = {"host": "127.0.0.1", "port": free_ports(1)[0]}
    for application in tree["applications"]:
        for model in [] if drafts else application["args"]["models"]:
            model["engine"] = model.get("engine", {}) | {"num_speculative_tokens": 0}
        # What one test loads is nothing to the next.
        application["args"]["registry"] = {"folder": str(folder / "registry"), "watch_period_s": 0.2}
        application["args"]["accounts"] = {"spool_folder": str(folder / "usage")}
        application["args"]["batches"] = {"folder": str(folder / "batches")}
        application["args"]["admin_key_sha256"] = key_digest(ADMIN_KEY)
    target = folder / source.name
    target.write_text(yaml.safe_dump(tree))
    return target


def until(is_true: Callable[[], bool], what: str, *, patience_s: float = PATIENCE_S) -> None:
    """Poll until something has happened."""
    deadline_s = time.monotonic() + patience_s
    while not is_true():
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        time.sleep(0.05)
