"""What an adapter is: the digest of its tensors and its canonical configuration. Names are aliases of digests.

Pure: standard library only. A reload of changed files is a new digest, so that nothing keyed by it can be stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

AdapterDigest = NewType("AdapterDigest", str)
"""Lower-case hex SHA-256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """One declared adapter: the alias that clients use, where its files lie, and what it is.

    Attributes:
        name: public model name; matches `^[A-Za-z0-9._-]{1,128}$`.
        path: folder with adapter_config.json and adapter_model.safetensors, absolute and resolved.
        digest: identity of the content found there when it was declared.
    """

    name: str
    path: str
    digest: AdapterDigest
