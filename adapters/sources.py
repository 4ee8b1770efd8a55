"""Remote adapters: fetched from the Hugging Face hub, an object store or a web server.

    hf://org/name[@revision][/folder]     s3://bucket/folder     gs://bucket/folder     https://host/folder

Exactly two files are taken, the configuration and the safetensors, and neither is trusted: the caller validates the
result like an adapter from a folder. The files of a tokenizer, if there are any, are looked at before the tensors are
fetched, and not kept. Access is determined by the credentials that each library finds by itself (`HF_TOKEN`, `AWS_*`,
`GOOGLE_APPLICATION_CREDENTIALS`, `.netrc`), never by a request.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from tempfile import TemporaryDirectory

from adapters.errors import SERVER_TROUBLES, AdapterError
from adapters.folder import CONFIG_FILE, MAX_CONFIG_BYTES, TENSOR_FILE
from adapters.tokenizer_files import MAX_TOKENIZER_BYTES, TOKENIZER_FILES, check_tokenizer

_logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
READ_TIMEOUT_S = 30.0
"""For web servers and the hub; the other libraries have their own timeouts."""

_HUB = "hf://"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?:@[\w.-]+)?", re.ASCII)
# No escapes, no queries, and no "::", by which fsspec chains locations.
_PATH = re.compile(r"(?:(?!\.\.?/)(?:[\w.~@+=-]|:(?!:))+/)*", re.ASCII)


class SourceError(Exception):
    """An adapter's source fails or is too slow; the message is for a client and contains no address."""


class AdapterSources:
    """The places that adapters may be fetched from. Safe on any thread.

    Args:
        prefixes: permitted URL prefixes, each with a scheme and a trailing slash.
        max_bytes: bound on the total size of one adapter's files.
        timeout_s: bound on one fetch; checked between reads, which have the libraries' own timeouts.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        *,
        max_bytes: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefixes = tuple(prefixes)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._clock = clock

    def url_of(self, name: str, wanted: str) -> str:
        """Return the URL for a client's URL or hub id (`org/name`).

        Raises:
            AdapterError: it is under none of the prefixes, or has a part that could lead out of one.
        """
        url = (wanted if "://" in wanted else _HUB + wanted).removesuffix("/") + "/"
        path = next((url[len(prefix) :] for prefix in self._prefixes if url.startswith(prefix)), None)
        if path is None:
            raise AdapterError(name, "its source is not among 'registry.sources'")
        if _PATH.fullmatch(path) is None:
            raise AdapterError(name, "the URL of its source has parts other than names of letters, digits and -._~@+=:")
        return url.removesuffix("/")

    def may_be_hub_id(self, wanted: str) -> bool:
        """Tell whether a string that is not a folder may be a hub id, and some part of the hub is permitted."""
        return _HUB_ID.fullmatch(wanted) is not None and any(prefix.startswith(_HUB) for prefix in self._prefixes)

    def fetch(self, name: str, url: str, target: str, *, tokenizer: str | None = None) -> None:
        """Fetch the files of the adapter at a URL from `url_of` into an empty folder.

        Args:
            tokenizer: folder of the base model's, for `check_tokenizer`.

        Raises:
            AdapterError: there is none, it may not be read, it is too large, or was trained with another tokenizer.
            SourceError: its source fails or is too slow.
            OSError: the local disk is full, or another of `SERVER_TROUBLES`.
        """
        until_s = self._clock() + self._timeout_s
        try:
            copy = partial(self._copy, name, _reader(url), until_s)
            left = self._max_bytes - copy(os.path.join(target, CONFIG_FILE), min(self._max_bytes, MAX_CONFIG_BYTES))
            if tokenizer is not None:
                with TemporaryDirectory(dir=target) as beside:
                    for file in TOKENIZER_FILES:
                        _try_copy(copy, os.path.join(beside, file))
                    check_tokenizer(name, beside, tokenizer)
            copy(os.path.join(target, TENSOR_FILE), left)
        except (AdapterError, SourceError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in SERVER_TROUBLES:
                raise
            # Every library behind fsspec has its own errors. They contain addresses, so they are logged, not returned.
            _logger.warning("fetching adapter %r from %s: %r", name, url, error)
            if _is_absent(error):
                reason = f"its source lacks {CONFIG_FILE} or {TENSOR_FILE}, or this server may not read them"
                raise AdapterError(name, reason) from error
            if _status(error) // 100 == 3:
                raise AdapterError(name, "its source redirects, which is not followed") from error
            raise SourceError(f"The source of adapter {name!r} cannot be read now.") from error

    def _copy(
        self, name: str, read: Callable[[str], Iterator[bytes]], until_s: float, path: str, max_bytes: int
    ) -> int:
        """Copy the file that the path ends with from the source, and return its size; errors are the source's, too."""
        file = os.path.basename(path)
        with open(path, "xb") as copy:
            for chunk in read(file):
                if copy.tell() + len(chunk) > max_bytes:
                    raise AdapterError(name, f"{file} has more than the {max_bytes} bytes that are fetched")
                if self._clock() > until_s:
                    raise SourceError(f"The source of adapter {name!r} took longer than {self._timeout_s:g} s.")
                copy.write(chunk)
            return copy.tell()


def _try_copy(copy: Callable[[str, int], int], path: str) -> None:
    """Copy a file of a tokenizer, unless the source lacks it or redirects, which is not followed."""
    try:
        copy(path, MAX_TOKENIZER_BYTES)
    except (AdapterError, SourceError):
        raise
    except Exception as error:
        if not _is_absent(error) and _status(error) // 100 != 3:
            raise
        os.unlink(path)


def _reader(url: str) -> Callable[[str], Iterator[bytes]]:
    """Return a function that yields, in chunks, the content of a named file of the folder at a URL."""
    if url.startswith(_HUB):
        return _hub_reader(url.removeprefix(_HUB))
    # fsspec would follow a web server's redirects, which may lead out of the permitted prefixes.
    chunks = _chunks_over_http if url.startswith(("http://", "https://")) else _chunks
    return lambda file: chunks(f"{url}/{file}")


def _hub_reader(path: str) -> Callable[[str], Iterator[bytes]]:
    """Return a reader for the hub, pinned to the revision's current commit so that both files are consistent."""
    # Import the libraries only for a fetch: most servers never do one.
    from huggingface_hub import HfApi, get_token, hf_hub_url

    org, repository, *folders = path.split("/")
    repository, _, revision = repository.partition("@")
    repository = f"{org}/{repository}"
    found = HfApi().model_info(repository, revision=revision or None, timeout=READ_TIMEOUT_S)
    files = None if found.siblings is None else {each.rfilename for each in found.siblings}

    def chunks(file: str) -> Iterator[bytes]:
        path = "/".join((*folders, file))
        if files is not None and path not in files:
            raise FileNotFoundError(path)
        # The hub redirects requests for large files to its storage.
        location = hf_hub_url(repository, path, revision=found.sha)
        token = get_token()
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return _chunks_over_http(location, headers=headers, follow_redirects=True)

    return chunks


def _chunks_over_http(
    url: str, headers: Mapping[str, str] | None = None, *, follow_redirects: bool = False
) -> Iterator[bytes]:
    import httpx

    headers = {**(headers or {}), "accept-encoding": "identity"}
    with httpx.stream("GET", url, headers=headers, timeout=READ_TIMEOUT_S, follow_redirects=follow_redirects) as answer:
        answer.raise_for_status()
        # Chunks as they arrive: the caller checks its deadline between them.
        yield from answer.iter_raw()


def _chunks(url: str) -> Iterator[bytes]:
    import fsspec

    with fsspec.open(url, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _is_absent(error: Exception) -> bool:
    """Tell whether the error means that the file does not exist or may not be read."""
    # ValueError: the hub's client raises it for invalid ids.
    return isinstance(error, FileNotFoundError | PermissionError | ValueError) or _status(error) in (401, 403, 404, 410)


def _status(error: Exception) -> int:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else 0
