from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.identity import AdapterDigest, AdapterRef
from app.known_adapters import KnownAdapters

REF = AdapterRef(name="sql", path="/sql", digest=AdapterDigest("d"), invocation_ids=(3, 1), num_labels=2)


class Reader:
    """Counts how often the adapter is read."""

    def __init__(self) -> None:
        self.num_read = 0

    def __call__(self) -> AdapterRef:
        self.num_read += 1
        return REF


def test_what_was_read_once_is_known_to_later_starts_until_something_differs(tmp_path: Path) -> None:
    path, read = tmp_path / "new" / "known.json", Reader()
    for _ in range(3):
        known = KnownAdapters(path)
        assert known.reference(read, "rules", ("a", 1)) == REF
        known.save()
    assert read.num_read == 1
    known = KnownAdapters(path)
    for decides in (("rules", ("a", 2)), ("other rules", ("a", 1))):
        known.reference(read, *decides)
    assert read.num_read == 3
    known.save()
    KnownAdapters(path).reference(read, "rules", ("a", 1))
    assert read.num_read == 4, "what nobody has asked for is forgotten"
    assert sorted(tmp_path.joinpath("new").iterdir()) == [path]
    assert path.stat().st_mode & 0o077 == 0


def test_a_file_of_a_release_without_classifiers_is_read(tmp_path: Path) -> None:
    path, read = tmp_path / "known.json", Reader()
    known = KnownAdapters(path)
    known.reference(read, "a")
    known.save()
    path.write_text(json.dumps({key: values[:4] for key, values in json.loads(path.read_text()).items()}))
    assert KnownAdapters(path).reference(read, "a") == replace(REF, num_labels=0)
    assert read.num_read == 1


def test_nothing_is_kept_without_a_file() -> None:
    read = Reader()
    for _ in range(2):
        known = KnownAdapters()
        known.reference(read, "a")
        known.save()
    assert read.num_read == 2


@pytest.mark.parametrize("content", ["", "[]", '{"k": 1}', '{"k": ["a", "b"]}', '{"k": ["a", "b", "c", 4]}'])
def test_a_damaged_file_costs_a_reading(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str) -> None:
    path, read = tmp_path / "known.json", Reader()
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        known = KnownAdapters(path)
    assert "known.json cannot be read" in caplog.text
    assert known.reference(read, "a") == REF
    known.save()
    assert len(json.loads(path.read_text())) == 1


def test_a_file_that_cannot_be_written_costs_a_reading_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    known = KnownAdapters(tmp_path / "file" / "known.json")
    assert known.reference(Reader(), "a") == REF
    with caplog.at_level(logging.WARNING):
        known.save()
    assert "cannot be written" in caplog.text
