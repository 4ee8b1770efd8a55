"""Adapter names: which are valid, and which content they refer to. Base models share the namespace.

Standard library only. Names come from operators; a name from a client is only looked up, never joined to a path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice

from adapters.errors import AdapterError
from adapters.folder import CONFIG_FILE, PICKLE_FILES, TENSOR_FILE
from adapters.identity import AdapterRef, Check, content_digest, labels_in, read_adapter
from adapters.tensor_file import TensorFile
from adapters.tokenizer_files import TOKENIZER_FILES, check_tokenizer

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_TENSOR_FILES = (TENSOR_FILE, *PICKLE_FILES)


class DeclaredNames:
    """The names that one configuration declares, each for one adapter of one base model.

    Args:
        taken: names that no adapter can have, and what has them.
    """

    def __init__(self, taken: Mapping[str, str]) -> None:
        self._taken = taken
        self._declared_by_name: dict[str, tuple[AdapterRef, str]] = {}

    def declare(self, ref: AdapterRef, base: str) -> AdapterRef:
        """Add a reference of a base model and return it; adding the same one again has no effect.

        Raises:
            AdapterError: the name is invalid or taken, or is declared for another adapter or base model.
        """
        check_name(ref.name)
        if ref.name in self._taken:
            raise AdapterError(ref.name, f"{self._taken[ref.name]} has this name")
        known, known_base = self._declared_by_name.setdefault(ref.name, (ref, base))
        if known != ref:
            raise AdapterError(ref.name, "another adapter is declared under this name")
        if known_base != base:
            raise AdapterError(ref.name, f"it is declared for the base model {known_base} already")
        return ref


def check_name(name: str) -> None:
    """Refuse a name that is not `[A-Za-z0-9._-]{1,128}`, or only dots.

    Raises:
        AdapterError: the name is invalid; the message states the rule.
    """
    if _NAME.fullmatch(name) is None or not name.strip("."):
        raise AdapterError(name[:128], "a name has 1 to 128 letters, digits, dots, underscores or hyphens")


Signature = str
"""Fingerprint of an adapter's file metadata: if it is equal, the files have not changed."""


Examine = Callable[[str, TensorFile], object]
"""Raises `AdapterError` for content that cannot be served, given the adapter's name."""


def reference(
    name: str,
    folder: str,
    check: Check | None = None,
    examine: Examine | None = None,
    tokenizer: str | None = None,
) -> AdapterRef:
    """Return a reference, under a name, to the adapter that is now in a folder.

    Args:
        tokenizer: folder of the base model's, for `check_tokenizer`.

    Raises:
        AdapterError: the folder does not hold a readable adapter, `check` or `examine` refuses it, or it was trained
            with another tokenizer.
    """
    path = os.path.realpath(folder)
    check_tokenizer(name, path, tokenizer)
    config, tensors = read_adapter(name, path, check)
    if examine is not None:
        examine(name, tensors)
    return AdapterRef(
        name=name,
        path=path,
        digest=content_digest(config, tensors),
        invocation_ids=config.invocation_ids,
        num_labels=labels_in(tensors),
    )


def reference_in(
    root: str,
    name: str,
    allowed: Sequence[str] = (),
    check: Check | None = None,
    examine: Examine | None = None,
    tokenizer: str | None = None,
) -> AdapterRef:
    """Return a reference to one of the `sub_folders` of a drop-in folder; the sub-folder's name is the adapter's.

    Args:
        allowed: further folders that adapters may be loaded from.

    Raises:
        AdapterError: as `reference`, the name is invalid, or the sub-folder is a link that leads out of all these
            folders.
    """
    check_name(name)
    path = permitted_folder(os.path.abspath(os.path.join(root, name)), (root, *allowed))
    if path is None:
        raise AdapterError(name, "its folder is a link that leads out of those that adapters may be loaded from")
    return reference(name, path, check, examine, tokenizer)


def permitted_folder(folder: str, roots: Sequence[str]) -> str | None:
    """Resolve a folder against each root in turn; return it if it is inside any root after links, else None."""
    resolved = [*map(os.path.realpath, roots)]
    for root in resolved:
        try:
            path = os.path.realpath(os.path.join(root, folder))
        except ValueError:
            return None
        if os.path.isdir(path) and any(path != r and os.path.commonpath((r, path)) == r for r in resolved):
            return path
    return None


def sub_folders(root: str) -> list[str]:
    """Return the names of sub-folders with a file of an adapter, sorted; names that start with a dot are skipped.

    One that lacks the other file is among them, so that it is reported.

    Raises:
        AdapterError: there is no such folder.
    """
    return [name for name in _names_in(root) if _is_adapter(os.path.join(root, name))]


def nested_adapters(root: str, known: Collection[str] = ()) -> list[str]:
    """Return the paths in `root` of adapters that are not in sub-folders of it, and therefore not found.

    These are `root` itself (`os.curdir`), and those one level too deep, one for each sub-folder that has any.

    Args:
        known: sub-folders that need no look because they are adapters.

    Raises:
        AdapterError: there is no such folder.
    """
    found = [os.curdir] if _is_adapter(root) else []
    for name in _names_in(root):
        if name in known:
            continue
        folder = os.path.join(root, name)
        # A link may lead to a folder that adapters may not be loaded from.
        if os.path.islink(folder) or _is_adapter(folder):
            continue
        try:
            inner = sorted(os.listdir(folder))
        except OSError:
            continue  # a file, or a folder of somebody else
        paths = (os.path.join(name, each) for each in inner if not each.startswith("."))
        found += islice((path for path in paths if os.path.lexists(os.path.join(root, path, CONFIG_FILE))), 1)
    return found


def _names_in(root: str) -> list[str]:
    if not os.path.isdir(root):
        raise AdapterError(os.path.basename(root), f"there is no folder {root}")
    return sorted(name for name in os.listdir(root) if not name.startswith("."))


def _is_adapter(folder: str) -> bool:
    return any(os.path.lexists(os.path.join(folder, file)) for file in (CONFIG_FILE, *_TENSOR_FILES))


def signatures(root: str) -> dict[str, Signature]:
    """Return the signature of every sub-folder that has both adapter files, or a pickle, which is refused by its name.

    Raises:
        AdapterError: there is no such folder.
    """
    found = {}
    # Two lookups for each of perhaps thousands, again and again, and maybe on a network's disk.
    for name in _names_in(root):
        config = _state_of(os.path.join(root, name, CONFIG_FILE))
        if config is None:
            continue
        tensors = next(filter(None, (_state_of(os.path.join(root, name, file)) for file in _TENSOR_FILES)), None)
        if tensors is not None:
            found[name] = f"{config} {tensors}"
    return found


def tokenizer_signature(folder: str) -> Signature:
    """Return the signature of a folder's `TOKENIZER_FILES`."""
    return " ".join(str(_state_of(os.path.join(folder, file))) for file in TOKENIZER_FILES)


def _state_of(file: str) -> str | None:
    """Return what changes when a file does, or None if there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    # Programs can set mtime freely, and inode numbers are reused.
    return f"{found.st_mtime_ns} {found.st_ctime_ns} {found.st_size} {found.st_ino}"
