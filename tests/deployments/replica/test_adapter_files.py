"""A replica asks the registry for files that its node does not have."""

from __future__ import annotations

import asyncio
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from adapters.errors import AdapterError, AdapterUnavailableError
from adapters.folder import read_part
from adapters.identity import AdapterRef, adapter_digest
from adapters.registry import reference
from deployments.config import AdapterCacheConfig
from deployments.replica import adapter_files
from deployments.replica.adapter_files import locator
from tests.adapters.handmade import write


class Registry:
    """The registry's handle: `await read_file.remote(...)`, on the loop that it was made on."""

    def __init__(self, folder: str) -> None:
        self.folder, self.error = folder, None
        self.thread = threading.get_ident()
        self.read_file = self

    async def remote(self, ref: AdapterRef, file: str, offset: int) -> bytes:
        assert threading.get_ident() == self.thread
        if self.error is not None:
            raise self.error
        return read_part(ref.name, self.folder, file, offset)


@pytest.fixture
def found(tmp_path: Path) -> AdapterRef:
    return reference("a", write(tmp_path / "far"))


@pytest.fixture
def registry(found: AdapterRef, monkeypatch: pytest.MonkeyPatch) -> Any:
    registry = Registry(found.path)
    monkeypatch.setattr(adapter_files, "connected_handle", {"Registry": registry}.__getitem__)
    return registry


async def test_files_come_from_the_registry(found: AdapterRef, registry: Any, tmp_path: Path) -> None:
    config = AdapterCacheConfig(folder=str(tmp_path / "near"), max_bytes=1 << 30)
    locate = locator(config)
    here = await asyncio.to_thread(locate, AdapterRef(name="a", path="/nowhere", digest=found.digest))
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
async def test_a_registry_that_cannot_help_is_the_adapters_error_if_it_answers(
    registry: Any, found: AdapterRef, tmp_path: Path, error: Exception, words: str
) -> None:
    registry.error = error
    config = AdapterCacheConfig(folder=str(tmp_path / "near"), max_bytes=1 << 30)
    locate = locator(config)
    with pytest.raises(AdapterError, match=words) as raised:
        await asyncio.to_thread(locate, AdapterRef(name="a", path="/nowhere", digest=found.digest))
    assert isinstance(raised.value, AdapterUnavailableError) == (words == "does not answer")
    assert type(pickle.loads(pickle.dumps(raised.value))) is type(raised.value)
    assert list((tmp_path / "near").iterdir()) == []


def test_without_a_registry_files_are_where_they_are(found: AdapterRef) -> None:
    assert locator(None)(found) is found
