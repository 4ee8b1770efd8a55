from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from adapters.private_file import make_private, make_private_folder


def test_a_new_file_and_an_older_one_are_the_owner_s_only(tmp_path: Path) -> None:
    older = [tmp_path / name for name in ("old", "old-wal", "old-shm")]
    for path in older:
        path.write_bytes(b"kept")
        path.chmod(0o644)
    make_private(tmp_path / "old")
    make_private(tmp_path / "new")
    for path in (*older, tmp_path / "new"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert older[0].read_bytes() == b"kept"


def test_nobody_else_enters_a_folder_or_those_above_it(tmp_path: Path) -> None:
    """All parts of a server keep theirs in `.antiphon`, and whichever came first let others in."""
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        for _ in range(2):
            make_private_folder(tmp_path / "antiphon" / "usage")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "antiphon" / "usage", tmp_path / "antiphon")]
    assert modes == [0o700, 0o700]
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755, "it was there"
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="exists"):
        make_private_folder(tmp_path / "file")


def test_a_folder_is_not_touched(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(IsADirectoryError):
        make_private(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
