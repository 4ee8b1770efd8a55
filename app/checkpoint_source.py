"""Resolve a `path` of the settings, and tell its place if that fails: an existing folder, or a hub snapshot.

Only safetensors, JSON and tokenizer files are downloaded: no pickle, no code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adapters.errors import AdapterError
from engine.errors import CheckpointError, ConfigError

ALLOWED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
IGNORED_FILES = ("consolidated*", "original/*")
"""Duplicates of the weights in the format of their publisher's own code."""

_REFUSALS = frozenset(range(400, 500)) - {408, 429}
"""Statuses of the hub that another attempt does not change."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@contextmanager
def at(place: str) -> Iterator[None]:
    """Prefix errors in the block with their path in `args`."""
    try:
        yield
    except (AdapterError, CheckpointError) as error:
        raise ConfigError(f"args.{place}: {error}") from error
    except OSError as error:
        raise ConfigError(f"args.{place}: {error.filename} cannot be read: {error.strerror}") from error


class HubUnreachableError(CheckpointError):
    """A repository could not be fetched for a reason that may pass: no network, or a server's error."""


def is_hub_id(path: str) -> bool:
    """Return whether `path` is a hub id (`org/name`), and neither exists as a folder nor has an existing parent."""
    return _HUB_ID.fullmatch(path) is not None and not Path(path).exists() and not Path(path).parent.exists()


def local_folder(path: str) -> Path:
    """Return the absolute folder of a checkpoint or adapter, downloading it if `path` is a hub id.

    Raises:
        HubUnreachableError: the repository could not be fetched for now.
        CheckpointError: there is no such folder, and the repository does not exist or is not permitted.
    """
    if Path(path).is_dir():
        return Path(path).resolve()
    if not is_hub_id(path):
        raise CheckpointError(f"the folder '{path}' does not exist")
    return _fetched(path)


def _fetched(repository: str) -> Path:
    # Imported here because it takes a quarter of a second, which a start without hub ids saves.
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(
            snapshot_download(repository, allow_patterns=list(ALLOWED_FILES), ignore_patterns=list(IGNORED_FILES))
        ).resolve()
    except (HFValidationError, OSError) as error:
        # Joined, because only the last line would be shown as the reason why the server ends, without the name.
        reason = " ".join(str(error).split())
        is_refused = isinstance(error, HfHubHTTPError) and error.response.status_code in _REFUSALS
        is_final = is_refused or HF_HUB_OFFLINE or isinstance(error, HFValidationError)
        raise (CheckpointError if is_final else HubUnreachableError)(
            f"'{repository}' is no existing folder and could not be fetched from the Hugging Face hub: {reason}"
        ) from error
