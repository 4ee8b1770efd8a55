"""How a model replica gets an adapter's files when its node does not share the registry's folder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from adapters.errors import AdapterError, AdapterUnavailableError
from adapters.file_cache import FileCache, ReadFile
from adapters.identity import AdapterRef
from deployments.config import REGISTRY, AdapterCacheConfig
from deployments.handle_calls import UNREACHED, connected_handle, until_answered, unwrap

Locator = Callable[[AdapterRef], AdapterRef]
READ_TIMEOUT_S = 20.0
"""Bound on reading one chunk. One of the two threads that read adapters blocks meanwhile."""


def locator(config: AdapterCacheConfig | None) -> Locator:
    """Return a function that locates an adapter's files on this node and fetches missing ones from the registry.

    Without a `config` it returns each reference unchanged. Call this on a running event loop, and the returned function
    only from other threads: it blocks on that loop.
    """
    if config is None:
        return lambda ref: ref
    folder = os.path.expanduser(config.folder)
    return FileCache(folder, max_bytes=config.max_bytes, read=_ask_registry()).locate


def _ask_registry() -> ReadFile:
    registry = connected_handle(REGISTRY)
    # Serve's router may live on this loop; then the handle works only from here.
    loop = asyncio.get_running_loop()

    async def ask(ref: AdapterRef, file: str, offset: int) -> bytes:
        async with asyncio.timeout(READ_TIMEOUT_S):
            content: bytes = await until_answered(registry.read_file.remote(ref, file, offset))
        return content

    def read(ref: AdapterRef, file: str, offset: int) -> bytes:
        try:
            return asyncio.run_coroutine_threadsafe(ask(ref, file, offset), loop).result(2 * READ_TIMEOUT_S)
        except AdapterError as error:
            raise unwrap(error) from None
        except UNREACHED as error:
            raise AdapterUnavailableError(ref.name, "its files are on another node, which does not answer") from error

    return read
