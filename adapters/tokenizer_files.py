"""The tokenizer that an adapter was trained with, compared with its base model's. Standard library only.

An adapter is served with the base's tokenizer. If its own has other tokens, it would be given others than it was
trained with, and nothing would say so. The files are optional, and only read to find that out.
"""

from __future__ import annotations

import filecmp
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from adapters.errors import AdapterError
from adapters.folder import open_under

TOKENIZER_FILES = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json", "tokenizer.json")
MAX_TOKENIZER_BYTES = 64 << 20
"""Bound of each file; the largest tokenizers have half of it."""
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What JSON of another form than expected raises."""


def check_tokenizer(name: str, folder: str, base_folder: str | None) -> None:
    """Refuse an adapter whose folder has a tokenizer with a token that the base's lacks or has under another id.

    A padding token may be added: it is in no text. Files that are the base's own are not read.

    Args:
        base_folder: folder of the base model's tokenizer; nothing is compared with None, or without a tokenizer.json.

    Raises:
        AdapterError: there is such a token, or a file cannot be opened, is too large, or is no tokenizer's.
    """
    if base_folder is None:
        return
    tokens, padding = set[tuple[int, str]](), set[object]()
    for file in TOKENIZER_FILES:
        path = os.path.join(folder, file)
        if not os.path.lexists(path) or _is_same(path, os.path.join(base_folder, file)):
            continue
        with open_under(name, folder, file) as opened:
            content = opened.read(MAX_TOKENIZER_BYTES + 1)
        if len(content) > MAX_TOKENIZER_BYTES:
            raise AdapterError(name, f"{file} is longer than {MAX_TOKENIZER_BYTES} bytes")
        try:
            fields = _fields(content)
            tokens.update(_added(file, fields))
            pad = fields.get("pad_token")
            padding.add(pad.get("content") if isinstance(pad, dict) else pad)
        except _MALFORMED:
            raise AdapterError(name, f"{file} is not one of a tokenizer") from None
    known = _tokens_of(base_folder) if tokens else None
    if known is None:
        return
    for token_id, token in sorted(tokens):
        if token not in known and token not in padding:
            reason = f"adds the token {token[:100]!r} ({token_id}), which the base model's does not have"
        elif known.get(token, token_id) != token_id:
            reason = f"has the token {token[:100]!r} as {token_id}, and the base model's as {known[token]}"
        else:
            continue
        raise AdapterError(name, f"its tokenizer {reason}; tokens that were added for an adapter are not supported")


def _is_same(path: str, other: str) -> bool:
    with suppress(OSError):
        return filecmp.cmp(path, other, shallow=False)
    return False


@lru_cache(maxsize=8)
def _tokens_of(folder: str) -> Mapping[str, int] | None:
    """Return the ids of a base model's tokens, or None if its vocabulary cannot be read."""
    try:
        with open(os.path.join(folder, "tokenizer.json"), "rb") as opened:
            vocabulary = json.load(opened)["model"]["vocab"]
        if not isinstance(vocabulary, dict):
            vocabulary = {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}
        for file in TOKENIZER_FILES:
            with suppress(FileNotFoundError), open(os.path.join(folder, file), "rb") as opened:
                vocabulary |= {token: token_id for token_id, token in _added(file, _fields(opened.read()))}
    except (OSError, *_MALFORMED):
        return None
    return vocabulary


def _fields(content: bytes) -> dict[str, Any]:
    fields = json.loads(content)
    if not isinstance(fields, dict):
        raise TypeError
    return fields


def _added(file: str, fields: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield the ids and the tokens that a file adds to a vocabulary, in the form of the file."""
    found: Iterable[tuple[object, object]] = ()
    match file:
        case "added_tokens.json":
            found = ((token_id, token) for token, token_id in fields.items())
        case "tokenizer_config.json":
            decoder = fields.get("added_tokens_decoder") or {}
            found = ((int(token_id), token["content"]) for token_id, token in decoder.items())
        case "tokenizer.json":
            found = ((token["id"], token["content"]) for token in fields.get("added_tokens") or ())
    for token_id, token in found:
        if type(token_id) is not int or not isinstance(token, str):
            raise TypeError
        yield token_id, token
