"""No record is lost that a disk could hold, whoever dies and whatever was half written."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.accounts import spool
from deployments.accounts.spool import Spool
from deployments.accounts.values import UsageRecord
from tests.architecture.source_tree import ROOT
from tests.deployments.accounts.test_ledger import RECORD

KILLED = """
import os, signal, sys
from dataclasses import replace
from deployments.accounts.spool import Spool
from tests.deployments.accounts.test_ledger import RECORD
spool = Spool(sys.argv[1], "killed")
for number in range(5):
    spool.add(replace(RECORD, record_id=f"r{number}"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def die(spool: Spool) -> None:
    """Let go of the file, as the end of a process does."""
    assert spool._file is not None
    os.close(spool._file)


def test_what_a_killed_gateway_has_written_is_found_by_the_next(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, check=False)
    assert run.returncode == -9
    mine = Spool(str(tmp_path), "mine")
    [(records, path)] = list(mine.orphans())
    assert [record.record_id for record in records] == [f"r{number}" for number in range(5)]
    path.unlink()
    assert list(mine.orphans()) == []


def test_a_file_that_is_not_locked_yet_is_nobody_s_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gateways that start at once: one took the other's file in the moment before it was locked, and removed it."""
    first, flock = Spool(str(tmp_path), "first"), fcntl.flock
    seen: list[object] = []

    def look_first(file: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        seen.extend(first.orphans())
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", look_first)
    second = Spool(str(tmp_path), "second")
    second.add(RECORD)
    assert seen == [] == list(first.orphans())
    die(second)
    assert [records for records, _ in first.orphans()] == [[RECORD]]


def test_a_living_gateway_s_file_is_left_alone(tmp_path: Path) -> None:
    first, second = Spool(str(tmp_path), "first"), Spool(str(tmp_path), "second")
    first.add(RECORD)
    assert list(second.orphans()) == []
    die(first)
    assert [records for records, _ in second.orphans()] == [[RECORD]]


def test_what_is_acknowledged_is_forgotten_and_the_file_is_emptied(tmp_path: Path) -> None:
    mine = Spool(str(tmp_path), "mine")
    for number in range(3):
        mine.add(replace(RECORD, record_id=f"r{number}"))
    assert [record.record_id for record in mine.pending(2)] == ["r0", "r1"]
    mine.acknowledge(mine.pending(2))
    assert mine.num_pending == 1
    assert (tmp_path / "mine.0.jsonl").stat().st_size > 0
    mine.acknowledge(mine.pending(1))
    assert (tmp_path / "mine.0.jsonl").stat().st_size == 0


def test_a_file_that_is_never_empty_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load there is always a record that the ledger has not yet: the file took gigabytes a day."""
    monkeypatch.setattr(spool, "MAX_STALE", 4)
    monkeypatch.setattr(spool, "MAX_MOVED", 2)
    mine = Spool(str(tmp_path), "mine")
    names = [f"r{number}" for number in range(20)]
    for name in names[:2]:
        mine.add(replace(RECORD, record_id=name))
    for name in names[2:]:
        mine.add(replace(RECORD, record_id=name))
        mine.acknowledge(mine.pending(1))
        [file] = tmp_path.iterdir()
        assert file.read_bytes().count(b"record_id") <= 6
    other = Spool(str(tmp_path), "other")
    assert list(other.orphans()) == []
    # A disk that is full leaves everything where it was.
    monkeypatch.setattr(os, "rename", refused)
    for _ in range(5):
        mine.add(RECORD)
        mine.acknowledge(mine.pending(1))
    assert mine.num_pending == 2
    die(mine)
    [(records, _)] = list(other.orphans())
    assert [record.record_id for record in records[-2:]] == ["r1", "r1"]


def refused(*args: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_costs_no_record_while_memory_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Spool(str(tmp_path), "mine")
    mine.add(RECORD)
    write = os.write
    # A disk that takes half of a line, then nothing, and then has room again.
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[: len(line) // 2]))
    mine.add(replace(RECORD, record_id="half"))

    def refuse(file: int, line: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    mine.add(replace(RECORD, record_id="none"))
    monkeypatch.setattr(os, "write", write)
    mine.add(replace(RECORD, record_id="again"))
    assert mine.num_unwritten == 2
    assert [record.record_id for record in mine.pending(9)] == ["r1", "half", "none", "again"]
    die(mine)
    [(records, _)] = list(Spool(str(tmp_path), "other").orphans())
    assert [record.record_id for record in records] == ["r1", "again"]


def records_of(count: int) -> list[UsageRecord]:
    return [replace(RECORD, record_id=f"r{number}") for number in range(count)]


def test_while_the_ledger_is_away_memory_and_disk_are_bounded_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file grew for ever, and all that memory had no room for was lost with it once the ledger was back."""
    monkeypatch.setattr(spool, "MAX_PENDING", 3)
    monkeypatch.setattr(spool, "MAX_SET_ASIDE", 2)
    mine, records = Spool(str(tmp_path), "mine"), records_of(11)
    for record in records:
        mine.add(record)
    assert mine.pending(9) == records[6:9]
    assert (mine.num_set_aside, mine.num_lost) == (6, 2)
    assert [line.levelname for line in caplog.records] == ["ERROR"]
    assert [found for found, _ in mine.orphans()] == [records[:3], records[3:6]]
    mine.acknowledge(mine.pending(9))
    assert sum(path.stat().st_size > 0 for path in tmp_path.iterdir()) == 2


def test_a_full_disk_bounds_memory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "MAX_PENDING", 3)
    mine, records = Spool(str(tmp_path), "mine"), records_of(5)
    monkeypatch.setattr(os, "write", refused)
    for record in records:
        mine.add(record)
    assert (mine.pending(9), mine.num_set_aside, mine.num_lost) == (records[:3], 0, 2)


def test_a_full_file_stays_in_use_if_there_is_no_room_for_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "MAX_PENDING", 3)
    mine, records = Spool(str(tmp_path), "mine"), records_of(5)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refused)
        for record in records[:4]:
            mine.add(record)
    mine.acknowledge(records[:1])
    mine.add(records[4])
    die(mine)
    [(found, _)] = list(Spool(str(tmp_path), "other").orphans())
    assert (found, mine.num_lost) == ([*records[:3], records[4]], 1)


def test_what_is_set_aside_while_it_is_being_sent_takes_no_other_record_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "MAX_PENDING", 3)
    mine, records = Spool(str(tmp_path), "mine"), records_of(5)
    for record in records[:3]:
        mine.add(record)
    sent = mine.pending(2)
    for record in records[3:]:
        mine.add(record)
    mine.acknowledge(sent)
    assert mine.pending(9) == records[3:]
    die(mine)
    assert [found for found, _ in Spool(str(tmp_path), "other").orphans()] == [records[:3], records[3:]]


def test_a_folder_that_cannot_be_made_leaves_records_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    mine = Spool(str(tmp_path / "file" / "folder"), "mine")
    mine.add(RECORD)
    assert (mine.num_pending, mine.num_unwritten) == (1, 1)


def test_a_gateway_that_starts_on_a_full_disk_has_a_file_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept its records in memory alone for as long as it lived, and they were lost with it."""
    folder = tmp_path / "antiphon" / "usage"
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refused)
        mine = Spool(str(folder), "mine")
        mine.add(RECORD)
        mine.add(replace(RECORD, record_id="r2"))
        mine.acknowledge(mine.pending(1))
        assert (mine.num_pending, mine.num_unwritten, list(folder.iterdir())) == (1, 2, [])
    mine.add(replace(RECORD, record_id="r3"))
    mine.acknowledge(mine.pending(1))
    assert mine.num_unwritten == 0
    mine.add(replace(RECORD, record_id="r4"))
    die(mine)
    [(records, _)] = list(Spool(str(folder), "other").orphans())
    assert [record.record_id for record in records] == ["r3", "r4"]
