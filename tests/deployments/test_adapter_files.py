"""A replica asks the registry for files that its node does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import serve
from ray.exceptions import ActorDiedError, RayTaskError

from adapters.errors import AdapterError
from adapters.folder import read_part
from adapters.identity import AdapterRef, adapter_digest
from adapters.registry import reference
from deployments.adapter_files import READ_TIMEOUT_S, locator
from deployments.config import AdapterCacheConfig
from tests.adapters.handmade import write


class Registry:
    """The registry's handle: `read_file.remote(...).result(...)`."""

    def __init__(self, folder: str) -> None:
        self.folder, self.error = folder, None
        self.read_file = self

    def remote(self, ref: AdapterRef, file: str, offset: int) -> Registry:
        self._wanted = ref.name, self.folder, file, offset
        return self

    def result(self, *, timeout_s: float) -> bytes:
        assert timeout_s == READ_TIMEOUT_S
        if self.error is not None:
            raise self.error
        return read_part(*self._wanted)


@pytest.fixture
def found(tmp_path: Path) -> AdapterRef:
    return reference("a", write(tmp_path / "far"))


@pytest.fixture
def registry(found: AdapterRef, monkeypatch: pytest.MonkeyPatch) -> Any:
    registry = Registry(found.path)
    monkeypatch.setattr(serve, "get_deployment_handle", lambda name, app: {("Registry", "app"): registry}[name, app])
    return registry


def test_files_come_from_the_registry(found: AdapterRef, registry: Any, tmp_path: Path) -> None:
    config = AdapterCacheConfig(folder=str(tmp_path / "near"), max_bytes=1 << 30)
    here = locator(config, "app")(AdapterRef(name="a", path="/nowhere", digest=found.digest))
    assert here.path == str(tmp_path / "near" / found.digest)
    assert adapter_digest(here.path) == found.digest


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RayTaskError("read_file", "", AdapterError("a", "it is gone")).as_instanceof_cause(), "it is gone"),
        (ActorDiedError(), "does not answer"),
        (TimeoutError(), "does not answer"),
    ],
)
def test_a_registry_that_cannot_help_is_the_adapters_error(
    registry: Any, found: AdapterRef, tmp_path: Path, error: Exception, words: str
) -> None:
    registry.error = error
    config = AdapterCacheConfig(folder=str(tmp_path / "near"), max_bytes=1 << 30)
    with pytest.raises(AdapterError, match=words) as raised:
        locator(config, "app")(AdapterRef(name="a", path="/nowhere", digest=found.digest))
    assert type(raised.value) is AdapterError
    assert list((tmp_path / "near").iterdir()) == []


def test_without_a_registry_files_are_where_they_are(found: AdapterRef) -> None:
    assert locator(None, "app")(found) is found
