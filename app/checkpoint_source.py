"""A `path` of the settings -> an absolute folder: one that exists, or a snapshot from the Hugging Face hub.

Only safetensors, JSON and tokenizer text are fetched: no pickle, no code.
"""

from __future__ import annotations

import re
from pathlib import Path

from engine.errors import CheckpointError

ALLOWED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
IGNORED_FILES = ("consolidated*", "original/*")
"""The same weights once more, as their makers' own code reads them."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def is_hub_id(path: str) -> bool:
    """Tell whether `path` names a repository of the hub (`org/name`) and no existing folder or its child."""
    return _HUB_ID.fullmatch(path) is not None and not Path(path).exists() and not Path(path).parent.exists()


def local_folder(path: str) -> Path:
    """Return the absolute folder of a checkpoint or adapter, fetching it where `path` is a hub id.

    Raises:
        CheckpointError: there is no such folder, and no such repository or no way to it.
    """
    if Path(path).is_dir():
        return Path(path).resolve()
    if not is_hub_id(path):
        raise CheckpointError(f"the folder '{path}' does not exist")
    return _fetched(path)


def _fetched(repository: str) -> Path:
    # A quarter of a second of imports, which every start without a hub id is spared.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(repository, allow_patterns=list(ALLOWED_FILES), ignore_patterns=list(IGNORED_FILES))
        ).resolve()
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        # Of several lines only the last would be told as the reason why the server ends, without the name.
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"'{repository}' is no existing folder and could not be fetched from the Hugging Face hub: {reason}"
        ) from error
