from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from openai import OpenAI

from app.access.tenants import key_digest
from tests.e2e.server import ROOT, Server, config_on_a_free_port, end_shared, key_of, shared

SHARERS = (
    ("test_advisories", "test_batches", "test_responses"),
    ("test_clients", "test_frameworks", "test_page", "test_serving", "test_workers"),
)
"""Files whose tests ask the server that knows tenants, and those that ask the one of `serve_config.yaml`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who shares a server comes one after the other, and last."""

    def turn(item: pytest.Item) -> int:
        is_here = item.path.parent == Path(__file__).parent
        return next((n for n, files in enumerate(SHARERS, start=1) if is_here and item.path.stem in files), 0)

    items.sort(key=turn)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    end_shared()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    """The server of `serve_config.yaml`, on a port of its own."""
    folder = tmp_path_factory.mktemp("config")
    return shared("plain", lambda: config_on_a_free_port(ROOT / "serve_config.yaml", folder, drafts=True))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Server:
    """One that knows four tenants, and logs JSON."""

    def make_config() -> Path:
        path = config_on_a_free_port(ROOT / "serve_config.yaml", tmp_path_factory.mktemp("guarded"))
        tree = yaml.safe_load(path.read_text())
        [application] = tree["applications"]
        application["args"]["tenants"] = [
            {"name": name, "keys_sha256": [key_digest(key_of(name))]} for name in ("blue", "red", "green", "white")
        ]
        application["args"]["tenants"][1]["models"] = ["stdlib-chat"]
        application["args"]["batches"] |= {"max_concurrent_requests": 2, "responses_last_s": 3600}
        application["logging_config"] = {"encoding": "JSON"}
        path.write_text(yaml.safe_dump(tree))
        return path

    return shared("guarded", make_config)


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client
