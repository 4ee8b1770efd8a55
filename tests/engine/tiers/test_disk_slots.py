"""The tier on disk gives back what was written, over restarts too, or nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.prefix_index import BlockName
from engine.errors import ConfigError
from engine.ports import KeptBlock
from engine.tiers.disk_slots import PAGE_BYTES, RECORD, DiskSlots

NUM_SLOTS, BLOCK_BYTES = 4, 96


def open_slots(folder: Path, fingerprint: str = "weights", title: str = "model") -> DiskSlots:
    return DiskSlots(folder, title, fingerprint, num_slots=NUM_SLOTS, block_bytes=BLOCK_BYTES)


def a_name(number: int) -> BlockName:
    return BlockName(bytes([number]) * 32)


def content(number: int) -> torch.Tensor:
    return torch.full((BLOCK_BYTES,), number, dtype=torch.uint8)


def the_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@given(writes=st.lists(st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(0, 2)), max_size=12))
def test_a_slot_gives_back_what_it_was_last_given_after_a_restart_too(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("kv")
    slots, held = open_slots(folder), {}
    for slot, version in writes:
        number = 10 * slot + version
        slots.write(slot, a_name(number), number, content(number))
        held[slot] = number
    for again in (slots, None):
        if again is None:
            slots.close()
            again = open_slots(folder)
        for slot in range(NUM_SLOTS):
            for number in range(10 * slot, 10 * slot + 3):
                found = again.read(slot, a_name(number))
                assert (found is not None) == (held.get(slot) == number)
                assert found is None or torch.equal(found, content(number))
    again.close()


def test_contents_come_back_in_the_order_of_their_writes_each_name_once(tmp_path: Path) -> None:
    slots = open_slots(tmp_path)
    for slot, number in ((2, 1), (0, 2), (1, 3), (2, 4), (3, 2)):
        slots.write(slot, a_name(number), number + 10, content(number))
    slots.close()
    found = open_slots(tmp_path).contents()
    assert found == [KeptBlock(a_name(2), 12, 0), KeptBlock(a_name(3), 13, 1), KeptBlock(a_name(4), 14, 2)]


def test_what_was_written_after_a_restart_is_the_newest_after_the_next(tmp_path: Path) -> None:
    for slot in (2, 1, 0):
        slots = open_slots(tmp_path)
        slots.write(slot, a_name(slot), 0, content(slot))
        slots.close()
    assert [block.slot for block in open_slots(tmp_path).contents()] == [2, 1, 0]


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    slots = open_slots(tmp_path)
    slots.write(0, a_name(1), 0, content(1))
    slots.close()
    other = open_slots(tmp_path, "other weights")
    assert other.contents() == []
    assert other.read(0, a_name(1)) is None
    other.close()
    assert open_slots(tmp_path).contents() == []


def test_each_engine_has_a_file_of_its_own_that_only_its_user_reads(tmp_path: Path) -> None:
    first, second = open_slots(tmp_path), open_slots(tmp_path)
    first.write(0, a_name(1), 0, content(1))
    assert second.read(0, a_name(1)) is None
    assert len([*tmp_path.iterdir()]) == 2
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    first.close()
    second.close()
    for path in tmp_path.iterdir():
        path.chmod(0o666)
    assert len(open_slots(tmp_path).contents()) == 1
    assert 0o600 in {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}


def test_a_restart_after_a_rolling_update_finds_what_the_new_version_wrote(tmp_path: Path) -> None:
    """The first free file was taken, emptied as it was the old version's, and the one that fits lay unused."""
    old, new = open_slots(tmp_path, "old"), open_slots(tmp_path, "new")
    new.write(0, a_name(1), 0, content(1))
    old.close()
    new.close()
    assert [block.name for block in open_slots(tmp_path, "new").contents()] == [a_name(1)]
    assert open_slots(tmp_path, "old").contents() == []
    assert len([*tmp_path.iterdir()]) == 2


def test_of_the_files_that_fit_the_one_written_last_is_taken(tmp_path: Path) -> None:
    both = [open_slots(tmp_path), open_slots(tmp_path)]
    for number, slots in enumerate(both, 1):
        slots.write(0, a_name(number), 0, content(number))
        slots.close()
    first, second = sorted(tmp_path.iterdir())
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    assert [open_slots(tmp_path).contents()[0].name for _ in both] == [a_name(2), a_name(1)]


@pytest.mark.parametrize("at", [-1, -BLOCK_BYTES * NUM_SLOTS, -BLOCK_BYTES * NUM_SLOTS + 40])
def test_a_byte_that_changed_is_noticed(tmp_path: Path, at: int) -> None:
    slots = open_slots(tmp_path)
    for slot in range(NUM_SLOTS):
        slots.write(slot, a_name(slot), slot, content(slot))
    path = the_file(tmp_path)
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END)
        file.write(b"\xff")
    damaged = (path.stat().st_size + at - (path.stat().st_size - BLOCK_BYTES * NUM_SLOTS)) // BLOCK_BYTES
    assert [slots.read(slot, a_name(slot)) is None for slot in range(NUM_SLOTS)] == [
        slot == damaged for slot in range(NUM_SLOTS)
    ]


def test_records_overwritten_with_ones_are_not_there_and_leave_the_file_usable(tmp_path: Path) -> None:
    """What a flash drive reads of an erased page: the highest number there is, after which none could follow."""
    slots = open_slots(tmp_path)
    for slot in range(NUM_SLOTS):
        slots.write(slot, a_name(slot), slot, content(slot))
    slots.close()
    with open(the_file(tmp_path), "r+b") as file:
        file.seek(PAGE_BYTES + RECORD.size)
        file.write(b"\xff" * (2 * RECORD.size))
    slots = open_slots(tmp_path)
    assert [block.slot for block in slots.contents()] == [0, 3]
    slots.write(1, a_name(9), 9, content(9))
    slots.close()
    slots = open_slots(tmp_path)
    assert [block.slot for block in slots.contents()] == [0, 3, 1]
    assert torch.equal(slots.read(1, a_name(9)), content(9))  # type: ignore[arg-type]


def test_a_file_that_was_cut_short_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    slots = open_slots(tmp_path)
    for slot in range(NUM_SLOTS):
        slots.write(slot, a_name(slot), slot, content(slot))
    slots.close()
    path = the_file(tmp_path)
    os.truncate(path, path.stat().st_size - BLOCK_BYTES - 1)
    again = open_slots(tmp_path)
    assert [again.read(slot, a_name(slot)) is not None for slot in range(NUM_SLOTS)] == [True, True, False, False]
    os.truncate(path, 10)
    assert again.read(0, a_name(0)) is None


def test_a_write_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = open_slots(tmp_path)

    def full(file: int, numbers: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        slots.write(0, a_name(1), 0, content(1))
    monkeypatch.undo()
    assert slots.read(0, a_name(1)) is None


def test_a_write_that_stops_half_way_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, write = open_slots(tmp_path), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, numbers, at: write(file, numbers[:20], at))
    slots.write(0, a_name(1), 0, content(1))
    slots.close()
    found = open_slots(tmp_path).read(0, a_name(1))
    assert found is not None
    assert torch.equal(found, content(1))


def test_what_a_disk_does_not_read_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = open_slots(tmp_path)
    slots.write(0, a_name(1), 0, content(1))

    def fail(*asked: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    assert slots.read(0, a_name(1)) is None


def test_a_folder_that_is_none_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv_disk_folder: .*file cannot be used: (Not a directory|File exists)"):
        open_slots(tmp_path / "file")


def test_more_slots_than_a_file_can_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_disk_folder: .* cannot be used"):
        DiskSlots(tmp_path, "m", "f", num_slots=1, block_bytes=1 << 63)
