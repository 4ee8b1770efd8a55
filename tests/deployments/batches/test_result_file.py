from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deployments.batches.lines import failed_line
from deployments.batches.result_file import ResultFile
from tests.deployments.batches.batch_world import Fate, fateful_files

LINES = {name: failed_line("i", name, "code", "x" * size) for name, size in (("a", 5), ("b", 500), ("c", 1))}
WHOLE = b"".join(LINES.values())


@settings(max_examples=30)
@example(cut=len(LINES["a"]) - 1)
@given(cut=st.integers(0, len(WHOLE)))
def test_a_file_that_was_cut_anywhere_has_its_whole_lines_and_goes_on(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "out"
    path.write_bytes(WHOLE[:cut])
    file = ResultFile(str(path))
    left = [name for name in LINES if name not in file.custom_ids]
    assert left == list(LINES)[len(file.custom_ids) :]
    file.append({name: LINES[name] for name in left})
    file.close()
    assert path.read_bytes() == WHOLE


@pytest.mark.parametrize("full_at", range(1, 10))
def test_what_a_full_disk_has_cut_is_no_part_of_the_file(tmp_path: Path, full_at: int) -> None:
    path = tmp_path / "out"
    with fateful_files(Fate(full_at=frozenset({full_at}))):
        file = ResultFile(str(path))
        left = list(LINES)
        while left:
            # The others come between the failure and its second try.
            name = left.pop(0)
            try:
                file.append({name: LINES[name]})
            except OSError:
                left.append(name)
        file.close()
    assert sorted(path.read_bytes().splitlines(keepends=True)) == sorted(LINES.values())
    again = ResultFile(str(path))
    assert again.custom_ids == set(LINES)
    again.close()


def test_a_short_line_over_a_long_one_that_was_cut_leaves_nothing_of_it(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with fateful_files(Fate(full_at=frozenset({1}))):
        file = ResultFile(str(path))
        with pytest.raises(OSError, match="No space left"):
            file.append({"b": LINES["b"], "a": LINES["a"]})
        file.append({"c": LINES["c"]})
        file.close()
    assert path.read_bytes() == LINES["c"]


def test_a_line_counts_once_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ResultFile(str(tmp_path / "out"))
    synced: list[tuple[int, set[str]]] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append((os.fstat(number).st_size, {*file.custom_ids})))
    file.append({"a": LINES["a"]})
    assert synced == [(len(LINES["a"]), set())]
    file.close()


def test_lines_that_a_crash_has_spoilt_end_the_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(LINES["a"] + b"\0\0\0\n" + LINES["b"])
    file = ResultFile(str(path))
    assert file.custom_ids == {"a"}
    file.close()
    assert path.read_bytes() == LINES["a"]
