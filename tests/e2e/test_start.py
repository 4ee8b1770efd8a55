"""How a server starts, and how it says that it cannot."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from app.cli.preflight import HAPROXY_PORTS, free_ports
from app.cli.server_process import kill_session
from tests.e2e.server import ROOT, config_on_a_free_port, until

pytestmark = pytest.mark.e2e


def start(config: Path) -> subprocess.CompletedProcess[str]:
    """Start a server that is not expected to come up."""
    command = [sys.executable, "-m", "app.cli.entry", "serve", str(config)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return config_on_a_free_port(ROOT / "serve_config.yaml", tmp_path)


def test_a_port_in_use_is_one_clear_line(config: Path) -> None:
    with socket.socket() as taken:
        port = yaml.safe_load(config.read_text())["http_options"]["port"]
        taken.bind(("127.0.0.1", port))
        taken.listen()
        ended = start(config)
    assert ended.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("path: models/stdlib-chat", "path: models/nowhere", "applications[0].args.models[0].path"),
        ("path: models/guard", "paht: models/guard", "did you mean 'path'?"),
        ("name: Gateway", "name: Gatewy", "applications[0].deployments[0]"),
    ],
)
def test_a_mistake_in_the_configuration_is_one_line_with_its_place(
    old: str, new: str, line: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text((ROOT / "serve_config.yaml").read_text().replace(old, new))
    ended = start(config)
    assert ended.returncode == 2
    assert line in ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout


@pytest.mark.parametrize("damage", ["truncated", "unknown architecture"])
def test_a_broken_checkpoint_is_named_before_anything_starts(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "models" / "stdlib-chat", folder)
    if damage == "truncated":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
    else:
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(
            text.replace("LlamaForCausalLM", "MambaForCausalLM").replace("llama", "mamba")
        )
    tree = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    (model,) = tree["applications"][0]["args"]["models"]
    model["path"] = str(folder)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    ended = start(config)
    assert ended.returncode == 2
    assert str(folder) in ended.stdout + ended.stderr
    assert ended.stderr.strip().splitlines()[-1].startswith(("error:", "  "))


def test_plain_serve_run_works_and_says_once_what_is_lost(config: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # What is lost is only told; the ports are set so that it can run beside other servers.
    environment |= dict(zip(HAPROXY_PORTS, map(str, free_ports(4)), strict=True))
    output = tmp_path / "output"
    serve = Path(sys.executable).with_name("serve")
    with output.open("wb") as file:
        child = subprocess.Popen(
            [serve, "run", "--address", "local", str(config)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    port = yaml.safe_load(config.read_text())["http_options"]["port"]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False, timeout=60) as http:

            def answers() -> bool:
                assert child.poll() is None, output.read_text()
                try:
                    return http.get("/health").status_code == 200
                except httpx.TransportError:
                    return False

            until(answers, "plain `serve run` to answer")
            body = {"model": "stdlib-chat", "messages": [{"role": "user", "content": "What does os.getcwd do?"}]}
            answer = http.post("/v1/chat/completions", json=body | {"temperature": 0}).json()
            assert "current working directory" in answer["choices"][0]["message"]["content"]
        told = output.read_text()
        assert told.count("RAY_SERVE_ENABLE_HA_PROXY is not set") == 1
        assert told.count("RAY_SERVE_THROUGHPUT_OPTIMIZED is not set") == 1
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(60)
        finally:
            kill_session(child.pid)
