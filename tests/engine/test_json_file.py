from __future__ import annotations

from pathlib import Path

import pytest

from engine.decoder.json_file import MAX_CONFIG_BYTES, read_json
from engine.decoder.reading import read_spec
from engine.errors import CheckpointError


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b" " * (MAX_CONFIG_BYTES + 1)], ids=range(6)
)
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_spec(str(tmp_path))


def test_a_larger_file_is_read_by_who_expects_one(tmp_path: Path) -> None:
    (tmp_path / "large.json").write_bytes(b"{}" + b" " * MAX_CONFIG_BYTES)
    assert read_json(tmp_path / "large.json", max_bytes=2 * MAX_CONFIG_BYTES) == {}


def test_of_a_file_that_is_too_large_only_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "large.json").write_bytes(b"{}  ")
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/large\.json: larger than 3 bytes\.$"):
        read_json(tmp_path / "large.json", max_bytes=3)
