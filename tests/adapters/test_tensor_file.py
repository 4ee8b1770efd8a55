from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.errors import AdapterError
from adapters.tensor_file import read_tensor_file
from tests.adapters.handmade import make_tensors, write


def write_raw(folder: Path, header: object, data: bytes = b"", length: int | None = None) -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = (len(text) if length is None else length).to_bytes(8, "little")
    (folder / "adapter_model.safetensors").write_bytes(prefix + text + data)
    return str(folder)


def tensor(shape: Any, start: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_a_file_written_by_safetensors_reads_back_to_the_byte(tmp_path: Path) -> None:
    tensors = make_tensors(dtype=torch.bfloat16)
    read = read_tensor_file("demo", write(tmp_path, tensors=tensors))
    assert set(read.entry_by_name) == set(tensors)
    for key, value in tensors.items():
        entry = read.entry_by_name[key]
        assert (entry.dtype, entry.shape) == ("BF16", tuple(value.shape))
        assert bytes(read.bytes_of(entry)) == value.view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize(
    ("header", "data", "word"),
    [
        ({"x": tensor([10**9, 10**9], 0, 4 * 10**18)}, b"", "range of bytes"),
        ({"x": tensor([10**9, 1], 0, 4)}, b"1234", "does not hold|do not hold"),
        ({"x": tensor([2], 0, 8)}, b"1234", "truncated"),
        ({"x": tensor([1], 0, 4)}, b"12345678", "padded"),
        ({"x": tensor([1], 0, 4), "y": tensor([1], 0, 4)}, b"1234", "overlaps"),
        ({"x": tensor([1], 0, 4), "y": tensor([1], 8, 12)}, b"1" * 12, "gap"),
        ({"x": tensor([1], 4, 8)}, b"1" * 8, "gap"),
        ({"x": tensor([-1], 0, 4)}, b"1234", "shape"),
        ({"x": tensor([True], 0, 4)}, b"1234", "shape"),
        ({"x": tensor("1", 0, 4)}, b"1234", "shape"),
        ({"x": tensor([1.0], 0, 4)}, b"1234", "shape"),
        ({"x": tensor([1] * 9, 0, 4)}, b"1234", "shape"),
        ({"x": tensor([1], 4, 0)}, b"1234", "data_offsets"),
        ({"x": tensor([1], 0, 8, "F64")}, b"1" * 8, "dtype"),
        ({"x": tensor([1], 0, 4, ["F32"])}, b"1234", "dtype"),
        ({"x": {"dtype": "F32"}}, b"", "described"),
        ({"x": 5}, b"", "described"),
        ([], b"", "JSON"),
        (b"{" * 50_000, b"", "JSON"),
        (b"\xff\xff", b"", "JSON"),
        (b'{"x": 1, "x": 2}', b"", "JSON"),
        ({"x": tensor([1], 0, 2, "F16"), "y": tensor([1], 2, 6)}, b"1" * 6, "multiple"),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(tmp_path: Path, header: object, data: bytes, word: str) -> None:
    with pytest.raises(AdapterError, match=word):
        read_tensor_file("demo", write_raw(tmp_path, header, data))


def test_a_header_longer_than_the_file_or_the_bound_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="truncated"):
        read_tensor_file("demo", write_raw(tmp_path, {}, length=2**63))
    path = tmp_path / "adapter_model.safetensors"
    with path.open("wb") as opened:
        opened.write((1 << 30).to_bytes(8, "little"))
        opened.truncate(2 << 30)  # sparse
    with pytest.raises(AdapterError, match="header"):
        read_tensor_file("demo", str(tmp_path))


@pytest.mark.parametrize("size", [0, 5, 8, 100, 700])
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    folder = write(tmp_path)
    os.truncate(tmp_path / "adapter_model.safetensors", size)
    with pytest.raises(AdapterError):
        read_tensor_file("demo", folder)


def test_a_pickle_is_refused_by_name_and_never_opened(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR.")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin is a pickle"):
        read_tensor_file("demo", str(tmp_path))
    assert not canary.exists()


def test_a_link_out_of_the_folder_is_refused_and_one_inside_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "other")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "adapter_model.safetensors").symlink_to(tmp_path / "other" / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="leads out") as caught:
        read_tensor_file("demo", str(folder))
    assert str(tmp_path) not in str(caught.value)
    (folder / "adapter_model.safetensors").unlink()
    write(folder)
    (folder / "adapter_model.safetensors").rename(folder / "v2.safetensors")
    (folder / "adapter_model.safetensors").symlink_to("v2.safetensors")
    assert read_tensor_file("demo", str(folder)).entry_by_name


def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="regular"):
        read_tensor_file("demo", str(tmp_path))
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.safetensors").mkdir()
    with pytest.raises(AdapterError, match="regular"):
        read_tensor_file("demo", str(tmp_path))


@pytest.mark.parametrize("folder", ["/no/such/folder", "nul\0byte", ""])
def test_a_folder_that_is_not_there_is_refused(folder: str) -> None:
    with pytest.raises(AdapterError):
        read_tensor_file("demo", folder)
