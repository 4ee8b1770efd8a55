from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray.experimental import internal_kv

from app.cluster_memory import remembered


def test_outside_of_a_cluster_nothing_is_remembered() -> None:
    assert remembered("secret", lambda: b"one") == b"one"
    assert remembered("secret", lambda: b"two") == b"two"


def test_in_a_cluster_the_first_build_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: dict[tuple[str, str], bytes] = {}

    def put(name: str, value: bytes, *, overwrite: bool, namespace: str) -> None:
        assert not overwrite
        stored.setdefault((namespace, name), value)

    monkeypatch.setattr(internal_kv, "_internal_kv_initialized", lambda: True)
    monkeypatch.setattr(internal_kv, "_internal_kv_put", put)
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda name, *, namespace: stored[namespace, name])
    made: Iterator[bytes] = iter([b"one", b"two", b"three"])
    assert [remembered(name, lambda: next(made)) for name in ("secret", "secret", "other")] == [
        b"one",
        b"one",
        b"three",
    ]
