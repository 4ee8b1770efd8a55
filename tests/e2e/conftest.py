from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.e2e.server import ROOT, Server, config_on_a_free_port, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of `serve_config.yaml`, on a port of its own."""
    with running(config_on_a_free_port(ROOT / "serve_config.yaml", tmp_path_factory.mktemp("config"))) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client
