from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from adapters.errors import AdapterError, AdapterUnavailableError
from adapters.folder import open_under, refuse_pickle


@pytest.mark.parametrize("file", ["../secret", "sub/../../secret", "/etc/hostname"])
def test_no_file_outside_the_folder_is_opened(tmp_path: Path, file: str) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "mine" / "sub").mkdir(parents=True)
    with pytest.raises(AdapterError), open_under("demo", str(tmp_path / "mine"), file):
        pass


def test_a_folder_beside_with_the_same_beginning_is_outside(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine2").mkdir()
    (tmp_path / "mine2" / "x").write_text("x")
    with pytest.raises(AdapterError, match="leads out"), open_under("demo", str(tmp_path / "mine"), "../mine2/x"):
        pass


def test_a_folder_reached_over_a_link_counts_as_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("yes")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with open_under("demo", str(tmp_path / "link"), "x") as opened:
        assert opened.read() == b"yes"


def snapshot_of_the_hub(repository: Path, target: str) -> str:
    """Make what the hub's client makes: a folder of links to the repository's blobs."""
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "1234").write_text("yes")
    (snapshot / "x").symlink_to(target)
    return str(snapshot)


def test_a_snapshot_of_the_hub_is_links_to_its_repository_s_blobs(tmp_path: Path) -> None:
    snapshot = snapshot_of_the_hub(tmp_path / "models--org--name", "../../blobs/1234")
    with open_under("demo", snapshot, "x") as opened:
        assert opened.read() == b"yes"


@pytest.mark.parametrize(
    ("repository", "target"),
    [
        ("models--org--name", "../../secret"),
        ("models--org--name", "../../blobs/../secret"),
        ("models--org--name", "../../../models--org--other/blobs/1234"),
        ("name", "../../blobs/1234"),
    ],
)
def test_a_snapshot_leads_to_nothing_but_its_own_blobs(tmp_path: Path, repository: str, target: str) -> None:
    (tmp_path / "models--org--other" / "blobs").mkdir(parents=True)
    (tmp_path / "models--org--other" / "blobs" / "1234").write_text("no")
    snapshot = snapshot_of_the_hub(tmp_path / repository, target)
    (tmp_path / repository / "secret").write_text("no")
    with pytest.raises(AdapterError, match="leads out"), open_under("demo", snapshot, "x"):
        pass


def test_a_pickle_beside_safetensors_is_simply_not_read(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    refuse_pickle("demo", str(tmp_path))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.EACCES])
def test_what_this_machine_cannot_open_now_is_no_fault_of_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / "x").write_text("yes")

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        with pytest.raises(AdapterError, match="x cannot be opened") as raised, open_under("demo", str(tmp_path), "x"):
            pass
    assert isinstance(raised.value, AdapterUnavailableError) == (number != errno.EACCES)
