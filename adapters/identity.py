"""Identity of an adapter: the digest of its tensors and its canonical configuration. Names are aliases of digests.

Pure: standard library only. Changed files have a new digest, so nothing keyed by a digest can be stale.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NewType

from adapters.folder import read_config_bytes
from adapters.peft_format import LoraConfig, parse_config
from adapters.tensor_file import TensorEntry, TensorFile, read_tensor_file
from adapters.tensor_names import is_head

AdapterDigest = NewType("AdapterDigest", str)
"""Lower-case hex SHA-256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """One declared adapter: its alias for clients, the folder of its files, and its digest.

    Attributes:
        name: public model name; matches `^[A-Za-z0-9._-]{1,128}$`.
        path: folder with adapter_config.json and adapter_model.safetensors, absolute and resolved.
        digest: identity of the content found there when it was declared.
        invocation_ids: see `LoraConfig`; part of the content.
        num_labels: of its classifier, 0 if it has none; part of the content.
    """

    name: str
    path: str
    digest: AdapterDigest
    invocation_ids: tuple[int, ...] = ()
    num_labels: int = 0


def adapter_digest(folder: str, name: str | None = None) -> AdapterDigest:
    """Return the digest of the adapter in a folder; `name` is used in errors, by default the folder's name.

    Raises:
        AdapterError: a file is missing, leads out of the folder, or is not what it claims to be.
    """
    name = name if name is not None else os.path.basename(os.path.normpath(folder))
    return content_digest(*read_adapter(name, folder))


Check = Callable[[str, LoraConfig, Mapping[str, TensorEntry]], object]
"""Called with an adapter's name, configuration and header entries; raises AdapterError to refuse it."""


def read_adapter(name: str, folder: str, check: Check | None = None) -> tuple[LoraConfig, TensorFile]:
    """Return the configuration and the tensors of the adapter in a folder; `name` is used in errors.

    Args:
        check: called before any tensor data is read.

    Raises:
        AdapterError: a file is missing, leads out of the folder, is not what it claims to be, or `check` raises it.
    """
    config = parse_config(name, read_config_bytes(name, folder))
    return config, read_tensor_file(name, folder, None if check is None else partial(check, name, config))


def labels_in(tensors: TensorFile) -> int:
    """Return the number of labels of an adapter's classifier, 0 without one."""
    heads = (entry for entry in tensors.entry_by_name.values() if is_head(entry.name) and entry.shape)
    return next((entry.shape[0] for entry in heads), 0)


def content_digest(config: LoraConfig, tensors: TensorFile) -> AdapterDigest:
    """Return the digest of an adapter's content."""
    return DigestStream(config, tensors.entry_by_name).over(tensors.data)


class DigestStream:
    """The digest input shared by adapters that differ only in tensor data: all other bytes, and where the data goes.

    Of the configuration only what changes the result is included (rank, alpha and their patterns, in order, rsLoRA,
    invocation tokens, and which tokens have rows of their own); the tensor names tell the targets. Every item carries a
    type tag and its length, so that no two different contents make the same stream of bytes.
    """

    def __init__(self, config: LoraConfig, entry_by_name: Mapping[str, TensorEntry]) -> None:
        items = [
            b"antiphon adapter 1\n",
            _item(b"i", config.rank.to_bytes(8, "little")),
            _item(b"f", struct.pack("<d", config.alpha)),
            _item(b"b", bytes([config.use_rslora])),
        ]
        for tag, patterns in ((b"R", config.rank_pattern), (b"L", config.alpha_pattern)):
            for pattern, value in patterns.items():
                items += _item(tag, pattern.encode("utf-8", "surrogatepass")), _item(b"f", struct.pack("<d", value))
        if config.invocation_ids:
            items.append(_item(b"V", struct.pack(f"<{len(config.invocation_ids)}I", *config.invocation_ids)))
        for module, tokens in config.tokens.items():
            items.append(_item(b"M", module.encode("utf-8", "surrogatepass")))
            items.append(_item(b"K", struct.pack(f"<{len(tokens)}Q", *tokens)))
        self._pieces: list[tuple[bytes, int, int]] = []
        for key, entry in sorted(entry_by_name.items()):
            shape = b"".join(size.to_bytes(8, "little") for size in entry.shape)
            items += _item(b"N", key.encode("utf-8", "surrogatepass")), _item(b"D", entry.dtype.encode())
            items += _item(b"S", shape), _head(b"T", entry.end - entry.start)
            self._pieces.append((b"".join(items), entry.start, entry.end))
            items = []
        self._rest = b"".join(items)

    def over(self, data: bytes | bytearray) -> AdapterDigest:
        """Return the digest for the tensor data of a file."""
        stream, view = hashlib.sha256(), memoryview(data)
        for before, start, end in self._pieces:
            stream.update(before)
            stream.update(view[start:end])
        stream.update(self._rest)
        return AdapterDigest(stream.hexdigest())


def _item(tag: bytes, content: bytes) -> bytes:
    return _head(tag, len(content)) + content


def _head(tag: bytes, num_bytes: int) -> bytes:
    return tag + num_bytes.to_bytes(8, "little")
